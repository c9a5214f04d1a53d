"""Copies of host values to a device, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Values on a device, in their own or another dtype.

    Unlike `values.to(device)`, the copy of a tensor on the host does not wait until a GPU has done all that
    it was given before. The source may be changed or dropped at once if it is in ordinary memory, not pinned.
    CUDA then copies the values that it had, by PyTorch's guide on `non_blocking` and `pin_memory`. A test
    of `make gpu` checks this on the device.
    """
    waits_not = values.device.type == "cpu" and device.type == "cuda"
    return values.to(device, values.dtype if dtype is None else dtype, non_blocking=waits_not)
