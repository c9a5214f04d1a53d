"""NTK-aware scaling: a larger base instead of divided positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.critical import check_critical, critical_pair
from rope_extend.encodings.core.rope import ScaledRope
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError


def ntk_theta(shape: RopeShape, stretch: float) -> float:
    """The base with which the slowest pair rotates `stretch` times slower and the fastest is unchanged.

    `theta' = theta * stretch^(d/(d-2))`.

    Raises:
        RopeExtendError: fewer than four rotated channels: the only pair is the fastest, which stays.
    """
    if shape.dim < 4:
        raise RopeExtendError(
            f"NTK scaling needs 4 or more rotated channels per head, this model has {shape.dim}; use linear"
        )
    return float(shape.theta * stretch ** (shape.dim / (shape.dim - 2)))


@dataclass(frozen=True)
class NTK(ScaledRope):
    """NTK-aware scaling: a larger base, which slows the slowest channels by s and keeps the fastest.

    Attributes:
        factor: `s = target_length / trained_length`.
        critical: the first channel pair that is divided by s in full: LongRoPE2's critical pair (2502.20082).
            The pairs before it are divided by `s^(i/critical)`. `theoretical` is the first pair with at most
            one turn within the trained window; LongRoPE2 finds lower ones better. By default the last pair,
            which is NTK-aware scaling as published.
    """

    critical: int | str | None = None

    name: ClassVar[str] = "ntk"
    paper: ClassVar[str] = "bloc97 2023 (NTK-aware scaled RoPE); described in 2309.00071"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "critical", check_critical("ntk", self.critical))

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Plain RoPE's table at `theta * s^(d/(d-2))`, `[dim/2]` float64, radians per token.

        With `critical=c`: `theta_i / s^min(1, i/c)`.
        """
        if self.critical is None:
            return shape.inv_freq(ntk_theta(shape, self.factor))
        pair = critical_pair("ntk", self.critical, shape)
        share = (torch.arange(shape.dim // 2, dtype=torch.float64) / pair).clamp(max=1)
        return shape.inv_freq() / self.factor**share

    def rope_parameters(self, shape: RopeShape) -> dict[str, Any]:
        """Stock `default` with the larger theta, which every loader supports; `longrope` for `critical`."""
        if self.critical is not None:
            return self.longrope_parameters(shape)
        return {"rope_type": "default", "rope_theta": ntk_theta(shape, self.factor)}
