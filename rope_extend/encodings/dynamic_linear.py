"""Dynamic interpolation: linear, with the factor that the current length needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.core.rope import GrowingRope
from rope_extend.encodings.core.shapes import RopeShape


def needed_factor(shape: RopeShape, seq_len: int | None) -> float:
    """`max(1, l / L)`: the length of a sequence in trained windows, at least 1."""
    return max(1.0, (seq_len or 1) / shape.trained_length)


@dataclass(frozen=True)
class DynamicLinear(GrowingRope):
    """Dynamic interpolation: plain RoPE within the trained window, beyond it linear with factor l / L.

    Attributes:
        per: which length sets the table, `query` or `row`.
        step: with `per="query"`, the relative growth of the text from one table to the next.
    """

    name: ClassVar[str] = "dynamic_linear"
    paper: ClassVar[str] = "2309.00071"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta_i / max(1, l/L)`, `[dim/2]` float64, radians per token."""
        return shape.inv_freq() / needed_factor(shape, seq_len)

    def target_length(self, shape: RopeShape) -> int | None:
        """None: it adapts to any length."""
        return None
