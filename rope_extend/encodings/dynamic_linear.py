"""Dynamic interpolation: linear, by just as much as the current length needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.base import GrowingRope, RopeShape


def needed_factor(shape: RopeShape, seq_len: int | None) -> float:
    """`max(1, l / L)`: how many times longer than the trained window a sequence is."""
    return max(1.0, (seq_len or 1) / shape.trained_length)


@dataclass(frozen=True)
class DynamicLinear(GrowingRope):
    """Dynamic interpolation: plain within the trained window, beyond it linear by what the length needs.

    Attributes:
        per: whose length it is, `query` or `row`.
        step: with `per="query"`, by what share a text grows until the next table.
    """

    name: ClassVar[str] = "dynamic_linear"
    paper: ClassVar[str] = "2309.00071"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta_i / max(1, l/L)`, `[dim/2]` float64, radians per token."""
        return shape.inv_freq() / needed_factor(shape, seq_len)

    def target_length(self, shape: RopeShape) -> int | None:
        """None: it follows any length."""
        return None
