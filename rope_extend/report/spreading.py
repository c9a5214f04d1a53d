"""Labels at the ends of lines, moved apart so that none overlaps another."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean


def spread_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights in 0 … 1 apart to at least `gap`, with the least squared movement, in the same order.

    With q_i = height_i − i · gap, the condition is that q does not fall. This is isotonic regression, which
    pooling adjacent violators solves exactly.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    pools: list[list[float]] = []
    for rank, i in enumerate(order):
        pools.append([heights[i] - rank * gap])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    flat = [fmean(pool) for pool in pools for _ in pool]
    highest = max(0.0, 1 - (len(heights) - 1) * gap)
    spread = [0.0] * len(heights)
    for rank, i in enumerate(order):
        spread[i] = min(max(flat[rank], 0.0), highest) + rank * gap
    return spread
