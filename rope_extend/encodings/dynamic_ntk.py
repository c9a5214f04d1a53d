"""Dynamic NTK scaling: the base grows with the current length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.base import GrowingRope, RopeShape, ScaledRope
from rope_extend.encodings.ntk import ntk_theta


@dataclass(frozen=True)
class DynamicNTK(ScaledRope, GrowingRope):
    """Dynamic NTK: plain RoPE within the trained window, and a base that grows with the length beyond it.

    Attributes:
        factor: how fast the base grows: `s*l/L - (s-1)` times the window at l tokens.
        per: whose length it is, `query` or `row`.
        step: with `per="query"`, by what share a text grows until the next table.
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
