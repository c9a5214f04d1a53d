"""A model in evaluation mode while it is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rope_extend.models.load_options import input_device
from rope_extend.models.view import unwrap

_LORA_MATRICES = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""Attributes of peft's LoRA layers that hold the matrices of each adapter."""


def cast_adapter(model: Any) -> Any:
    """Give the LoRA matrices of a model in float16 or bfloat16 its dtype, in place; returns the model.

    peft loads them as float32, and then computes float32 states as wide as those of the MLPs. Training
    multiplies by autocast in the dtype of the model, and this gives the same numbers bit for bit.

    Args:
        model: a PEFT model.
    """
    from peft.tuners.lora import LoraLayer

    dtype = unwrap(model).dtype
    if dtype in (torch.float16, torch.bfloat16):
        for layer in model.modules():
            if isinstance(layer, LoraLayer) and not layer.lora_variant:  # a variant may need its own dtypes
                for name in _LORA_MATRICES:
                    getattr(layer, name).to(dtype)
    return model


@contextmanager
def evaluation_mode(model: Any) -> Iterator[torch.device]:
    """Put a model into evaluation mode; afterwards each module has its old mode.

    Also resets the peak of CUDA's memory statistics. Yields the device where token ids go.
    """
    modes = {module: module.training for module in model.modules()}
    device = input_device(model)
    try:
        model.eval()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        yield device
    finally:
        for module, training in modes.items():
            module.training = training
