"""NTK-mixed scaling: a divisor that grows from channel to channel up to the factor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.rope import ScaledRope
from rope_extend.encodings.core.shapes import RopeShape


@dataclass(frozen=True)
class NTKMixed(ScaledRope):
    """NTK-mixed: channel i is slowed by `exp(a (i+1)^c)`, which grows up to s at the last channel.

    Attributes:
        factor: `s = target_length / trained_length`.
        exponent: c; the larger it is, the less the early channels are slowed.
    """

    exponent: float = 0.75

    name: ClassVar[str] = "ntk_mixed"
    paper: ClassVar[str] = "Su 2023 (NTK-RoPE mixed)"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("exponent", minimum=0, maximum=10, above=True)

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta_i * exp(-a (i+1)^c)` with `a = ln s / (d/2)^c`, `[dim/2]` float64, radians per token."""
        share = (torch.arange(1, shape.dim // 2 + 1, dtype=torch.float64) / (shape.dim // 2)) ** self.exponent
        return shape.inv_freq() * torch.exp(-math.log(self.factor) * share)
