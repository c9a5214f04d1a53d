"""xPos: rotation with a decay over distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.core.rope import ComposedRope
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError

_GAMMA = 0.4
"""Keeps the fastest channel's decay finite, as in the paper and its code."""


@dataclass(frozen=True)
class XPos(ComposedRope):
    """xPos: the product of a query and a key decays with their distance, fastest in the fast channels.

    Meant for models trained with it. In other models, distant tokens lose weight.

    Attributes:
        inner: the rotary schedule.
        scale_base: tokens over which a channel decays by its `zeta_i`; the larger, the weaker the decay.
    """

    scale_base: float = 512.0

    name: ClassVar[str] = "xpos"
    paper: ClassVar[str] = "2212.10554"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("scale_base", minimum=1, maximum=1e12)
        if self.inner.per_row:
            raise RopeExtendError(
                f"xpos rotates keys for each query, but {self.inner} does not; give the inner schedule "
                f"per='query'"
            )

    @property
    def rotates_in_attention(self) -> bool:
        """Always: the factor of a query and a key depends on their distance."""
        return True

    def decay(self, shape: RopeShape) -> Tensor:
        """`ln(zeta_i) / scale_base` with `zeta_i = (2i + 0.4 d) / (1.4 d)`, plus the inner schedule's.

        `[dim/2]` float64, below 0, per token; d is the number of rotated channels.
        """
        zeta = (shape.exponents + _GAMMA) / (1 + _GAMMA)
        decay, inner = zeta.log() / self.scale_base, self.inner.decay(shape)
        return decay if inner is None else decay + inner
