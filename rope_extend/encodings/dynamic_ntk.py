"""Dynamic NTK scaling: the base grows with the current length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.core.rope import GrowingRope, ScaledRope
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.encodings.ntk import ntk_theta


@dataclass(frozen=True)
class DynamicNTK(ScaledRope, GrowingRope):
    """Dynamic NTK: plain RoPE within the trained window, and a base that grows with the length beyond it.

    Attributes:
        factor: s, how fast the base grows: at l tokens it is that for `s*l/L - (s-1)` times the window.
        per: which length sets the table, `query` or `row`.
        step: with `per="query"`, the relative growth of the text from one table to the next.
    """

    name: ClassVar[str] = "dynamic_ntk"
    paper: ClassVar[str] = "emozilla 2023 (dynamically scaled RoPE); described in 2309.00071"
    rope_type: ClassVar[str | None] = "dynamic"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Plain RoPE's table at `theta * (s*l/L - (s-1))^(d/(d-2))` for l > L, `[dim/2]` float64."""
        if seq_len is None or seq_len <= shape.trained_length:
            return shape.inv_freq()
        stretch = self.factor * seq_len / shape.trained_length - (self.factor - 1)
        return shape.inv_freq(ntk_theta(shape, stretch))
