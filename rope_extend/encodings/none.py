"""Plain RoPE: the model as it was pretrained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.core.rope import RopeEncoding
from rope_extend.encodings.core.shapes import RopeShape


@dataclass(frozen=True)
class PlainRope(RopeEncoding):
    """Plain RoPE, `theta_i = theta^(-2i/d)`: the baseline for every extension."""

    name: ClassVar[str] = "none"
    paper: ClassVar[str] = "2104.09864"
    rope_type: ClassVar[str | None] = "default"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta^(-2i/d)`, `[dim/2]` float64, radians per token."""
        return shape.inv_freq()
