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
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rope_extend.checkpoint.manifest import weight_files
from rope_extend.checkpoint.record import Record
from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.files import replacing
from rope_extend.models.gguf_metadata import LIST, LONG, SHORT, field_value, gguf_metadata, gguf_reader
from rope_extend.models.gguf_scaling import ZERO_FREQUENCY_FACTOR
from rope_extend.models.loading import one_error, open_weights

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
    **dict.fromkeys(("iquestcoder", "mistral", "mixtral"), "llama"),
    "bamba": "granitehybrid",
    "exaone_moe": "exaone-moe",
    "granitemoe_swa": "granite_swa",
    "granitemoeshared": "granitemoe",
    "llama4_text": "llama4",
    "ministral3": "mistral3",
}


def architecture_of(model_type: str | None) -> str:
    """The GGUF architecture that a family is converted to; default: that of a Llama."""
    return _ARCHITECTURES.get(model_type or "llama", model_type or "llama")


@dataclass(frozen=True)
class Schedule:
    """The rotary frequencies in a GGUF file.

    Attributes:
        keys: metadata below the architecture's name, such as `rope.freq_base`.
        tensors: `[dim/2]` divisors of plain RoPE's frequencies, by tensor name; empty if `keys` are enough.
    """

    keys: Mapping[str, str | int | float]
    tensors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def schedule(encoding: RopeEncoding, shape: RopeShape, target_length: int, architecture: str) -> Schedule:
    """The metadata and tensors with which llama.cpp computes a static schedule.

    The encoding consists of one table and an attention factor; `architecture` is that of the file.
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
    if architecture in READS_FACTORS:
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


def annotate(path: Path, target: Path, record: Record) -> Path:
    """Write a copy of a converted GGUF file that has the recorded encoding; returns its path."""
    advice = "Give the file that llama.cpp's convert_hf_to_gguf.py wrote"
    with one_error(f"cannot read {path} as GGUF", advice):
        metadata = gguf_metadata(path)
    if metadata.architecture not in READS_FACTORS and metadata.of_architecture(
        "rope.scaling.yarn_log_multiplier"
    ):
        raise RopeExtendError(
            f"{path}: {metadata.architecture} scales attention by YaRN's keys, which the export would "
            "replace; it cannot be exported to llama.cpp"
        )
    assert isinstance(record.encoding, RopeEncoding)
    content = schedule(record.encoding, record.shape, record.target_length, metadata.architecture)
    with one_error(f"cannot write {target}"), replacing(target) as partial:
        _write(gguf_reader(path), partial, metadata.architecture, content)
    return target


def _write(reader: Any, path: Path, architecture: str, content: Schedule) -> None:
    """Write the file. All other metadata and tensors are copied byte for byte."""
    gguf = import_module("gguf")
    writer = gguf.GGUFWriter(path, architecture, endianess=reader.endianess)
    new_keys = {f"{architecture}.{key}": value for key, value in content.keys.items()}
    alignment = reader.get_field("general.alignment")
    if alignment is not None:
        writer.data_alignment = alignment.contents()
    replaced = ("GGUF.", f"{architecture}.rope.scaling.", f"{architecture}.rope.scale_linear")
    for entry in reader.fields.values():
        if entry.name.startswith(replaced) or entry.name in (*new_keys, "general.architecture"):
            continue
        inner = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(entry.name, field_value(entry, raw=True), entry.types[0], sub_type=inner)
    kinds = {
        str: gguf.GGUFValueType.STRING,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
    }
    for key, value in new_keys.items():
        writer.add_key_value(key, value, kinds[type(value)])
    new_tensors = {name: torch.tensor(values).numpy() for name, values in content.tensors.items()}
    kept = [tensor for tensor in reader.tensors if tensor.name not in (LIST, LONG, SHORT)]
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


_MOST_UNLIKE = 0.01
"""Share of the values of a matrix that may differ by more than rounding; a merged adapter changes most."""
_EPSILON = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7, "Q8_0": 0.0}
"""Formats that are compared, with the relative step of one value. Q8_0 stores blocks of 32 values, as
multiples of a 127th of the largest one, which is itself a float16."""
_SMALLEST = 2.0**-24
"""The absolute step of float16 near zero."""


def check_same_weights(path: Path, checkpoint: Path) -> None:
    """Refuse a GGUF file with other weights than a checkpoint, such as those of before a merge.

    Matrices in float32, float16, bfloat16 and Q8_0 are compared, one at a time. A line of the log names the
    other formats, whose rounding depends on the program that wrote them.
    """
    gguf, metadata = import_module("gguf"), gguf_metadata(path)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if (architecture := kinds.get(metadata.architecture)) is None:
        message = "%s: weights are not compared with the checkpoint; the gguf library does not know %s"
        logger.warning(message, path.name, metadata.architecture)
        return
    names = gguf.get_tensor_name_map(architecture, metadata.of_architecture("block_count", 0))
    counts = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    stored, left_out = {tensor.name: tensor for tensor in gguf_reader(path).tensors}, set[str]()
    for file in (checkpoint / name for name in weight_files(checkpoint)):
        with open_weights(file) as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no mapping
                inner, _, suffix = name.rpartition(".")
                tensor = stored.get(f"{names.get_name(inner)}.{suffix}")
                shape = weights.get_slice(name).get_shape()
                if tensor is None or len(shape) != 2:
                    continue
                columns, rows = map(int, tensor.shape)
                # Converters leave out rows that no token has, as of Gemma 3.
                cut = rows < shape[0] and tensor.name in ("token_embd.weight", "output.weight")
                same, share = shape[1] == columns and (shape[0] == rows or cut), 1.0
                if same and (kind := tensor.tensor_type.name) not in _EPSILON:
                    left_out.add(kind)
                    continue
                if same:
                    heads = metadata.of_architecture(counts.get(tensor.name.split(".")[-2], ""))
                    own = weights.get_slice(name)[:rows]
                    share = _unlike(tensor, own, heads if isinstance(heads, int) else 0)
                if share > _MOST_UNLIKE:
                    raise RopeExtendError(
                        f"{path} has other weights than the checkpoint: {share:.0%} of the values of {name} "
                        "differ by more than rounding. The export would have those of the GGUF file, without "
                        "what was trained or merged since; convert this checkpoint with llama.cpp's "
                        "convert_hf_to_gguf.py, and give that file"
                    )
    for kind in sorted(left_out):
        logger.warning("%s: matrices rounded to %s are not compared with the checkpoint", path.name, kind)


def _unlike(tensor: Any, weights: torch.Tensor, heads: int) -> float:
    """The share of values that differ by more than rounding.

    Each may differ by half a step of either format, and a hundredth more for the arithmetic. A converter may
    permute the rows of `heads` heads, to store the two channels of a pair side by side.
    """
    stored, kind = import_module("gguf").dequantize(tensor.data, tensor.tensor_type), tensor.tensor_type.name
    orders = [torch.arange(len(weights))]
    if heads and len(weights) % (2 * heads) == 0:
        orders.append(orders[0].view(heads, 2, -1).transpose(1, 2).flatten())
    shares = []
    for own in (weights[order].float().numpy() for order in orders):
        size = np.maximum(np.abs(own), np.abs(stored))
        steps = (torch.finfo(weights.dtype).eps + _EPSILON[kind]) / 2 * size + _SMALLEST
        if kind == "Q8_0":
            largest = np.abs(stored).reshape(len(stored), -1, 32).max(axis=2)
            steps += np.repeat(largest * (0.5 / 127 + 2.0**-11), 32, axis=1)
        shares.append(float((np.abs(own - stored) > 1.01 * steps).mean()))
    return min(shares)
