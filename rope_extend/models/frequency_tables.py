"""Whether the rotary tables of a model are those of an encoding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.encodings.core.checks import ZERO_FREQUENCY
from rope_extend.models.families import adapter_for
from rope_extend.models.view import active_table, unwrap


def rotary_tables(model: nn.Module, length: int) -> list[tuple[Tensor, float]]:
    """`(inv_freq [pairs] float64, attention factor)` of each rotary module, for texts of `length` tokens."""
    base: Any = unwrap(model)
    modules = adapter_for(base.config.model_type).rotary_modules(base.base_model)
    return [active_table(module, base.config, length) for module in modules.values()]


def has_tables_of(model: nn.Module, encoding: RopeEncoding, shape: RopeShape, lengths: Iterable[int]) -> bool:
    """Whether every rotary module of a model has an encoding's tables, up to float32 rounding.

    Pairs beyond those of the shape must have frequency zero.
    """
    for length in lengths:
        ours, scale = encoding.inv_freq(shape, length), encoding.attention_factor(shape, length)
        for table, factor in rotary_tables(model, length):
            if len(table) < len(ours) or not math.isclose(factor, scale, rel_tol=1e-6):
                return False
            expected = torch.zeros_like(table)
            expected[: len(ours)] = ours
            if not torch.allclose(table, expected, rtol=1e-5, atol=ZERO_FREQUENCY):
                return False
    return True
