"""Whether the tables that a model reads by are those of an encoding, and whether tables say all of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rope_extend.encodings import AbsoluteEncoding, Encoding, RopeEncoding, RopeShape
from rope_extend.families import adapter_for
from rope_extend.inspection import RESTING, active_table, unwrap


def beyond_a_table(encoding: Encoding, shape: RopeShape) -> str:
    """What an encoding does that one table of frequencies and a factor do not say; empty if nothing."""
    if not isinstance(encoding, RopeEncoding):
        if isinstance(encoding, AbsoluteEncoding):
            return "it adds vectors to the token embeddings, and turns nothing"
        return "it acts inside attention, beside or instead of a rotation"
    if encoding.decay(shape) is not None:
        return "what a query and a key share shrinks with their distance"
    if encoding.logit_scale(shape, torch.arange(1)) is not None:
        return "it scales attention logits beside the rotation"
    if encoding.start_tokens:
        return f"its first {encoding.start_tokens} positions keep plain RoPE's angles"
    if encoding.depends_on_length or encoding.rotates_in_attention:
        return "its table follows the length of the text"
    return ""


def rotary_tables(model: nn.Module, length: int) -> list[tuple[Tensor, float]]:
    """`(inv_freq [pairs] float64, attention factor)` of each rotary module, for texts of `length` tokens."""
    base: Any = unwrap(model)
    modules = adapter_for(base.config.model_type).rotary_modules(base.base_model)
    return [active_table(module, base.config, length) for module in modules.values()]


def has_tables_of(model: nn.Module, encoding: RopeEncoding, shape: RopeShape, lengths: Iterable[int]) -> bool:
    """Whether every rotary module of a model has an encoding's table, but for float32's rounding.

    Pairs beyond those of the shape must not turn.
    """
    for length in lengths:
        ours, scale = encoding.inv_freq(shape, length), encoding.attention_factor(shape, length)
        for table, factor in rotary_tables(model, length):
            if len(table) < len(ours) or not math.isclose(factor, scale, rel_tol=1e-6):
                return False
            wanted = torch.zeros_like(table)
            wanted[: len(ours)] = ours
            if not torch.allclose(table, wanted, rtol=1e-5, atol=RESTING):
                return False
    return True
