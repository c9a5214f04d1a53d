"""GGUF files as models: config and weights, for the architectures of Llama, Qwen 2 and Qwen 3.

transformers reads the weights and most of the config (as of 5.23). What it drops is read here: the scaling of
positions (`gguf_scaling.py`), so a Llama 3.1 would silently lose its long window, and the base and the width
of heads where a family's config has others.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

from rope_extend.errors import RopeExtendError
from rope_extend.models.checkpoint_directory import is_adapter, is_model
from rope_extend.models.gguf_metadata import ADVICE, gguf_metadata, lists_skipped, state
from rope_extend.models.gguf_scaling import DEFAULT_BASE, rope_scaling
from rope_extend.models.locating import GGUF
from rope_extend.models.rotary_tables import shape_of

CONVERT = "rope-extend convert"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""For others, transformers leaves more at the defaults of their configs, such as soft caps."""


def gguf_file(name: str | Path) -> Path | None:
    """The GGUF file that a model's name leads to: the file itself, or the only one in a directory.

    A directory with a `config.json` is a checkpoint of transformers, whatever else it holds.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == GGUF and os.path.isfile(path):
        return path
    # Unlike methods of Path, os.path takes names that are too long for a file or hold NUL, as records may.
    if not os.path.isdir(path) or is_model(path) or is_adapter(path):
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == GGUF)
    if len(files) > 1:
        raise RopeExtendError(
            f"{path} holds {len(files)} GGUF files ({', '.join(file.name for file in files[:3])}, ...); give "
            "the path of one file. A model that is split into several files is not supported"
        )
    return files[0] if files else None


def gguf_config(path: Path) -> Any:
    """The config of a GGUF file's model, with its scaling of positions."""
    return copy.deepcopy(_config(*state(path)))


@lru_cache(maxsize=2)
def _config(path: Path, _changed: int, _size: int) -> Any:
    metadata = gguf_metadata(path)
    if metadata.architecture not in _ARCHITECTURES:
        raise RopeExtendError(
            f"{path.name} has the architecture {metadata.architecture!r}, and GGUF files are read as models "
            f"for {', '.join(_ARCHITECTURES)} only. {ADVICE}"
        )
    if not metadata.of_architecture("attention.head_count_kv"):
        raise RopeExtendError(
            f"{path.name} does not state attention.head_count_kv, without which transformers leaves the "
            f"channels of queries and keys in llama.cpp's order. {ADVICE}"
        )
    with lists_skipped():
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.name_or_path = str(path)
    vars(config).pop("_model_name_or_path", None)  # transformers keeps the file's title under this name
    for name in ("bos", "eos", "padding"):
        key, attribute = f"tokenizer.ggml.{name}_token_id", f"{name.removesuffix('ding')}_token_id"
        token = metadata.keys.get(key, getattr(config, attribute, None))
        # Some files say 2³² - 1 for no token, and the default of a family may lie outside a small vocabulary.
        setattr(config, attribute, token if _is_token(token, config) else None)
    keys = metadata.of_architecture
    if (width := keys("attention.key_length")) and "head_dim" in vars(config):
        config.head_dim = width
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = (keys("rope.dimension_count") or width) // 2
    if wrong := [name for name, table in metadata.tables.items() if len(table) != pairs]:
        raise RopeExtendError(
            f"{path.name} rotates {pairs} pairs of channels, and {wrong[0]} has another number of divisors. "
            f"{ADVICE}"
        )
    base = float(keys("rope.freq_base", DEFAULT_BASE))
    config.rope_parameters = {"rope_type": "default", "rope_theta": base, **rope_scaling(metadata)}
    return config


def _is_token(token: Any, config: Any) -> bool:
    """Whether a number is that of a token of the vocabulary."""
    return isinstance(token, int) and 0 <= token < config.vocab_size


def gguf_model(path: Path, **kwargs: Any) -> Any:
    """What `from_pretrained` returns for the model of a GGUF file, its weights dequantised to `dtype`."""
    if is_adapter(path.parent):
        raise RopeExtendError(
            f"an adapter lies next to {path.name}, in {path.parent}, and transformers would load both as one "
            "model; move one of them to another directory"
        )
    with_report = kwargs.pop("output_loading_info", False)
    config = gguf_config(path)
    with lists_skipped():
        model, report = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=config,
            quantization_config=GgufConfig(dequantize=True),  # adapters are trained on plain weights
            output_loading_info=True,
            **kwargs,
        )
    _check_loaded(path, model, report["missing_keys"])
    _set_ends(path, model)
    model.config.name_or_path = model.name_or_path = str(path)
    return (model, report) if with_report else model


def _check_loaded(path: Path, model: Any, missing: Collection[str]) -> None:
    """Refuse a model that is not the file's: transformers leaves out what it has no name for."""
    if missing:
        raise RopeExtendError(
            f"{path.name} lacks {len(missing)} weights of the model, such as {min(missing)}. {ADVICE}"
        )
    check_sizes(path, model)
    rotated, family = gguf_metadata(path).of_architecture("rope.dimension_count"), model.config.model_type
    if rotated and (found := shape_of(model, 1).dim) != rotated:
        raise RopeExtendError(
            f"{path.name} rotates {rotated} channels of each head, and transformers' {family} model for it "
            f"rotates {found}. {ADVICE}"
        )


def check_sizes(path: Path, model: Any) -> None:
    """Refuse a model of other sizes than the file's tensors, on the meta device too."""
    held, values = gguf_metadata(path).weights, sum(weight.numel() for weight in model.parameters())
    if held != values:
        raise RopeExtendError(
            f"{path.name} holds {held:,} weights, and transformers' {model.config.model_type} model for it "
            f"has {values:,}: some, such as biases, would be lost, or its sizes are wrong. {ADVICE}"
        )


def _set_ends(path: Path, model: Any) -> None:
    """Let answers end at the end of a turn (`eot`) and of a message (`eom`) too, as in llama.cpp."""
    keys, ends = gguf_metadata(path).keys, [model.config.eos_token_id]
    ends += [keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    ends = [token for token in dict.fromkeys(ends) if _is_token(token, model.config)]
    if len(ends) > 1 and model.generation_config is not None:
        model.generation_config.eos_token_id = ends


def how_to_convert(path: Path | str) -> str:
    """The advice to make a checkpoint of a GGUF file, as part of a sentence."""
    return f"write an ordinary checkpoint first: {CONVERT} {quote(str(path))} --output DIRECTORY"
