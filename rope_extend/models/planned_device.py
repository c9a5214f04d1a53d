"""The device that a dry run stands for: kernels and sizes of parts depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_planned: ContextVar[torch.device | None] = ContextVar("_planned", default=None)


def device_of(tensor: Tensor) -> torch.device:
    """The device of a tensor; in a dry run on the meta device, the device that is planned for."""
    planned = _planned.get() if tensor.is_meta else None
    return tensor.device if planned is None else planned


@contextmanager
def planned_for(device: torch.device) -> Iterator[None]:
    """Inside the block, tensors on the meta device stand for tensors on `device`."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)
