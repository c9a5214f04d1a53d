"""How an engine serves the extended model, with the window that it was trained for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from rope_extend.checkpoint.export.gguf import is_float32
from rope_extend.checkpoint.export.support import support
from rope_extend.encodings import Encoding, RopeShape
from rope_extend.models.gguf_checkpoint import CONVERT, gguf_file


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
        model: the base model, a directory, hub id or GGUF file.
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
    file = gguf_file(extension.model)
    steps: list[Step] = []
    base = ""
    if file is not None and (form.possible or not extension.run):
        # Merging, stock transformers and the servers need a checkpoint.
        converted = f"{extension.run}-base" if extension.run else "converted"
        dtype = "" if is_float32(file) else " --dtype bfloat16"
        steps = _shell(f"{CONVERT} {quote(extension.model)}{dtype} --output {quote(converted)}")
        extension, base = replace(extension, model=converted), f" --base-model {quote(converted)}"
    if form.possible:
        config = {} if engine == "llama.cpp" else dict(form.form or {})
        steps += (
            _of_adapter(extension, engine, base) if extension.run else _untrained(extension, engine, file)
        )
        return Serving(engine, True, form.reason, config, tuple(steps))
    if engine == "transformers":  # rope_extend loads it there
        steps += _python(f"model = rx.load({extension.run!r})") if extension.run else _extended(extension)
    return Serving(engine, False, form.reason, {}, tuple(steps))


def _of_adapter(extension: Extension, engine: str, base: str) -> list[Step]:
    """Exports a fine-tuned adapter and serves it; `base` is the flag for its base model, if it needs one."""
    assert extension.run is not None
    run, output = quote(extension.run), f"{extension.run}-{engine.replace('.', '')}"
    if engine == "llama.cpp":
        merged = f"{extension.run}-merged"
        merge = _shell(f"rope-extend merge {run}{base} --output {quote(merged)}")
        return [*merge, *_to_gguf(merged), *_gguf(merged, f"{merged}.gguf", output, extension)]
    export = _shell(f"rope-extend export {run}{base} --to {engine} --output {quote(output)}")
    if engine == "transformers":
        return [*export, *_python(f"model = AutoModelForCausalLM.from_pretrained({output!r})")]
    return [*export, *_shell(_server(extension, engine, output))]


def _untrained(extension: Extension, engine: str, file: Path | None) -> list[Step]:
    """Writes the base model with its encoding, and serves it; `file` holds its weights as GGUF."""
    if engine == "llama.cpp":
        saved = _python(
            f"tokenizer = AutoTokenizer.from_pretrained({extension.model!r})",
            "rx.save(model, 'extended', tokenizer)",
        )
        made = [] if file else _to_gguf("extended")
        weights = str(file or "extended.gguf")
        return [
            *_extended(extension), *saved, *made, *_gguf("extended", weights, "for-llamacpp", extension)
        ]  # fmt: skip
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


def _to_gguf(checkpoint: str) -> list[Step]:
    # Named after the checkpoint, because a base model may be called model.gguf.
    return _shell(f"python convert_hf_to_gguf.py {quote(checkpoint)} --outfile {quote(checkpoint + '.gguf')}")


def _gguf(checkpoint: str, file: str, output: str, extension: Extension) -> list[Step]:
    from_to = f"--gguf {quote(file)} --output {quote(output)}"
    return _shell(
        f"rope-extend export {quote(checkpoint)} --to llama.cpp {from_to}",
        f"llama-server -m {quote(f'{output}/{Path(file).name}')} -c {extension.target_length}",
    )
