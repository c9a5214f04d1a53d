"""GGUF: a converted file is given the schedule that a checkpoint was extended with.

llama.cpp's `convert_hf_to_gguf.py` writes keys for a few types of scaling, and llama.cpp reads some of these:
of a Llama, YaRN's ramp and attention factor and LongRoPE's lists are lost without a word. Here the table
itself goes into the file. What is said of llama.cpp was read in the source that llama-cpp-python 0.3.36
carries:

- `src/llama-context.cpp`: cos and sin are multiplied by `{arch}.rope.scaling.attn_factor` whatever the type
  of scaling; with `yarn`, by `0.1 ln s + 1` beside it. `none` never scales frequencies.
- `src/llama-model.cpp`, `get_rope_factors`: `rope_freqs.weight` goes before the long and short lists, and
  among those the longer wins where the context exceeds `{arch}.rope.scaling.original_context_length`.
- `ggml/src/ggml-cpu/ops.cpp`, `ggml_rope_cache_init`: angles are divided by these factors.
- `src/models/*.cpp`: which architectures ask for the tensors. A file with a tensor that its architecture does
  not ask for is not loaded (`src/llama-model-loader.cpp`, `done_getting_tensors`).
- `conversion/base.py` writes `{arch}.rope.scaling.yarn_attn_factor`, `yarn_beta_fast` and `yarn_beta_slow`;
  only `mistral3.cpp` (the last two) and `grok.cpp` read them.
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

logger = logging.getLogger(__name__)

RESTING = 1e30
"""The factor of a pair that does not turn, as llama.cpp's own converter writes it for Gemma 4."""

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
_PRESENT = "llama_cpp"


def architecture_of(model_type: str) -> str | None:
    """The GGUF architecture that a family is converted to, if it is one that reads factors."""
    return _ARCHITECTURES.get(model_type)


@dataclass(frozen=True)
class Schedule:
    """What a GGUF file says about rotary frequencies.

    Attributes:
        keys: metadata below the architecture's name, such as `rope.freq_base`.
        tensors: `[dim/2]` divisors of plain RoPE's frequencies, by the tensor's name; none where `keys` say
            it all.
    """

    keys: Mapping[str, str | int | float]
    tensors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def schedule(
    encoding: RopeEncoding, shape: RopeShape, target_length: int, architecture: str | None
) -> Schedule:
    """The metadata and tensors by which llama.cpp computes a static schedule.

    Args:
        encoding: a schedule that is wholly in a table and an attention factor.
        shape: the rotary shape of the pretrained model.
        target_length: the window the model reads, in tokens.
        architecture: the file's `general.architecture`; None for one that reads factors.

    Raises:
        RopeExtendError: it takes a table, and the architecture reads none.
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
    factors = torch.where(table > 0, shape.inv_freq() / table, RESTING)
    divisors = tuple(factors.tolist())
    if architecture is None or architecture in READS_FACTORS:
        names = ["rope_factors_long", "rope_factors_short"] if architecture in _TWO_LISTS else ["rope_freqs"]
        tensors = {f"{name}.weight": divisors for name in names}
        return Schedule(keys | {"rope.scaling.attn_factor": scale}, tensors)
    if kind == "yarn" and (form["beta_fast"], form["beta_slow"], form["truncate"]) == (32, 1, True):
        own = 0.1 * math.log(float(form["factor"])) + 1
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": form["factor"]}
        return Schedule(keys | {"rope.scaling.attn_factor": scale / own})
    raise RopeExtendError(
        f"it takes a table of frequencies, and llama.cpp reads none for the architecture {architecture!r}, "
        f"only for {', '.join(sorted(READS_FACTORS))}"
    )


def annotate(
    source: str | PathLike[str], output: str | PathLike[str], record: Record, *, overwrite: bool = False
) -> Path:
    """Write a copy of a GGUF file that reads with the recorded encoding; returns its path.

    Args:
        source: what llama.cpp's converter made of the extended or of the base model's weights, in one file.
        output: where to; the source is only read.
        record: of the extended checkpoint.
        overwrite: replace a file that is there.

    Raises:
        RopeExtendError: the package `gguf` is missing, the source is no GGUF file or not of this model,
            llama.cpp has no form for the encoding, or the output exists.
    """
    gguf = _package()
    path, target = Path(source), Path(output)
    if target.exists():
        if path.exists() and os.path.samefile(path, target):
            raise RopeExtendError(f"{target} is the source itself; choose another output")
        if not overwrite:
            raise RopeExtendError(f"{target} exists; choose another file, or overwrite=True")
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise RopeExtendError(
            f"cannot read {path} as GGUF: {error}; give the file that llama.cpp's convert_hf_to_gguf.py made"
        ) from error
    architecture = _described(reader, path, record)
    assert isinstance(record.encoding, RopeEncoding)
    content = schedule(record.encoding, record.shape, record.target_length, architecture)
    partial = target.with_name(f".{target.name}.partial")
    try:
        _write(gguf, reader, partial, architecture, content)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _package() -> Any:
    try:
        return import_module("gguf")
    except ModuleNotFoundError as error:
        raise RopeExtendError(
            "writing GGUF takes the package gguf: pip install 'rope_extend[gguf]'"
        ) from error


def _described(reader: Any, path: Path, record: Record) -> str:
    """The architecture of a file that may be one of the recorded model's.

    Raises:
        RopeExtendError: it is one of several parts, or of a model of another rotary shape.
    """

    def value(key: str, default: Any = None) -> Any:
        found = reader.get_field(key)
        return default if found is None else found.contents()

    architecture = value("general.architecture")
    if architecture is None:
        raise RopeExtendError(f"{path} has no general.architecture: it holds no model")
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
            f"{path} rotates {dim} channels of each head, the checkpoint {record.shape.dim}: it is of "
            "another model"
        )
    theta = value(f"{architecture}.rope.freq_base", 10_000.0)
    assert isinstance(record.encoding, RopeEncoding)
    bases = [record.shape.theta]
    if bool((record.encoding.inv_freq(record.shape) > 0).all()):
        bases.append(record.encoding.rope_parameters(record.shape)["rope_theta"])
    if not any(math.isclose(theta, base, rel_tol=1e-4) for base in bases):
        raise RopeExtendError(
            f"{path} has the base {theta:g}, the model was pretrained with {record.shape.theta:g}: it is of "
            "another model"
        )
    if architecture not in READS_FACTORS and value(f"{architecture}.rope.scaling.yarn_log_multiplier"):
        raise RopeExtendError(
            f"{path}: {architecture} scales attention by YaRN's keys, which would be replaced"
        )
    return str(architecture)


def _write(gguf: Any, reader: Any, path: Path, architecture: str, content: Schedule) -> None:
    """Write the file: other metadata and tensors as they are, byte for byte."""
    writer = gguf.GGUFWriter(path, architecture, endianess=reader.endianess)
    ours = {f"{architecture}.{key}": value for key, value in content.keys.items()}
    alignment = reader.get_field("general.alignment")
    if alignment is not None:
        writer.data_alignment = alignment.contents()
    for entry in reader.fields.values():
        stale = entry.name.startswith((f"{architecture}.rope.scaling.", f"{architecture}.rope.scale_linear"))
        if (
            stale
            or entry.name in ours
            or entry.name.startswith("GGUF.")
            or entry.name == "general.architecture"
        ):
            continue
        inner = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(entry.name, entry.contents(), entry.types[0], sub_type=inner)
    kinds = {
        str: gguf.GGUFValueType.STRING,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
    }
    for key, value in ours.items():
        writer.add_key_value(key, value, kinds[type(value)])
    new = {name: torch.tensor(values).numpy() for name, values in content.tensors.items()}
    names = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
    kept = [tensor for tensor in reader.tensors if tensor.name not in names]
    for name, data in new.items():
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes)
    for tensor in kept:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for data in new.values():
        writer.write_tensor_data(data, tensor_endianess=None)
    for tensor in kept:
        writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
    writer.close()


# ---------------------------------------------------------------------------------------------------------
# What llama.cpp makes of it


def llama_cpp_logits(path: str | PathLike[str], tokens: list[int]) -> Tensor:
    """Logits `[T, vocabulary]` float32 that llama.cpp computes for `tokens`, with a float32 cache.

    Raises:
        RopeExtendError: llama-cpp-python is missing, or llama.cpp does not load the file.
    """
    if not can_verify():
        raise RopeExtendError("this takes llama-cpp-python: pip install llama-cpp-python")
    llama_cpp = import_module(_PRESENT)
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
        path: a GGUF file of the model's weights. Quantised ones differ by more than the default tolerance.
        model: the model, loaded by `rope_extend.load`, in float32.
        record: of the checkpoint.
        length: tokens to read; by default up to 256 beyond the trained window.
        tolerance: the largest difference that is allowed.

    Raises:
        RopeExtendError: llama-cpp-python is missing, the file does not load, or the logits differ by more.
    """
    length = length or min(record.target_length, record.shape.trained_length + 256)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (1, length), generator=generator)
    theirs = llama_cpp_logits(path, ids[0].tolist())
    gap = float((model(ids.to(model.device)).logits[0].float().cpu() - theirs).abs().max())
    if not gap <= tolerance:
        raise RopeExtendError(
            f"llama.cpp reads {path} with logits that differ by {gap:.2g} over {length} tokens, and "
            f"{tolerance:g} is allowed; a quantised file needs a larger tolerance="
        )
    return gap


def can_verify() -> bool:
    """Whether llama-cpp-python is installed."""
    return find_spec(_PRESENT) is not None


def is_float32(path: str | PathLike[str]) -> bool:
    """Whether all matrices of a GGUF file are float32, so that logits can be compared with a checkpoint's."""
    gguf = _package()
    matrices = [tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1]
    return all(tensor.tensor_type == gguf.GGMLQuantizationType.F32 for tensor in matrices)
