"""What a mean loss is worth: intervals by bootstrap over documents, buckets of positions, paired comparisons.

Documents, not tokens, are what is drawn again: the losses of one document hang together, so an interval over
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
from rope_extend.evaluation.tables import interval, signed

Floats = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]

DRAWS = 2000
"""Resamples of a bootstrap."""


def ppl(nats: float) -> float:
    """``exp(nats)``, infinite where that overflows."""
    return math.exp(nats) if not nats > 700 else math.inf  # math.exp raises where it overflows


def bootstrap(
    sums: Sequence[float], terms: Sequence[int], *, level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float] | None:
    """Percentile interval of ``Σ sums / Σ terms`` over documents drawn with replacement (Efron 1979).

    Args:
        sums: by document, the sum of its losses in nats, or of the differences of two.
        terms: by document, how many there are.
        level: of the interval.
        draws: how many resamples.
        seed: of the generator; the same seed gives the same interval.

    Returns:
        ``(low, high)`` in nats per token; None where it would mean nothing: fewer than two documents, or a
        sum that is not finite.

    Raises:
        RopeExtendError: the two do not belong together, or the level is not between 0 and 1.
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
    for draw in range(draws):  # one at a time: any number of documents fits
        chosen = random.integers(0, len(values), len(values))
        means[draw] = values[chosen].sum() / weights[chosen].sum()
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_over(nll: Floats, scored: Counts | None, where: slice) -> tuple[float, int]:
    """Mean loss over a range of positions, each loss once, and how many there are.

    ``nll`` and ``scored`` are float64 and int64 ``[positions]``; without ``scored`` all positions weigh one.
    """
    values = nll[where]
    weights = np.ones(len(values), dtype=np.int64) if scored is None else scored[where]
    there = weights > 0
    total = int(weights[there].sum())
    return (float((values[there] * weights[there]).sum()) / total if total else math.nan), total


@dataclass(frozen=True)
class Bucket:
    """Perplexity of the targets at the positions ``start … stop−1``, and how many there are."""

    start: int
    stop: int
    ppl: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers; a perplexity that is not finite becomes None."""
        return {**asdict(self), "ppl": self.ppl if math.isfinite(self.ppl) else None}


def buckets(nll: Floats, scored: Counts | None = None, *, count: int = 8) -> list[Bucket]:
    """Perplexity by position, in at most ``count`` ranges that double up to the last one.

    Args:
        nll: float64 ``[positions]``, nats; entry p is the mean loss at position p + 1.
        scored: int64 ``[positions]``, how many losses are in each; one each if not given.
        count: how many ranges at most.

    Returns:
        Ranges in ascending order that cover every position once; those with nothing scored are left out.
    """
    last = len(nll) + 1
    edges = sorted({1, last, *(math.ceil(last / 2**power) for power in range(1, count))})
    found = []
    for start, stop in itertools.pairwise(edges):
        mean, tokens = mean_over(nll, scored, slice(start - 1, stop - 1))
        if tokens:
            found.append(Bucket(start, stop, ppl(mean), tokens))
    return found


@dataclass(frozen=True)
class Difference:
    """How a second measurement differs from a first on the same tokens.

    Attributes:
        length: in tokens.
        nats: mean loss of the second less that of the first; below zero the second is better.
        low: lower end of its 95 % interval over documents; None with fewer than two documents.
        high: upper end.
        ratio: perplexity of the second over that of the first, ``exp(nats)``.
        documents: over how many.
    """

    length: int
    nats: float
    low: float | None
    high: float | None
    ratio: float
    documents: int

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers; what is not finite becomes None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def paired(length: int, first: Sequence[float], second: Sequence[float], terms: Sequence[int]) -> Difference:
    """Compare two measurements document by document.

    What makes a document hard is hard for both, and drops out of the difference: so its interval is far
    narrower than those of the two perplexities.

    Args:
        length: in tokens.
        first: by document, the sum of its losses in nats.
        second: the same documents, measured otherwise.
        terms: by document, how many losses are in each sum.

    Raises:
        RopeExtendError: they do not belong together.
    """
    if not len(first) == len(second) == len(terms) > 0:
        raise RopeExtendError(
            f"a paired comparison needs the same documents twice; got {len(first)} and {len(second)} sums "
            f"and {len(terms)} counts"
        )
    apart = (np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)).tolist()
    nats = float(np.sum(apart)) / sum(terms)
    low, high = bootstrap(apart, terms) or (None, None)
    return Difference(length, nats, low, high, ppl(nats), len(terms))


@dataclass(frozen=True)
class Rate:
    """A mean score, 0 … 1, with its 95 % Wilson interval ``low`` … ``high``, over ``trials``."""

    trials: int
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, scores: Sequence[float]) -> Self:
        """Of the scores of single trials, at least one."""
        mean = sum(scores) / len(scores)
        return cls(len(scores), mean, *wilson(mean, len(scores)))

    def __str__(self) -> str:
        return f"{self.mean:.0%} ({100 * self.low:.0f}–{100 * self.high:.0f})"


def wilson(mean: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share ``mean`` of ``trials`` (1927; 95 % by default).

    For scores between 0 and 1 that are not all 0 or 1, their variance is at most that of such trials, and the
    interval is on the safe side.
    """
    width = z * math.sqrt(mean * (1 - mean) / trials + z**2 / (4 * trials**2))
    middle, norm = mean + z**2 / (2 * trials), 1 + z**2 / trials
    return max(0.0, (middle - width) / norm), min(1.0, (middle + width) / norm)


@dataclass(frozen=True)
class RateDifference:
    """How the answers to the same prompts changed: both rates, and what the second is above the first.

    Attributes:
        first: before.
        second: after.
        change: difference of the means, −1 … 1; below zero the second is worse.
        low: lower end of its 95 % interval.
        high: upper end.
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
        """In points, with the interval: ``-15 (-36 … +4)``."""
        return f"{signed(100 * self.change, '+.0f')} ({interval(100 * self.low, 100 * self.high, '+.0f')})"


def paired_rates(first: Sequence[float], second: Sequence[float]) -> RateDifference:
    """Compare the scores, 0 … 1, of two measurements on the same prompts, prompt by prompt.

    The interval is Newcombe's for paired shares (1998, Statistics in Medicine 17, 2635, method 10): it puts
    Wilson's intervals together by how the two correlate. So it stays honest where all trials succeed, of
    which a bootstrap would say that nothing can differ.

    Raises:
        RopeExtendError: they do not belong together.
    """
    if not len(first) == len(second) > 0:
        raise RopeExtendError(
            f"a paired comparison needs the same prompts twice; got {len(first)} and {len(second)} scores"
        )
    one, other = Rate.of(first), Rate.of(second)
    n, change = len(first), other.mean - one.mean
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    # n² times the covariance; for scores of 0 and 1 the determinant of their 2×2 table.
    together = n * float(a @ b) - float(a.sum() * b.sum())
    if together > 0:
        together = max(together - n / 2, 0.0)  # the method's correction for continuity
    spread = n**2 * float(a.std() * b.std())
    phi = together / spread if spread > 0 else 0.0

    def distance(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    low = change - distance(other.mean - other.low, one.high - one.mean)
    high = change + distance(other.high - other.mean, one.mean - one.low)
    return RateDifference(one, other, change, max(-1.0, low), min(1.0, high))
