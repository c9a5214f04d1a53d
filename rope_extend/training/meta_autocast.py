"""Autocast in a dry run: the meta device lacks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rope_extend.models.planned_device import device_of


@contextmanager
def casting_as_autocast(model: nn.Module, dtype: torch.dtype) -> Iterator[dict[nn.Module, Tensor]]:
    """Make the layers of a bfloat16 model cast as under autocast, which the meta device lacks.

    Yields:
        The trained weights that were cast, by module; autocast keeps them until it ends.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.LayerNorm)]
    casts: dict[nn.Module, Tensor] = {}
    for module in layers if dtype == torch.bfloat16 else ():
        forward: Callable[[Tensor], Tensor] = (
            partial(_multiply, module, dtype, casts)
            if isinstance(module, nn.Linear)
            else partial(_normalise, module)
        )
        module.__dict__["forward"] = forward
    try:
        yield casts
    finally:
        for module in layers:
            module.__dict__.pop("forward", None)


def _normalise(module: nn.LayerNorm, states: Tensor) -> Tensor:
    """A layer norm; on a GPU, autocast computes it in float32 and returns that."""
    if device_of(states).type != "cuda":
        return nn.LayerNorm.forward(module, states)
    weight, bias = (None if value is None else value.float() for value in (module.weight, module.bias))
    return F.layer_norm(states.float(), module.normalized_shape, weight, bias, module.eps)


def _multiply(
    module: nn.Linear, dtype: torch.dtype, casts: dict[nn.Module, Tensor], states: Tensor
) -> Tensor:
    bias = None if module.bias is None else module.bias.to(dtype)
    weight = casts.get(module, module.weight).to(dtype)
    if module.weight.requires_grad:
        casts[module] = weight
    return F.linear(states.to(dtype), weight, bias)
