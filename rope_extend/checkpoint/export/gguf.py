"""GGUF: writes the frequency table of an extended checkpoint into a converted file.

llama.cpp's `convert_hf_to_gguf.py` writes keys for a few types of scaling, and llama.cpp reads some of these.
For a Llama, YaRN's ramp and attention factor and LongRoPE's lists are silently lost. This module writes the
table itself into the file. The facts about llama.cpp come from the source in llama-cpp-python 0.3.36:

- `src/llama-context.cpp`: cos and sin are multiplied by `{arch}.rope.scaling.attn_factor` for every type of
  scaling. With `yarn`, they are also multiplied by `0.1 ln s + 1`. `none` never scales frequencies.
- `src/llama-model.cpp`, `get_rope_factors`: `rope_freqs.weight` has precedence over the long and short lists.
  Of those, the long one is used if the context exceeds `{arch}.rope.scaling.original_context_length`.
- `ggml/src/ggml-cpu/ops.cpp`, `ggml_rope_cache_init`: angles are divided by these factors.
- `src/models/*.cpp`: which architectures read the tensors. A file with a tensor that its architecture does
  not read is refused (`src/llama-model-loader.cpp`, `done_getting_tensors`).
- `conversion/base.py` writes `{arch}.rope.scaling.yarn_attn_factor`, `yarn_beta_fast` and `yarn_beta_slow`.
  Only `mistral3.cpp` (the last two) and `grok.cpp` read them.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_extend.checkpoint.record import Record
from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.files import replacing
from rope_extend.models.gguf_scaling import ZERO_FREQUENCY_FACTOR
from rope_extend.models.loading import one_error

logger = logging.getLogger(__name__)

_ONE_LIST = frozenset({
    "apertus", "arcee", "deci", "exaone", "exaone4", "exaone-moe", "granite", "granitehybrid", "granitemoe",
    "granite_swa", "llama", "llama4", "mistral3", "nanbeige",
})  # fmt: skip
"""Architectures that read `rope_freqs.weight`, with any type of scaling but `longrope`."""
_TWO_LISTS = frozenset({"minicpm3", "phi3", "phimoe"})
"""Architectures that read `rope_factors_long.weight` and `_short`, and no `rope_freqs.weight`."""
READS_FACTORS = _ONE_LIST | _TWO_LISTS

_ARCHITECTURES = {
    **{name: name for name in READS_FACTORS},
    **dict.fromkeys(("iquestcoder", "mistral", "mixtral"), "llama"),
    "bamba": "granitehybrid",
    "exaone_moe": "exaone-moe",
    "granitemoe_swa": "granite_swa",
    "granitemoeshared": "granitemoe",
    "llama4_text": "llama4",
    "ministral3": "mistral3",
}
_LLAMA_CPP = "llama_cpp"


def architecture_of(model_type: str) -> str | None:
    """The GGUF architecture that a family is converted to, if that architecture reads factors."""
    return _ARCHITECTURES.get(model_type)


@dataclass(frozen=True)
class Schedule:
    """The rotary frequencies in a GGUF file.

    Attributes:
        keys: metadata below the architecture's name, such as `rope.freq_base`.
        tensors: `[dim/2]` divisors of plain RoPE's frequencies, by tensor name; empty if `keys` are enough.
    """

    keys: Mapping[str, str | int | float]
    tensors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def schedule(
    encoding: RopeEncoding, shape: RopeShape, target_length: int, architecture: str | None
) -> Schedule:
    """The metadata and tensors with which llama.cpp computes a static schedule.

    Args:
        encoding: a schedule that consists of one table and an attention factor.
        shape: the rotary shape of the pretrained model.
        target_length: the extended window, in tokens.
        architecture: the file's `general.architecture`; None for one that reads factors.

    Raises:
        RopeExtendError: the schedule needs a table, and the architecture does not read one.
    """
    table, scale = encoding.inv_freq(shape), encoding.attention_factor(shape)
    form: dict[str, Any] = {"rope_type": ""}
    if bool((table > 0).all()):
        form = encoding.rope_parameters(shape)
    kind = form["rope_type"]
    keys: dict[str, str | int | float] = {
        "context_length": target_length,
        "rope.freq_base": shape.theta,
        "rope.scaling.original_context_length": shape.trained_length,
        "rope.scaling.type": "none",
    }
    if kind == "default":
        return Schedule(keys | {"rope.freq_base": form["rope_theta"]})
    if kind == "linear":
        return Schedule(keys | {"rope.scaling.type": "linear", "rope.scaling.factor": form["factor"]})
    factors = torch.where(table > 0, shape.inv_freq() / table, ZERO_FREQUENCY_FACTOR)
    divisors = tuple(factors.tolist())
    if architecture is None or architecture in READS_FACTORS:
        names = ["rope_factors_long", "rope_factors_short"] if architecture in _TWO_LISTS else ["rope_freqs"]
        tensors = {f"{name}.weight": divisors for name in names}
        return Schedule(keys | {"rope.scaling.attn_factor": scale}, tensors)
    if kind == "yarn" and (form["beta_fast"], form["beta_slow"], form["truncate"]) == (32, 1, True):
        yarn_scale = 0.1 * math.log(float(form["factor"])) + 1  # llama.cpp multiplies by this itself
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": form["factor"]}
        return Schedule(keys | {"rope.scaling.attn_factor": scale / yarn_scale})
    raise RopeExtendError(
        f"it needs a table of frequencies, and llama.cpp reads none for the architecture {architecture!r}, "
        f"only for {', '.join(sorted(READS_FACTORS))}"
    )


def annotate(
    source: str | PathLike[str], output: str | PathLike[str], record: Record, *, overwrite: bool = False
) -> Path:
    """Write a copy of a GGUF file that has the recorded encoding; returns its path.

    Args:
        source: the extended or the base model's weights, converted by llama.cpp's converter into one file.
        output: the new file; the source is only read.
        record: the record of the extended checkpoint.
        overwrite: replace an existing output file.

    Raises:
        RopeExtendError: the package `gguf` is missing; the source is not a GGUF file or of another model;
            llama.cpp does not support the encoding; or the output exists or cannot be written.
    """
    gguf = _package()
    path, target = Path(source), Path(output)
    if target.exists():
        if path.exists() and os.path.samefile(path, target):
            raise RopeExtendError(f"{target} is the source itself; choose another output")
        if not overwrite:
            raise RopeExtendError(f"{target} exists; choose another file, or overwrite=True")
    with one_error(
        f"cannot read {path} as GGUF", "Give the file that llama.cpp's convert_hf_to_gguf.py wrote"
    ):
        reader = gguf.GGUFReader(path)
        architecture = _described(reader, path, record)
    assert isinstance(record.encoding, RopeEncoding)
    content = schedule(record.encoding, record.shape, record.target_length, architecture)
    with one_error(f"cannot write {target}"), replacing(target) as partial:
        _write(gguf, reader, partial, architecture, content)
    return target


def _package() -> Any:
    try:
        return import_module("gguf")
    except ModuleNotFoundError as error:
        raise RopeExtendError(
            "writing GGUF needs the package gguf: pip install 'rope_extend[gguf]'"
        ) from error


def _described(reader: Any, path: Path, record: Record) -> str:
    """The architecture of a file, after checking that it fits the recorded model.

    Raises:
        RopeExtendError: the file is one of several parts, or its model has another rotary shape.
    """

    def value(key: str, default: Any = None) -> Any:
        entry = reader.get_field(key)
        return default if entry is None else entry.contents()

    architecture = value("general.architecture")
    if architecture is None:
        raise RopeExtendError(f"{path} has no general.architecture, so it holds no model; convert one")
    if value("split.count", 1) > 1:
        raise RopeExtendError(
            f"{path} is one of {value('split.count')} parts; join them with llama-gguf-split"
        )
    dim = value(f"{architecture}.rope.dimension_count") or value(f"{architecture}.attention.key_length")
    if dim is None:
        width, heads = (
            value(f"{architecture}.{key}", 0) for key in ("embedding_length", "attention.head_count")
        )
        dim = width // heads if isinstance(heads, int) and heads else 0
    if dim != record.shape.dim:
        raise RopeExtendError(
            f"{path} rotates {dim} channels of each head, but the checkpoint {record.shape.dim}: it is of "
            "another model; convert this checkpoint's weights"
        )
    theta = value(f"{architecture}.rope.freq_base", 10_000.0)
    assert isinstance(record.encoding, RopeEncoding)
    bases = [record.shape.theta]
    if bool((record.encoding.inv_freq(record.shape) > 0).all()):
        bases.append(record.encoding.rope_parameters(record.shape)["rope_theta"])
    if not any(math.isclose(theta, base, rel_tol=1e-4) for base in bases):
        raise RopeExtendError(
            f"{path} has the RoPE base {theta:g}, but the model was pretrained with {record.shape.theta:g}: "
            "it is of another model; convert this checkpoint's weights"
        )
    if architecture not in READS_FACTORS and value(f"{architecture}.rope.scaling.yarn_log_multiplier"):
        raise RopeExtendError(
            f"{path}: {architecture} scales attention by YaRN's keys, which the export would replace; it "
            "cannot be exported to llama.cpp"
        )
    return str(architecture)


def _write(gguf: Any, reader: Any, path: Path, architecture: str, content: Schedule) -> None:
    """Write the file. All other metadata and tensors are copied byte for byte."""
    writer = gguf.GGUFWriter(path, architecture, endianess=reader.endianess)
    new_keys = {f"{architecture}.{key}": value for key, value in content.keys.items()}
    alignment = reader.get_field("general.alignment")
    if alignment is not None:
        writer.data_alignment = alignment.contents()
    for entry in reader.fields.values():
        stale = entry.name.startswith((f"{architecture}.rope.scaling.", f"{architecture}.rope.scale_linear"))
        if (
            stale
            or entry.name in new_keys
            or entry.name.startswith("GGUF.")
            or entry.name == "general.architecture"
        ):
            continue
        inner = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(entry.name, _unchanged(gguf, entry), entry.types[0], sub_type=inner)
    kinds = {
        str: gguf.GGUFValueType.STRING,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
    }
    for key, value in new_keys.items():
        writer.add_key_value(key, value, kinds[type(value)])
    new_tensors = {name: torch.tensor(values).numpy() for name, values in content.tensors.items()}
    names = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
    kept = [tensor for tensor in reader.tensors if tensor.name not in names]
    for name, data in new_tensors.items():
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes)
    for tensor in kept:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for data in new_tensors.values():
        writer.write_tensor_data(data, tensor_endianess=None)
    for tensor in kept:
        writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
    writer.close()


def _unchanged(gguf: Any, entry: Any) -> Any:
    """The value of a metadata entry, with strings as bytes: a token need not be valid UTF-8."""
    if entry.types[-1] != gguf.GGUFValueType.STRING:
        return entry.contents()
    if entry.types[0] == gguf.GGUFValueType.ARRAY:
        return [entry.parts[index].tobytes() for index in entry.data]
    return entry.parts[-1].tobytes()


def llama_cpp_logits(path: str | PathLike[str], tokens: list[int]) -> Tensor:
    """Logits `[T, vocabulary]` float32 that llama.cpp computes for `tokens`, with a float32 cache.

    Raises:
        RopeExtendError: llama-cpp-python is missing, or llama.cpp does not load the file.
    """
    if not can_verify():
        raise RopeExtendError("this needs llama-cpp-python: pip install llama-cpp-python")
    llama_cpp = import_module(_LLAMA_CPP)
    try:
        model = llama_cpp.Llama(
            str(path), n_ctx=len(tokens), n_batch=len(tokens), n_gpu_layers=0, logits_all=True, verbose=False,
            type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
        )  # fmt: skip
    except (ValueError, AssertionError, RuntimeError) as error:
        raise RopeExtendError(f"llama.cpp does not load {path}: {error}") from error
    model.eval(tokens)
    return torch.tensor(model.scores[: len(tokens)].copy(), dtype=torch.float32)


@torch.no_grad()
def verify_gguf(
    path: str | PathLike[str],
    model: Any,
    record: Record,
    *,
    length: int | None = None,
    tolerance: float = 1e-3,
) -> float:
    """Compare llama.cpp's logits with those of the patched model; returns the largest difference.

    Args:
        path: a GGUF file of the model's weights. Quantised weights differ by more than the default tolerance.
        model: the model, loaded by `rope_extend.load`, in float32.
        record: the record of the checkpoint.
        length: number of tokens; default: 256 more than the trained window, but at most the target length.
        tolerance: the largest allowed difference of a logit.

    Raises:
        RopeExtendError: llama-cpp-python is missing, the file does not load, or the logits differ by more.
    """
    length = length or min(record.target_length, record.shape.trained_length + 256)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (1, length), generator=generator)
    logits = llama_cpp_logits(path, ids[0].tolist())
    gap = float((model(ids.to(model.device)).logits[0].float().cpu() - logits).abs().max())
    if not gap <= tolerance:
        raise RopeExtendError(
            f"llama.cpp computes logits that differ by {gap:.2g} over {length} tokens for {path}, and "
            f"{tolerance:g} is allowed; a quantised file needs a larger tolerance="
        )
    return gap


def can_verify() -> bool:
    """Whether llama-cpp-python is installed."""
    return find_spec(_LLAMA_CPP) is not None


def is_float32(path: str | PathLike[str]) -> bool:
    """Whether all matrices of a GGUF file are float32, so that logits can be compared with a checkpoint's."""
    gguf = _package()
    matrices = [tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1]
    return all(tensor.tensor_type == gguf.GGMLQuantizationType.F32 for tensor in matrices)
