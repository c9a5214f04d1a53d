"""NTK-by-parts: interpolate slow channels, keep fast ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.core.rope import ScaledRope
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError


def by_parts(shape: RopeShape, factor: float, slow: float, fast: float) -> Tensor:
    """Blend of interpolated and plain frequencies, `[dim/2]` float64, radians per token.

    Channel i makes `r_i` turns within the trained window. Its frequency is divided by `factor` if
    `r_i <= slow` and kept if `r_i >= fast`. Between the two is a ramp that is linear in `r_i`.
    """
    plain = shape.inv_freq()
    turns = shape.trained_length * plain / (2 * math.pi)
    keep = ((turns - slow) / (fast - slow)).clamp(0, 1)
    return (1 - keep) * plain / factor + keep * plain


@dataclass(frozen=True)
class NTKByParts(ScaledRope):
    """NTK-by-parts: YaRN's blend with the ramp of its paper, linear in turns, and no attention factor.

    Attributes:
        factor: `s = target_length / trained_length`.
        alpha: frequencies with fewer turns than this within the trained window are divided by s.
        beta: frequencies with more turns than this are kept.
    """

    alpha: float = 1.0
    beta: float = 32.0

    name: ClassVar[str] = "ntk_by_parts"
    paper: ClassVar[str] = "2309.00071"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("alpha", "beta"):
            self._check(field, minimum=0, maximum=1e6, above=True)
        if self.beta <= self.alpha:
            raise RopeExtendError(
                f"ntk_by_parts: beta must exceed alpha, got {self.beta:g} and {self.alpha:g}"
            )

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`(1 - keep) * theta_i / s + keep * theta_i`, `[dim/2]` float64, radians per token."""
        return by_parts(shape, self.factor, self.alpha, self.beta)
