"""How an engine serves the extended model, with the window that it was trained for."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote
from typing import Any, NamedTuple

from rope_extend.checkpoint.export.support import support
from rope_extend.encodings import Encoding, RopeShape


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


@dataclass(frozen=True)
class Extension:
    """What is served: a model with an encoding, trained or not.

    Attributes:
        model: the base model, a directory or hub id.
        model_type: its family.
        encoding: the position encoding.
        shape: the rotary shape of the pretrained model.
        target_length: the extended window in tokens.
        method: the name of the encoding's method.
        run: the directory of the fine-tuned adapter; None if nothing is trained.
        stated: the pretrained window in tokens, if the config is wrong about it; otherwise None.
    """

    model: str
    model_type: str
    encoding: Encoding
    shape: RopeShape
    target_length: int
    method: str
    run: str | None
    stated: int | None = None


def serving(extension: Extension, engine: str) -> Serving:
    """Commands and config with which an engine serves an extension.

    The window is stated wherever the engine reads it, so that training and serving agree.

    Raises:
        RopeExtendError: an unknown engine.
    """
    form = support(
        extension.encoding,
        extension.shape,
        engine,
        extension.model_type,
        target_length=extension.target_length,
    )
    if form.possible:
        config = {} if engine == "llama.cpp" else dict(form.form or {})
        steps = _of_adapter(extension, engine) if extension.run else _untrained(extension, engine)
        return Serving(engine, True, form.reason, config, tuple(steps))
    steps = []
    if engine == "transformers":  # rope_extend loads it there
        steps = _python(f"model = rx.load({extension.run!r})") if extension.run else _extended(extension)
    return Serving(engine, False, form.reason, {}, tuple(steps))


def _of_adapter(extension: Extension, engine: str) -> list[Step]:
    """Exports a fine-tuned adapter and serves it."""
    assert extension.run is not None
    run, output = quote(extension.run), f"{extension.run}-{engine.replace('.', '')}"
    if engine == "llama.cpp":
        merged = quote(f"{extension.run}-merged")
        return [*_shell(f"rope-extend merge {run} --output {merged}"), *_gguf(merged, output, extension)]
    export = _shell(f"rope-extend export {run} --to {engine} --output {quote(output)}")
    if engine == "transformers":
        return [*export, *_python(f"model = AutoModelForCausalLM.from_pretrained({output!r})")]
    return [*export, *_shell(_server(extension, engine, output))]


def _untrained(extension: Extension, engine: str) -> list[Step]:
    """Writes the base model with its encoding, and serves it."""
    if engine == "llama.cpp":
        saved = _python(
            f"tokenizer = AutoTokenizer.from_pretrained({extension.model!r})",
            "rx.save(model, 'extended', tokenizer)",
        )
        return [*_extended(extension), *saved, *_gguf("extended", "for-llamacpp", extension)]
    output = f"for-{engine}"
    written = [*_extended(extension), *_python(f"rx.export(model, {output!r}, {engine!r})")]
    if engine == "transformers":
        return [*written, *_python(f"model = AutoModelForCausalLM.from_pretrained({output!r})")]
    return [*written, *_shell(_server(extension, engine, output))]


def _extended(extension: Extension) -> list[Step]:
    stated = f", trained_length={extension.stated}" if extension.stated else ""
    return _python(
        f"model = AutoModelForCausalLM.from_pretrained({extension.model!r}, dtype='auto')",
        f"rx.extend(model, {extension.target_length}, {extension.method!r}{stated})",
    )


def _python(*lines: str) -> list[Step]:
    return [Step("python", line) for line in lines]


def _shell(*lines: str) -> list[Step]:
    return [Step("shell", line) for line in lines]


def _server(extension: Extension, engine: str, directory: str) -> str:
    tokens = extension.target_length
    tokenizer = None if extension.run else quote(extension.model)  # an adapter's export has its tokenizer
    if engine == "vllm":
        named = f" --tokenizer {tokenizer}" if tokenizer else ""
        return f"vllm serve {quote(directory)}{named} --max-model-len {tokens}"
    named = f" --tokenizer-path {tokenizer}" if tokenizer else ""
    return f"python -m sglang.launch_server --model-path {quote(directory)}{named} --context-length {tokens}"


def _gguf(checkpoint: str, output: str, extension: Extension) -> list[Step]:
    return _shell(
        f"python convert_hf_to_gguf.py {checkpoint} --outfile model.gguf",
        f"rope-extend export {checkpoint} --to llama.cpp --gguf model.gguf --output {quote(output)}",
        f"llama-server -m {quote(output)}/model.gguf -c {extension.target_length}",
    )
