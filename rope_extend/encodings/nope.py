"""NoPE: no position encoding at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.core.rope import RopeEncoding
from rope_extend.encodings.core.shapes import RopeShape


@dataclass(frozen=True)
class NoPE(RopeEncoding):
    """NoPE: no rotation; only the causal mask tells the model the order of tokens."""

    name: ClassVar[str] = "nope"
    paper: ClassVar[str] = "2305.19466"
    replaces_rotation = True

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Zeros, `[dim/2]` float64, radians per token."""
        return shape.inv_freq() * 0

    def target_length(self, shape: RopeShape) -> int | None:
        """None: without positions there is no intended length."""
        return None
