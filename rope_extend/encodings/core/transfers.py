"""Copies of host values to a device, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Values on a device, in their own or another dtype.

    Unlike `values.to(device)`, the copy of a tensor on the host does not wait until a GPU has done all that
    it was given before. CUDA takes the values from ordinary memory before the call returns.
    """
    waits_not = values.device.type == "cpu" and device.type == "cuda"
    return values.to(device, values.dtype if dtype is None else dtype, non_blocking=waits_not)
