"""The commands that measure an extension, with its control."""

from __future__ import annotations

from shlex import quote

from rope_extend.advice.question import Question
from rope_extend.units import format_length


def measuring_commands(question: Question, methods: list[str], run: str | None = None) -> tuple[str, ...]:
    """The commands that measure perplexity and passkeys, of untrained methods or of a run."""
    window, target = format_length(question.extended), format_length(question.target)
    stated = f" --trained-length {format_length(question.stated)}" if question.stated else ""
    models = quote(question.model) + (f" {quote(run)}" if run else "")
    what = f"{models} --methods {','.join(methods)} --lengths {window},{target}{stated}"
    data, output = "--data path/to/long/documents", run or "untrained"
    retrieval = f"rope-extend retrieve {what} --output {quote(output + '-passkeys')}"
    if question.current is None:
        return (f"rope-extend evaluate {what} {data} --output {quote(output + '-perplexity')}", retrieval)
    cropped = f"--protocol cropped --window {window} --lengths {target}{stated}"
    return (
        # The control of `evaluate` is plain RoPE cropped to the pretrained window, which is another model.
        f"rope-extend evaluate {what} --no-cropped {data} --output {quote(output + '-perplexity')}",
        f"rope-extend evaluate {quote(question.model)} --methods {','.join(methods)} {cropped} --no-cropped "
        f"{data} --output {quote(output + '-cropped')}",
        retrieval,
    )
