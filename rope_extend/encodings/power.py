"""Power basis: the slower a channel, the more it is slowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.core.rope import ComposedRope
from rope_extend.encodings.core.shapes import RopeShape


@dataclass(frozen=True)
class Power(ComposedRope):
    """Power basis: channel i is slowed by `(1 - 2i/d)^k`: the fastest not at all, the slowest the most.

    Attributes:
        inner: the schedule that is slowed further; Giraffe's code applies it to interpolation.
        exponent: k; 0 changes nothing, 0.5 is Giraffe's reported value.
    """

    exponent: float = 0.5

    name: ClassVar[str] = "power"
    paper: ClassVar[str] = "2308.10882"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("exponent", minimum=0, maximum=100)

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta_i * (1 - i/(d/2))^k`, `[dim/2]` float64, radians per token."""
        return self.inner.inv_freq(shape, seq_len) * (1 - shape.exponents) ** self.exponent
