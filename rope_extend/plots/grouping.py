"""The loss by position, averaged in groups of positions."""

from __future__ import annotations

import itertools

import numpy as np

from rope_extend.plots.rows import Floats


def loss_by_group(losses: Floats, first: int) -> tuple[Floats, Floats]:
    """The middle of each group of positions and its mean loss, from `first` on, four groups to a doubling.

    Args:
        losses: `[length - 1]` nats; entry p is the loss of the target at position p + 1. NaN: not scored.
        first: the first position.
    """
    last = len(losses) + 1
    edges = first * 2 ** np.arange(0, np.log2(last / first) + 0.25, 0.25)
    groups = list(itertools.pairwise(np.unique(edges.round().astype(np.int64).clip(1, last)).tolist()))
    means = np.array([_mean(losses[start - 1 : stop - 1]) for start, stop in groups])
    return np.array([np.sqrt(start * (stop - 1)) for start, stop in groups]), means


def _mean(losses: Floats) -> float:
    """The mean of the positions that were scored; the others are NaN."""
    scored = losses[~np.isnan(losses)]
    return float(scored.mean()) if scored.size else np.nan
