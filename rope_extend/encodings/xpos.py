"""xPos: rotation with a decay over distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.base import ComposedRope, RopeShape
from rope_extend.errors import RopeExtendError

_GAMMA = 0.4
"""What keeps the fastest channel's decay finite, in the paper and in its code."""


@dataclass(frozen=True)
class XPos(ComposedRope):
    """xPos: what query and key share shrinks with their distance, in the fast channels the most.

    Made for models that were trained with it; in others, distant tokens lose weight that they had.

    Attributes:
        inner: the schedule that queries and keys are rotated by.
        scale_base: tokens over which a channel shrinks by its `zeta_i`; the larger, the weaker.
    """

    scale_base: float = 512.0

    name: ClassVar[str] = "xpos"
    paper: ClassVar[str] = "2212.10554"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("scale_base", minimum=1, maximum=1e12)
        if self.inner.per_row:
            raise RopeExtendError(
                f"xpos rotates keys for each query that reads them, which {self.inner} does not do; "
                f"give the inner schedule per='query'"
            )

    @property
    def rotates_in_attention(self) -> bool:
        """Always: the factor of a query-key pair follows from their distance."""
        return True

    def decay(self, shape: RopeShape) -> Tensor:
        """`ln(zeta_i) / scale_base` with `zeta_i = (2i + 0.4 d) / (1.4 d)`, plus the inner schedule's.

        `[dim/2]` float64, below 0, per token; d is the number of rotated channels.
        """
        zeta = (shape.exponents + _GAMMA) / (1 + _GAMMA)
        own, inner = zeta.log() / self.scale_base, self.inner.decay(shape)
        return own if inner is None else own + inner
