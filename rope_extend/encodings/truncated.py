"""Truncated basis: channels too slow to complete a turn in training get a fixed frequency, or none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.rope import ComposedRope
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class Truncated(ComposedRope):
    """Truncated basis: fast channels are kept, slow ones get one small frequency, the slowest frequency zero.

    The default limits are those of Giraffe's code, for a trained window of L tokens. Channels that complete
    a turn within L are kept. Channels below an eighth of a turn get frequency zero. Those between rotate
    once in 16 L tokens. All three parameters are in radians per token.

    Attributes:
        inner: the schedule that is truncated.
        keep_above: a: channels at least this fast are kept; `2 pi / L` by default.
        zero_below: b: channels slower than this do not rotate; `a / 8` by default.
        between: rho: the frequency of channels from b up to a; `a / 16` by default.
    """

    keep_above: float | None = None
    zero_below: float | None = None
    between: float | None = None

    name: ClassVar[str] = "truncated"
    paper: ClassVar[str] = "2308.10882"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("keep_above", "zero_below", "between"):
            if getattr(self, field) is not None:
                self._check(field, minimum=0, maximum=2 * math.pi, above=field == "keep_above")
        if self.keep_above is not None:
            self._limits(self.keep_above)

    def _limits(self, above: float) -> tuple[float, float, float]:
        """`(a, b, rho)`.

        Raises:
            RopeExtendError: b or rho is above a, which would make a slower channel the faster one.
        """
        below = above / 8 if self.zero_below is None else self.zero_below
        between = above / 16 if self.between is None else self.between
        if max(below, between) > above:
            raise RopeExtendError(
                f"truncated: zero_below and between must not exceed keep_above, got {below:g}, {between:g} "
                f"and {above:g} radians per token"
            )
        return above, below, between

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta_i` from a up, rho from b up to a, else 0; `[dim/2]` float64, radians per token.

        Raises:
            RopeExtendError: a limit exceeds the default `2 pi / L` of this model.
        """
        above, below, between = self._limits(self.keep_above or 2 * math.pi / shape.trained_length)
        table = self.inner.inv_freq(shape, seq_len)
        slow = torch.where(table >= below, torch.full_like(table, between), torch.zeros_like(table))
        return torch.where(table >= above, table, slow)
