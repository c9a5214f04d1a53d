"""LongRoPE2's critical pair: the first channel pair that is interpolated by the whole factor (2502.20082).

A pair whose period exceeds the trained window never completes a turn in training. In theory the first of
these pairs is the critical one. LongRoPE2 finds that pairs a little faster are also trained too little, so
the real critical pair has a lower index. Its search begins at the pair with ten periods in the window.
"""

from __future__ import annotations

import math
from numbers import Integral

from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError

THEORETICAL = "theoretical"
"""The name of the theoretical critical pair, as a parameter."""


def critical_range(shape: RopeShape) -> tuple[int, int]:
    """The first pair with at most ten periods in the trained window, and the first with at most one.

    The second is the theoretical critical pair. Both are at least 1 and at most the last pair.
    """
    last = shape.dim // 2 - 1
    ten, one = (max(1, min(last, math.ceil(shape.index_with_turns(turns)))) for turns in (10, 1))
    return ten, one


def check_critical(name: str, field: str, critical: object) -> int | str:
    """A critical pair as a parameter: `theoretical`, or an index of at least 1.

    Raises:
        RopeExtendError: anything else.
    """
    if critical == THEORETICAL:
        return THEORETICAL
    if isinstance(critical, bool) or not isinstance(critical, Integral) or critical < 1:
        raise RopeExtendError(
            f"{name}: {field} must be the index of a channel pair, 1 or more, or {THEORETICAL!r}; "
            f"got {critical!r}"
        )
    return int(critical)


def critical_pair(name: str, critical: int | str, shape: RopeShape) -> int:
    """The index of the critical pair in a model.

    Raises:
        RopeExtendError: the model has no such pair.
    """
    if isinstance(critical, str):
        return critical_range(shape)[1]
    if critical >= shape.dim // 2:
        raise RopeExtendError(
            f"{name}: critical is {critical}, but this model rotates {shape.dim // 2} channel pairs, "
            f"0 to {shape.dim // 2 - 1}; the theoretical critical pair is {critical_range(shape)[1]}"
        )
    return critical
