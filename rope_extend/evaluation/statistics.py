"""Statistics of losses and scores: bootstrap intervals over documents, position buckets, paired comparisons.

The bootstrap draws documents, not tokens. The losses of one document are correlated, so an interval over
tokens would be far too narrow. Everything is seeded and gives the same digits every time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from rope_extend.errors import RopeExtendError
from rope_extend.report.tables import interval, signed

Floats = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]

DRAWS = 2000
"""Resamples of a bootstrap."""
_BLOCK = 2**18
"""Number of documents that are drawn at a time: 4 MiB of their sums and counts."""


def ppl(nats: float) -> float:
    """`exp(nats)`, infinite on overflow."""
    return math.exp(nats) if not nats > 700 else math.inf  # math.exp raises on overflow


def bootstrap(
    sums: Sequence[float], terms: Sequence[int], *, level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float] | None:
    """Percentile interval of `Σ sums / Σ terms` over documents drawn with replacement (Efron 1979).

    Args:
        sums: sum of each document's losses in nats, or of the differences of two measurements.
        terms: number of losses in each sum.
        level: confidence level of the interval.
        draws: number of resamples.
        seed: random seed; the same seed gives the same interval.

    Returns:
        `(low, high)` in nats per token; None for fewer than two documents, or for a sum that is not finite.

    Raises:
        RopeExtendError: `sums` and `terms` differ in length, or the level is not between 0 and 1.
    """
    if len(sums) != len(terms) or not 0 < level < 1:
        raise RopeExtendError(
            f"a bootstrap needs a sum and a count for each document and a level between 0 and 1; got "
            f"{len(sums)} sums, {len(terms)} counts and {level!r}"
        )
    values, weights = np.asarray(sums, dtype=np.float64), np.asarray(terms, dtype=np.float64)
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    random = np.random.default_rng(seed)
    means = np.empty(draws)
    block = max(1, _BLOCK // len(values))  # draws at a time, so that memory does not limit the documents
    for first in range(0, draws, block):
        count = min(block, draws - first)
        chosen = random.integers(0, len(values), (count, len(values)))
        means[first : first + count] = values[chosen].sum(axis=1) / weights[chosen].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_over(nll: Floats, scored: Counts | None, positions: slice) -> tuple[float, int]:
    """Mean loss over a range of positions with equal weight for each loss, and the number of losses.

    `nll` and `scored` are float64 and int64 `[positions]`; without `scored` each position has weight 1.
    """
    values = nll[positions]
    weights = np.ones(len(values), dtype=np.int64) if scored is None else scored[positions]
    used = weights > 0
    total = int(weights[used].sum())
    return (float((values[used] * weights[used]).sum()) / total if total else math.nan), total


@dataclass(frozen=True)
class Bucket:
    """Perplexity of the targets at positions `start … stop−1`, and their number."""

    start: int
    stop: int
    ppl: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers. A perplexity that is not finite becomes None."""
        return {**asdict(self), "ppl": self.ppl if math.isfinite(self.ppl) else None}


def buckets(nll: Floats, scored: Counts | None = None, *, count: int = 8) -> list[Bucket]:
    """Perplexity by position, in at most `count` ranges, each twice as long as the one before.

    Args:
        nll: float64 `[positions]`, nats; entry p is the mean loss at position p + 1.
        scored: int64 `[positions]`, number of losses at each position; 1 by default.
        count: maximum number of ranges.

    Returns:
        Ascending ranges that cover every position once, without those where nothing was scored.
    """
    last = len(nll) + 1
    edges = sorted({1, last, *(math.ceil(last / 2**power) for power in range(1, count))})
    ranges = []
    for start, stop in itertools.pairwise(edges):
        mean, tokens = mean_over(nll, scored, slice(start - 1, stop - 1))
        if tokens:
            ranges.append(Bucket(start, stop, ppl(mean), tokens))
    return ranges


@dataclass(frozen=True)
class Difference:
    """The difference between two measurements on the same tokens.

    Attributes:
        length: length in tokens.
        nats: mean loss of the second minus that of the first; below zero the second is better.
        low: lower end of the 95 % interval over documents; None for fewer than two documents.
        high: upper end of the interval.
        ratio: perplexity of the second divided by that of the first, `exp(nats)`.
        documents: number of documents.
    """

    length: int
    nats: float
    low: float | None
    high: float | None
    ratio: float
    documents: int

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers. NaN and infinity become None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @property
    def clear(self) -> bool:
        """Whether zero is outside the interval."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def paired(length: int, first: Sequence[float], second: Sequence[float], terms: Sequence[int]) -> Difference:
    """Compare two measurements document by document.

    A difficult document is difficult in both measurements, which cancels in the difference. So its interval
    is far narrower than those of the two perplexities.

    Args:
        length: length in tokens.
        first: sum of each document's losses in nats, in the first measurement.
        second: the same for the second measurement.
        terms: number of losses in each sum.

    Raises:
        RopeExtendError: the three differ in length, or are empty.
    """
    if not len(first) == len(second) == len(terms) > 0:
        raise RopeExtendError(
            f"a paired comparison needs the same documents twice; got {len(first)} and {len(second)} sums "
            f"and {len(terms)} counts"
        )
    differences = (np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)).tolist()
    nats = float(np.sum(differences)) / sum(terms)
    low, high = bootstrap(differences, terms) or (None, None)
    return Difference(length, nats, low, high, ppl(nats), len(terms))


@dataclass(frozen=True)
class Rate:
    """The mean score of some trials, 0 … 1, with its 95 % Wilson interval `low` … `high`."""

    trials: int
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, scores: Sequence[float]) -> Self:
        """From the scores of trials, at least one."""
        mean = sum(scores) / len(scores)
        return cls(len(scores), mean, *wilson(mean, len(scores)))

    def __str__(self) -> str:
        return f"{self.mean:.0%} ({100 * self.low:.0f}–{100 * self.high:.0f})"


def wilson(mean: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval (1927) of a mean score over `trials`; 95 % by default.

    Scores between 0 and 1 have at most the variance of scores that are 0 or 1, so for them the interval is
    conservative.
    """
    width = z * math.sqrt(mean * (1 - mean) / trials + z**2 / (4 * trials**2))
    middle, norm = mean + z**2 / (2 * trials), 1 + z**2 / trials
    return max(0.0, (middle - width) / norm), min(1.0, (middle + width) / norm)


@dataclass(frozen=True)
class RateDifference:
    """The difference between two mean scores on the same prompts.

    Attributes:
        first: the first mean score.
        second: the second mean score.
        change: second minus first, −1 … 1; below zero the second is worse.
        low: lower end of the 95 % interval of the change.
        high: upper end of the interval.
    """

    first: Rate
    second: Rate
    change: float
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)

    def __str__(self) -> str:
        """The change in points, with its interval: `-15 (-36 … +4)`."""
        return f"{signed(100 * self.change, '+.0f')} ({interval(100 * self.low, 100 * self.high, '+.0f')})"


def paired_rates(first: Sequence[float], second: Sequence[float]) -> RateDifference:
    """Compare the scores, 0 … 1, of two measurements on the same prompts, prompt by prompt.

    The interval is Newcombe's for paired proportions (1998, Statistics in Medicine 17, 2635, method 10). It
    combines the two Wilson intervals by their correlation. So it has a width even if all trials succeed,
    where a bootstrap interval would be empty.

    Raises:
        RopeExtendError: the two differ in length, or are empty.
    """
    if not len(first) == len(second) > 0:
        raise RopeExtendError(
            f"a paired comparison needs the same prompts twice; got {len(first)} and {len(second)} scores"
        )
    before, after = Rate.of(first), Rate.of(second)
    n, change = len(first), after.mean - before.mean
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    # n² times the covariance; for scores of 0 and 1 this is the determinant of their 2×2 table.
    covariance = n * float(a @ b) - float(a.sum() * b.sum())
    if covariance > 0:
        covariance = max(covariance - n / 2, 0.0)  # the method's continuity correction
    spread = n**2 * float(a.std() * b.std())
    phi = covariance / spread if spread > 0 else 0.0

    def distance(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    low = change - distance(after.mean - after.low, before.high - before.mean)
    high = change + distance(after.high - after.mean, before.mean - before.low)
    return RateDifference(before, after, change, max(-1.0, low), min(1.0, high))
