"""GGUF files as models: config and weights.

transformers reads the weights and most of the config. It drops the scaling of positions that a file carries
(as of 5.23: `rope.scaling.*` and the tensors of divisors), so a Llama 3.1 would silently lose its long
window. The scaling is read here, as llama.cpp computes it; see `checkpoint/export/gguf.py` for the sources.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

from rope_extend.errors import RopeExtendError
from rope_extend.models.families import find_adapter
from rope_extend.models.locating import GGUF
from rope_extend.models.view import shape_of

CONVERT = "rope-extend convert"
_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Metadata:
    """What a GGUF file says besides its weights.

    Attributes:
        keys: all keys and values.
        tables: divisors of the frequencies, `[dim / 2]`, by the tensor's name.
        weights: the number of values in all other tensors.
    """

    keys: Mapping[str, Any]
    tables: Mapping[str, list[float]]
    weights: int = 0

    @property
    def architecture(self) -> str:
        """The architecture, which is also the prefix of its keys."""
        return str(self.keys.get("general.architecture", ""))

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """A value below the architecture's name, such as `rope.freq_base`."""
        return self.keys.get(f"{self.architecture}.{key}", default)


def gguf_file(name: str | Path) -> Path | None:
    """The GGUF file that a model's name leads to: the file itself, or the only one in a directory.

    A directory with a `config.json` is a checkpoint of transformers, whatever else it holds.

    Raises:
        RopeExtendError: the directory holds several GGUF files and no `config.json`.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == GGUF and path.is_file():
        return path
    if not path.is_dir() or any((path / file).exists() for file in ("config.json", "adapter_config.json")):
        return None
    files = sorted(path.glob(f"*{GGUF}"))
    if len(files) > 1:
        raise RopeExtendError(
            f"{path} holds {len(files)} GGUF files ({', '.join(file.name for file in files[:3])}, ...); give "
            "the path of one file. A model that is split into several files is not supported"
        )
    return files[0] if files else None


def gguf_metadata(path: Path) -> Metadata:
    """Keys and tables of a GGUF file.

    Raises:
        RopeExtendError: the package gguf is not installed, or this is no GGUF file.
    """
    return _metadata(*_state(path))


def _state(path: Path) -> tuple[Path, int, int]:
    """What a file's contents are remembered by: its path, the time of its last change, and its size."""
    status = path.stat()
    return path.resolve(), status.st_mtime_ns, status.st_size


@lru_cache(maxsize=2)
def _metadata(path: Path, _changed: int, _size: int) -> Metadata:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise RopeExtendError(
            f"reading {path.name} needs the package gguf: pip install 'rope_extend[gguf]'"
        ) from error
    try:
        reader = GGUFReader(path)
        keys = {name: field.contents() for name, field in reader.fields.items()}
        tables = {
            tensor.name: [float(value) for value in tensor.data]
            for tensor in reader.tensors
            if tensor.name in _TABLES
        }
        weights = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name not in _TABLES)
    except Exception as error:  # the reader raises what the damage leads to
        raise RopeExtendError(f"cannot read {path} as GGUF ({type(error).__name__}: {error})") from error
    if "general.architecture" not in keys:
        raise RopeExtendError(f"{path} names no architecture; it holds no model")
    if keys.get("split.count", 1) > 1:
        raise RopeExtendError(
            f"{path} is one part of a model that is split into {keys['split.count']} files, which is not "
            "supported. Join them with llama.cpp's llama-gguf-split --merge"
        )
    return Metadata(keys, tables, weights)


def gguf_config(path: Path) -> Any:
    """The config of a GGUF file's model, with its scaling of positions.

    Raises:
        RopeExtendError: transformers has no such architecture, or no form for the file's scaling.
    """
    return copy.deepcopy(_config(*_state(path)))


@lru_cache(maxsize=2)
def _config(path: Path, _changed: int, _size: int) -> Any:
    metadata = gguf_metadata(path)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.name_or_path = str(path)
    vars(config).pop("_model_name_or_path", None)  # transformers keeps the file's title under this name
    for name in ("bos", "eos", "padding"):
        if (token := metadata.keys.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            setattr(config, f"{name.removesuffix('ding')}_token_id", token)
    plain: Any = getattr(config, "rope_parameters", None)
    flat = isinstance(plain, dict) and not any(isinstance(value, dict) for value in plain.values())
    rotated, width = metadata.of_architecture("rope.dimension_count"), getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads
    if flat and rotated and rotated < width and not metadata.of_architecture("attention.kv_lora_rank"):
        plain["partial_rotary_factor"] = rotated / width  # transformers drops it for some families
    if scaling := rope_scaling(metadata):
        if not flat:
            raise RopeExtendError(
                f"{path.name} scales its positions ({scaling['rope_type']}), and the scaling of the family "
                f"{config.model_type} is not read from GGUF files. Use the original checkpoint"
            )
        kept = {key: value for key, value in plain.items() if key in ("rope_theta", "partial_rotary_factor")}
        config.rope_parameters = {**kept, **scaling}
    return config


def rope_scaling(metadata: Metadata) -> dict[str, Any]:
    """The `rope_parameters` that a GGUF file's scaling of positions means in transformers; empty for none.

    Raises:
        RopeExtendError: transformers has no form for this scaling.
    """
    keys, tables = metadata.of_architecture, metadata.tables
    kind = str(keys("rope.scaling.type", "linear"))
    factor = float(keys("rope.scaling.factor", keys("rope.scale_linear", 0.0)) or 1.0)
    trained = int(keys("rope.scaling.original_context_length") or keys("context_length", 0))
    attention = float(keys("rope.scaling.attn_factor", 1.0) or 1.0)
    if kind == "none":
        factor = 1.0
    if tables:
        if kind not in ("none", "linear", "longrope"):
            raise RopeExtendError(f"a table of divisors with rope.scaling.type {kind!r} has no form here")
        lists = [tables.get(f"rope_factors_{which}.weight") for which in ("short", "long")]
        if _TABLES[0] in tables:  # it has precedence
            lists = [[value * factor for value in tables[_TABLES[0]]]] * 2
        if None in lists:
            raise RopeExtendError("only one of rope_factors_long and rope_factors_short is in the file")
        short, long = lists
        return {
            "rope_type": "longrope", "short_factor": short, "long_factor": long,
            "original_max_position_embeddings": trained, "attention_factor": attention,
        }  # fmt: skip
    if kind == "yarn":
        return {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained,
            "attention_factor": attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
            "beta_fast": float(keys("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(keys("rope.scaling.yarn_beta_slow", 1.0)),
        }  # fmt: skip
    if kind not in ("none", "linear"):
        raise RopeExtendError(f"rope.scaling.type {kind!r} has no form in transformers without its tables")
    if attention != 1.0:
        raise RopeExtendError(f"rope.scaling.attn_factor {attention} without a table has no form here")
    return {"rope_type": "linear", "factor": factor} if factor != 1 else {}


def gguf_model(path: Path, **kwargs: Any) -> Any:
    """What `from_pretrained` returns for the model of a GGUF file, its weights dequantised to `dtype`.

    Args:
        path: the file.
        kwargs: as `from_pretrained` takes them.

    Raises:
        RopeExtendError: quantization was asked for as well.
    """
    if kwargs.pop("quantization_config", None) is not None:
        raise RopeExtendError(no_second_quantization(path))
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
    model.config.name_or_path = model.name_or_path = str(path)
    return (model, report) if with_report else model


def _check_loaded(path: Path, model: Any, missing: Collection[str]) -> None:
    """Refuse a model that is not the file's: transformers leaves out what it has no name for.

    Raises:
        RopeExtendError: a weight is missing, the file has more weights than the model, or the model rotates
            another number of channels.
    """
    advice = "Use the original checkpoint"
    if missing:
        raise RopeExtendError(
            f"{path.name} lacks {len(missing)} weights of the model, such as {min(missing)}. {advice}"
        )
    metadata = gguf_metadata(path)
    values = sum(weight.numel() for weight in model.parameters())
    if metadata.weights != values:
        raise RopeExtendError(
            f"{path.name} holds {metadata.weights:,} weights, and transformers' {model.config.model_type} "
            f"model for it has {values:,}, so some, such as biases, would be lost. {advice}"
        )
    rotated = metadata.of_architecture("rope.dimension_count")
    known = find_adapter(model.config.model_type) is not None
    if rotated and known and (found := shape_of(model).dim) != rotated:
        raise RopeExtendError(
            f"{path.name} rotates {rotated} channels of each head, and transformers' "
            f"{model.config.model_type} model for it rotates {found}. {advice}"
        )


def no_second_quantization(path: Path) -> str:
    """The message for `quantize` with a GGUF file."""
    return (
        f"{path.name} cannot be quantised again while it is loaded. Leave quantize out, or write an ordinary "
        f"checkpoint first: {CONVERT} {path} --output DIRECTORY"
    )
