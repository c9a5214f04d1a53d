"""GGUF files as models: config and weights.

transformers reads the weights and most of the config (as of 5.23). What it drops is read here: the scaling of
positions (`gguf_scaling.py`), so a Llama 3.1 would silently lose its long window, and for some architectures
the base of the frequencies, the epsilon of the norms, and what scales or limits attention.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

from rope_extend.errors import RopeExtendError
from rope_extend.models.families import find_adapter
from rope_extend.models.gguf_metadata import ADVICE, Metadata, gguf_metadata, state
from rope_extend.models.gguf_scaling import DEFAULT_BASE, rope_scaling
from rope_extend.models.locating import GGUF
from rope_extend.models.view import rotary_part, shape_of

CONVERT = "rope-extend convert"
_WINDOW = "original_max_position_embeddings"
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_EPSILON_NAMES = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
_ATTRIBUTES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Attributes of a config that transformers leaves at their defaults, by the key of the file."""
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models. `src/models/gemma2.cpp` and `gemma3.cpp` scale attention by the hidden size per
head for these, and by the width of a head for all others; no key says it."""


def gguf_file(name: str | Path) -> Path | None:
    """The GGUF file that a model's name leads to: the file itself, or the only one in a directory.

    A directory with a `config.json` is a checkpoint of transformers, whatever else it holds.

    Raises:
        RopeExtendError: the directory holds several GGUF files and no `config.json`.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == GGUF and os.path.isfile(path):
        return path
    # Unlike methods of Path, os.path takes names that are too long for a file or hold NUL, as records may.
    if not os.path.isdir(path) or any(
        (path / file).exists() for file in ("config.json", "adapter_config.json")
    ):
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == GGUF)
    if len(files) > 1:
        raise RopeExtendError(
            f"{path} holds {len(files)} GGUF files ({', '.join(file.name for file in files[:3])}, ...); give "
            "the path of one file. A model that is split into several files is not supported"
        )
    return files[0] if files else None


def gguf_config(path: Path) -> Any:
    """The config of a GGUF file's model, with its scaling of positions.

    Raises:
        RopeExtendError: the file holds no model, transformers has no such architecture, or no form for the
            file's scaling.
    """
    return copy.deepcopy(_config(*state(path)))


@lru_cache(maxsize=2)
def _config(path: Path, _changed: int, _size: int) -> Any:
    metadata = gguf_metadata(path)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.name_or_path = str(path)
    vars(config).pop("_model_name_or_path", None)  # transformers keeps the file's title under this name
    for name in ("bos", "eos", "padding"):
        key, attribute = f"tokenizer.ggml.{name}_token_id", f"{name.removesuffix('ding')}_token_id"
        token = metadata.keys.get(key, getattr(config, attribute, None))
        # Some files say 2³² - 1 for no token, and the default of a family may lie outside a small vocabulary.
        setattr(config, attribute, token if _is_token(token, config) else None)
    _complete(path, config, metadata)
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict):
        _set_positions(path, config, parameters, metadata)
    elif rope_scaling(metadata):
        raise RopeExtendError(_no_scaling(path, config))
    return config


def _is_token(token: Any, config: Any) -> bool:
    """Whether a number is that of a token of the vocabulary."""
    return isinstance(token, int) and 0 <= token < config.vocab_size


def _complete(path: Path, config: Any, metadata: Metadata) -> None:
    """Set what transformers leaves at the defaults of the config class, positions aside.

    Raises:
        RopeExtendError: the config has no name for the epsilon of the norms.
    """
    known = vars(config)
    for key, name in _ATTRIBUTES.items():
        if (value := metadata.of_architecture(key)) is not None and name in known:
            setattr(config, name, value)
    for epsilon in filter(None, map(metadata.of_architecture, _EPSILONS)):
        if not (names := [name for name in _EPSILON_NAMES if name in known]):
            raise RopeExtendError(
                f"{path.name} has norms with epsilon {epsilon:g}, and transformers' {config.model_type} "
                f"config has no name for it. {ADVICE}"
            )
        for name in names:
            setattr(config, name, epsilon)
    if "query_pre_attn_scalar" in known:
        largest = _LARGEST_GEMMA.get(metadata.architecture) == config.num_hidden_layers
        config.query_pre_attn_scalar = (
            config.hidden_size // config.num_attention_heads if largest else config.head_dim
        )
    if config.model_type == "phi3":
        config.sliding_window = metadata.of_architecture("attention.sliding_window") or None


def _set_positions(path: Path, config: Any, plain: dict[str, Any], metadata: Metadata) -> None:
    """Set the base, the rotated channels, and the scaling of positions.

    Raises:
        RopeExtendError: transformers, or this family in it, has no form for the file's scaling.
    """
    keys, by_layer = metadata.of_architecture, any(isinstance(value, dict) for value in plain.values())
    if by_layer and metadata.tables:
        raise RopeExtendError(_no_scaling(path, config))
    scaling = rope_scaling(metadata)
    if by_layer:
        if scaling and (config.model_type, scaling["rope_type"]) != ("gemma3_text", "linear"):
            raise RopeExtendError(_no_scaling(path, config))
        for layer_type, inner in plain.items():
            if isinstance(inner, dict):
                sliding = "sliding" in layer_type
                if base := keys("rope.freq_base_swa" if sliding else "rope.freq_base"):
                    inner["rope_theta"] = float(base)
                if not sliding:  # `src/models/gemma3.cpp` does not scale the others
                    inner |= scaling
        return
    plain["rope_theta"] = float(keys("rope.freq_base", DEFAULT_BASE))
    if (width := keys("attention.key_length")) and "head_dim" in vars(config):
        config.head_dim = width
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = keys("rope.dimension_count")
    if rotated and rotated < width and not keys("attention.kv_lora_rank"):
        plain["partial_rotary_factor"] = rotated / width  # transformers drops it for some families
    pairs = (rotated or width) // 2
    if wrong := [name for name, table in metadata.tables.items() if len(table) != pairs]:
        raise RopeExtendError(
            f"{path.name} rotates {pairs} pairs of channels, and {wrong[0]} has another number of divisors. "
            f"{ADVICE}"
        )
    if _WINDOW in vars(config):  # Phi-3's own attribute, which has precedence over rope_parameters
        setattr(config, _WINDOW, scaling.get(_WINDOW, config.max_position_embeddings))
    if not scaling:
        return
    adapter = find_adapter(config.model_type)
    if adapter is not None and not adapter.accepts(scaling["rope_type"]):
        raise RopeExtendError(_no_scaling(path, config))
    kept = {key: value for key, value in plain.items() if key in ("rope_theta", "partial_rotary_factor")}
    config.rope_parameters = {**kept, **scaling}


def _no_scaling(path: Path, config: Any) -> str:
    return (
        f"{path.name} scales its positions, and this scaling of the family {config.model_type} is not read "
        f"from GGUF files. {ADVICE}"
    )


def gguf_model(path: Path, **kwargs: Any) -> Any:
    """What `from_pretrained` returns for the model of a GGUF file, its weights dequantised to `dtype`.

    Args:
        path: the file.
        kwargs: as `from_pretrained` takes them.

    Raises:
        RopeExtendError: quantization was asked for as well, or an adapter lies next to the file: transformers
            would load that too, for a base model that is no GGUF file.
    """
    if kwargs.pop("quantization_config", None) is not None:
        raise RopeExtendError(no_second_quantization(path))
    if (path.parent / "adapter_config.json").exists():
        raise RopeExtendError(
            f"an adapter lies next to {path.name}, in {path.parent}, and transformers would load both as one "
            "model; move one of them to another directory"
        )
    with_report = kwargs.pop("output_loading_info", False)
    model, report = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        config=gguf_config(path),
        quantization_config=GgufConfig(dequantize=True),  # adapters are trained on plain weights
        output_loading_info=True,
        **kwargs,
    )
    _check_loaded(path, model, report["missing_keys"])
    _order_channels(path, model)
    _set_ends(path, model)
    model.config.name_or_path = model.name_or_path = str(path)
    return (model, report) if with_report else model


def _check_loaded(path: Path, model: Any, missing: Collection[str]) -> None:
    """Refuse a model that is not the file's: transformers leaves out what it has no name for.

    Raises:
        RopeExtendError: a weight is missing, the file has more weights than the model, or the model rotates
            another number of channels or by another base.
    """
    if missing:
        raise RopeExtendError(
            f"{path.name} lacks {len(missing)} weights of the model, such as {min(missing)}. {ADVICE}"
        )
    metadata, family = gguf_metadata(path), model.config.model_type
    values = sum(weight.numel() for weight in model.parameters())
    if metadata.weights != values:
        raise RopeExtendError(
            f"{path.name} holds {metadata.weights:,} weights, and transformers' {family} model for it has "
            f"{values:,}, so some, such as biases, would be lost. {ADVICE}"
        )
    if find_adapter(family) is None:
        return
    keys, (_, parameters) = metadata.of_architecture, rotary_part(model.config)
    rotated, base = keys("rope.dimension_count"), float(keys("rope.freq_base", DEFAULT_BASE))
    if rotated and (found := shape_of(model, 1).dim) != rotated:
        raise RopeExtendError(
            f"{path.name} rotates {rotated} channels of each head, and transformers' {family} model for it "
            f"rotates {found}. {ADVICE}"
        )
    if not math.isclose(base, found_base := float(parameters.get("rope_theta") or math.nan), rel_tol=1e-6):
        raise RopeExtendError(
            f"{path.name} rotates by the base {base:g}, and transformers' {family} model for it by "
            f"{found_base:g}. {ADVICE}"
        )


def _order_channels(path: Path, model: Any) -> None:
    """Put the channels of queries and keys of a Llama in transformers' order, if transformers has not.

    llama.cpp stores the two channels of a pair side by side. As of 5.23, transformers leaves them so if the
    file does not state `attention.head_count_kv`, which is optional: as many as there are query heads.
    """
    metadata = gguf_metadata(path)
    if metadata.architecture != "llama" or metadata.of_architecture("attention.head_count_kv"):
        return
    heads = metadata.of_architecture("attention.head_count")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.rpartition(".")[0].endswith(("self_attn.q_proj", "self_attn.k_proj")):
                pairs = weight.view(heads, -1, 2, *weight.shape[1:])
                weight.copy_(pairs.transpose(1, 2).reshape(weight.shape))


def _set_ends(path: Path, model: Any) -> None:
    """Let answers end at the end of a turn (`eot`) and of a message (`eom`) too, as in llama.cpp."""
    keys, ends = gguf_metadata(path).keys, [model.config.eos_token_id]
    ends += [keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    ends = [token for token in dict.fromkeys(ends) if _is_token(token, model.config)]
    if len(ends) > 1 and model.generation_config is not None:
        model.generation_config.eos_token_id = ends


def no_second_quantization(path: Path) -> str:
    """The message for `quantize` with a GGUF file."""
    return (
        f"{path.name} cannot be quantised again while it is loaded. Leave quantize out, or "
        f"{how_to_convert(path)}"
    )


def how_to_convert(path: Path) -> str:
    """The advice to make a checkpoint of a GGUF file, as part of a sentence."""
    return f"write an ordinary checkpoint first: {CONVERT} {quote(str(path))} --output DIRECTORY"
