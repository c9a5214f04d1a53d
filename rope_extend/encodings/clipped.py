"""Clipped RoPE (CoPE): the slowest channels fade out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.rope import ComposedRope
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class Clipped(ComposedRope):
    """Clipped RoPE (CoPE): the slowest channels fade to frequency zero and reach no unseen angle.

    The first of the clipped pairs keeps its frequency and the last has frequency zero, also if it is the only
    one. Between them the factor is half a cosine, because a hard edge makes attention oscillate over long
    distances.

    Attributes:
        inner: the schedule that is clipped.
        channels: n, the number of slowest channel pairs to clip. By default the pairs that do not complete
            a turn within the trained window under plain RoPE, which the paper names as the cause. Its code
            clips 20 of Llama 3's 64.
        hard: set all n to frequency zero, as in the paper's comparison.
    """

    channels: int | None = None
    hard: bool = False

    name: ClassVar[str] = "clipped"
    paper: ClassVar[str] = "2602.05258"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels is not None:
            count = self.channels
            if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
                raise RopeExtendError(
                    f"clipped: channels must be a whole number of channel pairs, 1 or more, got {count!r}"
                )
            object.__setattr__(self, "channels", int(count))
        if not isinstance(self.hard, bool):
            raise RopeExtendError(f"clipped: hard must be true or false, got {self.hard!r}")

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """The inner table, its last n values times `(1 + cos(0 .. pi)) / 2`, or 0; `[dim/2]` float64.

        Raises:
            RopeExtendError: more channel pairs than the model rotates.
        """
        table = self.inner.inv_freq(shape, seq_len)
        count = self.channels
        if count is None:
            count = int((2 * math.pi / shape.inv_freq() > shape.trained_length).sum())
        if count > len(table):
            raise RopeExtendError(
                f"clipped: channels is {count}, but this model rotates {len(table)} channel pairs; give fewer"
            )
        fade = (1 + torch.linspace(0, math.pi, count, dtype=torch.float64).cos()) / 2
        fade[-1:] = 0
        kept = torch.ones(len(table) - count, dtype=torch.float64)
        return table * torch.cat((kept, torch.zeros_like(fade) if self.hard else fade))
