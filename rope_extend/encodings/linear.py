"""Linear position interpolation (PI)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.core.rope import ScaledRope
from rope_extend.encodings.core.shapes import RopeShape


@dataclass(frozen=True)
class Linear(ScaledRope):
    """Position interpolation: every frequency divided by s, so that s times as many positions fit."""

    name: ClassVar[str] = "linear"
    paper: ClassVar[str] = "2306.15595"
    rope_type: ClassVar[str | None] = "linear"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta_i / s`, `[dim/2]` float64, radians per token."""
        return shape.inv_freq() / self.factor
