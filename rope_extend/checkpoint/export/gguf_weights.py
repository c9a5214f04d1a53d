"""Whether a GGUF file holds the weights of a checkpoint, as far as its number formats can tell."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rope_extend.checkpoint.manifest import open_weights, weight_files
from rope_extend.errors import RopeExtendError

logger = logging.getLogger(__name__)

Array = npt.NDArray[np.float32]

ROWS = 4096
"""Rows that are compared at a time, to save memory."""
MOST_UNLIKE = 0.01
"""Share of the values of a matrix that may differ by more than rounding; a merged adapter changes most."""
EPSILON = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}
"""Formats that round each value alone, with their relative step."""
Q8_0 = "Q8_0"
"""Stores blocks of 32 values as multiples of a 127th of the largest one, which is itself a float16."""
SMALLEST = 2.0**-24
"""The absolute step of float16 near zero."""
HEADS = {"attn_q": "head_count", "attn_k": "head_count_kv"}
"""Matrices whose rows a converter may permute, to store the two channels of a pair side by side."""


def check_same_weights(file: str | PathLike[str], checkpoint: Path) -> None:
    """Refuse a GGUF file with other weights than a checkpoint, such as those of before a merge.

    Matrices in float32, float16, bfloat16 and Q8_0 are compared. A line of the log names the other formats,
    whose rounding depends on the program that wrote them.

    Args:
        file: the GGUF file.
        checkpoint: directory with safetensors files.

    Raises:
        RopeExtendError: a matrix of the same name and shape has other values.
    """
    reader = import_module("gguf").GGUFReader(file)
    left_out: dict[str, int] = {}
    for path, name, tensor in _pairs(reader, checkpoint):
        kind = tensor.tensor_type.name
        if kind not in (*EPSILON, Q8_0):
            left_out[kind] = left_out.get(kind, 0) + 1
        elif (share := _unlike(reader, tensor, path, name)) > MOST_UNLIKE:
            raise RopeExtendError(
                f"{file} has other weights than the checkpoint: {share:.0%} of the values of {name} differ "
                "by more than rounding. The export would have those of the GGUF file, without what was "
                "trained or merged since; convert this checkpoint with llama.cpp's convert_hf_to_gguf.py, "
                "and give that file"
            )
    for kind, count in left_out.items():
        logger.warning(
            "%s: %d matrices are rounded to %s, so they are not compared with those of the checkpoint; the "
            "export has them as they are",
            Path(file).name, count, kind,
        )  # fmt: skip


def _pairs(reader: Any, checkpoint: Path) -> Iterator[tuple[Path, str, Any]]:
    """The matrices that both have in the same shape: file and name in the checkpoint, and tensor."""
    gguf = import_module("gguf")
    arch = reader.get_field("general.architecture").contents()
    blocks = reader.get_field(f"{arch}.block_count")
    kind = next((kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), None)
    if kind is None or blocks is None:
        return
    names = gguf.get_tensor_name_map(kind, blocks.contents())
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for path in (checkpoint / name for name in weight_files(checkpoint)):
        with open_weights(path) as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        for name, shape in shapes.items():
            inner, _, suffix = name.rpartition(".")
            tensor = stored.get(f"{names.get_name(inner)}.{suffix}")
            if tensor is not None and len(shape) == 2 and shape == [int(n) for n in tensor.shape[::-1]]:
                yield path, name, tensor


def _unlike(reader: Any, tensor: Any, path: Path, name: str) -> float:
    """The share of values that differ by more than rounding, in the better of two orders of the rows."""
    with open_weights(path) as file:
        weights = file.get_slice(name)
        share = _unlike_in_order(tensor, weights)
        count, heads = weights.get_shape()[0], _heads(reader, tensor.name)
        if share <= MOST_UNLIKE or not heads or count % (2 * heads):
            return share
        order = torch.arange(count).view(heads, 2, -1).transpose(1, 2).flatten()
        return min(share, _unlike_in_order(tensor, weights[:][order]))


def _heads(reader: Any, name: str) -> int:
    """The number of heads of queries or keys; 0 for other matrices, and where layers differ."""
    arch = reader.get_field("general.architecture").contents()
    kind = name.split(".")[-2]
    entry = reader.get_field(f"{arch}.attention.{HEADS[kind]}") if kind in HEADS else None
    heads = None if entry is None else entry.contents()
    return heads if isinstance(heads, int) else 0


def _unlike_in_order(tensor: Any, weights: Any) -> float:
    """The share of values that differ by more than rounding, of a tensor or a slice of a file."""
    dequantize = import_module("gguf").dequantize
    rows, columns = (int(size) for size in reversed(tensor.shape))
    unlike = 0
    for start in range(0, rows, ROWS):
        part = weights[start : start + ROWS]
        own = part.float().numpy()
        stored = dequantize(tensor.data[start : start + ROWS], tensor.tensor_type)
        steps = _steps(own, stored, torch.finfo(part.dtype).eps, tensor.tensor_type.name)
        unlike += int((np.abs(own - stored) > steps).sum())
    return unlike / (rows * columns)


def _steps(own: Array, stored: Array, epsilon: float, kind: str) -> Array:
    """By how much each value may differ: half a step of either format, and a hundredth for the arithmetic."""
    size = np.maximum(np.abs(own), np.abs(stored))
    steps = epsilon / 2 * size + SMALLEST
    if kind == Q8_0:
        largest = np.abs(stored).reshape(len(stored), -1, 32).max(axis=2, keepdims=True)
        of_block = np.broadcast_to(largest * (0.5 / 127 + 2.0**-11), (*largest.shape[:2], 32))
        steps += of_block.reshape(stored.shape)
    else:
        steps += EPSILON[kind] / 2 * size
    return np.asarray(1.01 * steps, np.float32)
