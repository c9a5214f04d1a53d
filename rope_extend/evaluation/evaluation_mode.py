"""A model in evaluation mode while it is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rope_extend.errors import RopeExtendError
from rope_extend.models.load_options import input_device, is_spread


@contextmanager
def evaluation_mode(model: Any, device: torch.device | str | None = None) -> Iterator[torch.device]:
    """Put a model into evaluation mode on a device. Afterwards each module has its old mode and device.

    Also resets the peak of CUDA's memory statistics.

    Args:
        model: a module.
        device: the device; the model's own by default.

    Yields:
        The device where token ids go.

    Raises:
        RopeExtendError: the model is spread over devices and cannot be moved.
    """
    modes = {module: module.training for module in model.modules()}
    home = input_device(model)
    target = home if device is None else torch.device(device)
    if target != home and is_spread(model):
        raise RopeExtendError(
            f"this model is spread over devices and cannot be moved to {target}; leave device out"
        )
    try:
        model.eval()
        if target != home:
            model.to(target)
        if target.type == "cuda":
            torch.cuda.reset_peak_memory_stats(target)
        yield target
    finally:
        for module, training in modes.items():
            module.training = training
        if target != home:
            model.to(home)
