"""How an engine serves the extended model, with the window that it was trained for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote
from typing import Any, NamedTuple

from rope_extend.advice.question import Question
from rope_extend.checkpoint.export.support import support
from rope_extend.checkpoint.export.targets import TARGETS, commands
from rope_extend.models.gguf_checkpoint import CONVERT, gguf_file
from rope_extend.models.gguf_metadata import gguf_metadata


class Step(NamedTuple):
    """One line to run: its language, `python` or `shell`, and its text."""

    language: str
    line: str


@dataclass(frozen=True)
class Serving:
    """How an engine serves the extended model.

    Attributes:
        engine: one of the export targets.
        possible: whether it computes the encoding without rope_extend.
        reason: in which form, or why not.
        config: the keys of `config.json` that describe the encoding to this engine; empty for llama.cpp,
            whose file holds them, and if it is not possible.
        steps: what to run, in order. Python comes after `import rope_extend as rx` and transformers' auto
            classes.
    """

    engine: str
    possible: bool
    reason: str
    config: dict[str, Any]
    steps: tuple[Step, ...]


def serving(question: Question, method: str, run: str | None) -> Serving | None:
    """Commands and config with which the engine serves a method; None if no engine was chosen.

    The window is stated wherever the engine reads it, so that training and serving agree.

    Args:
        question: the model, its target and the engine.
        method: the name of the method.
        run: the directory of the fine-tuned adapter; None if nothing is trained.
    """
    if (engine := question.engine) is None:
        return None
    form = support(
        question.encoding(method), question.shape, engine, question.model_type, target_length=question.target
    )
    config = {} if TARGETS[engine].reads == "gguf" else dict(form.form or {})
    steps = tuple(_steps(question, engine, method, run, form.possible))
    return Serving(engine, form.possible, form.reason, config, steps)


def _steps(question: Question, engine: str, method: str, run: str | None, possible: bool) -> Iterator[Step]:
    model, reads, base = question.model, TARGETS[engine].reads, ""
    file = gguf_file(model)
    if file is not None and (possible or (reads == "stock" and not run)):
        # Merging, stock transformers and the servers need a checkpoint.
        base = f"{run}-base" if run else "converted"
        dtype = "" if gguf_metadata(file).float32 else " --dtype bfloat16"
        yield Step("shell", f"{CONVERT} {quote(model)}{dtype} --output {quote(base)}")
        model = base
    stated = f", trained_length={question.stated}" if question.stated else ""
    extended = (
        f"model = AutoModelForCausalLM.from_pretrained({model!r}, dtype='auto')",
        f"rx.extend(model, {question.target}, {method!r}{stated})",
    )
    if not possible:
        if reads == "stock":  # rope_extend loads it there
            yield from _python(*([f"model = rx.load({run!r})"] if run else extended))
        return
    checkpoint, weights = run or "extended", ""
    if run is None:
        tokenizer = f"tokenizer = AutoTokenizer.from_pretrained({model!r})"
        yield from _python(*extended, tokenizer, "rx.save(model, 'extended', tokenizer)")
        base, weights = "", str(file or "")
    elif reads == "gguf":
        checkpoint, option = f"{run}-merged", f" --base-model {quote(base)}" if base else ""
        yield Step("shell", f"rope-extend merge {quote(run)}{option} --output {quote(checkpoint)}")
        base = ""
    for line in commands(engine, checkpoint, question.target, base_model=base, gguf=weights):
        yield Step("shell", line)
    if reads == "stock":
        yield from _python(f"model = AutoModelForCausalLM.from_pretrained({f'{checkpoint}-{engine}'!r})")


def _python(*lines: str) -> Iterator[Step]:
    return (Step("python", line) for line in lines)
