"""The tensors in the safetensors files of a checkpoint, without its model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rope_extend.checkpoint.manifest import weight_files
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint's files: its file, shape and dtype."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors in the safetensors files of a checkpoint, in file order. Only headers are read.

    Raises:
        RopeExtendError: there are none, or a file cannot be read.
    """
    names = [name for name in weight_files(directory) if name.startswith("model")]
    if not names:
        raise RopeExtendError(
            f"no safetensors weights in {directory}; pickles are not read. If you trust the base model, "
            "load it with transformers and save it again with save_pretrained"
        )
    tensors = {}
    for name in names:
        with opened(directory / name) as file:
            for key in file.keys():  # noqa: SIM118  not a mapping
                part = file.get_slice(key)
                shape = tuple(part.get_shape())
                # The dtype comes from an empty slice: the header has other names for dtypes than torch.
                dtype = part[0:0].dtype if shape else file.get_tensor(key).dtype
                tensors[key] = StoredTensor(directory / name, shape, dtype)
    return tensors


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, open within the block.

    Raises:
        RopeExtendError: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise RopeExtendError(f"cannot read {path}: {error}; restore the file") from error


def read_tensor(path: Path, key: str) -> Tensor:
    """One tensor of a file."""
    with opened(path) as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor
