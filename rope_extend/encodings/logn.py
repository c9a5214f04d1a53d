"""Log-n scaling: attention as sharp over a long text as over a short one."""

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
class LogN(ComposedRope):
    """Log-n scaling: logits of a query beyond the trained window are multiplied by `ln(p+1) / ln L`.

    Softmax over more keys is flatter; the factor keeps its entropy about as in training. The inner schedule
    sets the frequencies.

    Attributes:
        inner: the rotary schedule.
    """

    name: ClassVar[str] = "logn"
    paper: ClassVar[str] = "Su 2021 (log-n attention scaling, kexue.fm/archives/8823)"

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """`max(1, ln(p+1) / ln L)` at position p, times the inner schedule's; float64, like `position_ids`.

        Raises:
            RopeExtendError: the trained window is one token, for which the formula has no value.
        """
        scale = log_n_scale(shape, position_ids)
        inner = self.inner.logit_scale(shape, position_ids)
        return scale if inner is None else scale * inner


def log_n_scale(shape: RopeShape, position_ids: Tensor) -> Tensor:
    """`max(1, ln(p+1) / ln L)` at position p, float64, like `position_ids` (Su 2021).

    Raises:
        RopeExtendError: the trained window is one token, for which the formula has no value.
    """
    if shape.trained_length == 1:
        raise RopeExtendError(
            "log-n scaling needs a model trained on 2 or more tokens, this one has a window of 1; turn it "
            "off, or use another method"
        )
    seen = position_ids.to(torch.float64).clamp(min=0)  # padding may have negative positions
    return (torch.log1p(seen) / math.log(shape.trained_length)).clamp(min=1)
