"""NoPE: no position encoding at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.base import REPLACED, RopeEncoding, RopeShape


@dataclass(frozen=True)
class NoPE(RopeEncoding):
    """NoPE: no rotation at all; a causal model tells order only by what each token can see."""

    name: ClassVar[str] = "nope"
    paper: ClassVar[str] = "2305.19466"
    adaptation = REPLACED

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Zeros, `[dim/2]` float64, radians per token."""
        return shape.inv_freq() * 0

    def target_length(self, shape: RopeShape) -> int | None:
        """None: without positions there is no length it is meant for."""
        return None
