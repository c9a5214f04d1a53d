"""The table of export targets: which forms of an encoding each one computes, and how it serves an export.

A target that reads `config.json` is one record here. The facts come from the sources of the engines:

- vLLM, `vllm/model_executor/layers/rotary_embedding/__init__.py` and its neighbours: `get_rope` knows
  `default`, `linear`, `llama3`, `yarn` and `longrope`, and raises on unknown types. Its `longrope` has no
  `attention_factor` but `short_mscale` and `long_mscale`. It uses the long list for all texts if
  `--max-model-len` exceeds the trained window, and raises if pairs are neighbours. Which of YaRN's keys for
  attention it reads differs between versions. `_get_and_verify_max_len`: the window is
  `max_position_embeddings` times `factor`; for `yarn` the original one times `factor`; for `longrope` and
  `llama3` `max_position_embeddings`.
- SGLang, `python/sglang/srt/layers/rotary_embedding/factory.py`, `yarn.py` and `rope_variant.py`: the same
  types, and the same keys in `longrope`; `yarn` has no `attention_factor`. Its `longrope` looks up position L
  as position 0 if the batch has no later one, where L is `original_max_position_embeddings`.
  `get_context_length`: `max_position_embeddings` times `factor`, unless there is an original one.
- llama.cpp: see `gguf.py`. Issue 4886: `--grp-attn-n` moves positions in the cache block by block; that is
  another map than SelfExtend's.

This module imports no model, so the command line can check a target at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal


@dataclass(frozen=True)
class Target:
    """What we know of an engine.

    Attributes:
        title: its name in a text.
        reads: `stock`: a config of transformers; `config`: the `rope_parameters` of the types below;
            `gguf`: a GGUF file.
        types: the values of `rope_type` that it computes as transformers does. Any other table is written as
            `longrope`.
        multiplied: those of them by whose factor it multiplies the window that the config states.
        original: whether the `longrope` of an export states the extended window as the original one, so that
            one of two tables is used at all positions.
        serve: the command that serves an export.
    """

    title: str
    reads: Literal["stock", "config", "gguf"]
    types: tuple[str, ...] = ()
    multiplied: tuple[str, ...] = ()
    original: bool = False
    serve: str = ""


TARGETS = {
    "transformers": Target("transformers", "stock"),
    "vllm": Target(
        "vLLM",
        "config",
        types=("default", "linear", "llama3", "yarn"),
        multiplied=("linear",),
        serve="vllm serve {model} --max-model-len {tokens}",
    ),
    "sglang": Target(
        "SGLang",
        "config",
        types=("default", "linear", "llama3", "yarn"),
        multiplied=("linear",),
        original=True,
        serve="python -m sglang.launch_server --model-path {model} --context-length {tokens}",
    ),
    "llama.cpp": Target("llama.cpp", "gguf", serve="llama-server -m {model} -c {tokens}"),
}
"""The targets, by the name that `export --to` takes."""


def commands(target: str, checkpoint: str, tokens: int, *, base_model: str = "") -> list[str]:
    """The commands that export a checkpoint's directory and serve it with a window of `tokens`.

    `base_model` is that of an adapter, if it is not the one in its record.
    """
    engine, output = TARGETS[target], f"{checkpoint}-{target.replace('.', '')}"
    model, options, lines = output, f" --base-model {quote(base_model)}" if base_model else "", []
    if engine.reads == "gguf":
        file = f"{checkpoint}.gguf"
        lines.append(f"python convert_hf_to_gguf.py {quote(checkpoint)} --outfile {quote(file)}")
        options += f" --gguf {quote(file)}"
        model = f"{output}/{Path(file).name}"
    lines.append(f"rope-extend export {quote(checkpoint)} --to {target}{options} --output {quote(output)}")
    if engine.serve:
        lines.append(engine.serve.format(model=quote(model), tokens=tokens))
    return lines
