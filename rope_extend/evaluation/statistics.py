"""Statistics of losses and scores: intervals over documents, and paired comparisons.

The losses of one document are correlated, so documents are counted, not tokens. A test simulates 2 to 16
documents of unequal lengths, with normal and with skewed differences: every 95 % interval here covers at
least 93 %, or is not given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from rope_extend.report.tables import interval, signed

Floats = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]

FEWEST = 3
"""Documents below which there is no interval."""
FEWEST_TO_DECIDE = 5
"""Documents below which no difference is called certain."""
QUANTILE = 0.99
"""Of Student's t at each end. Two ends of 0.975 cover 95 % of normal differences, but 88 % of skewed ones."""
CERTAIN = 0.9975
"""The same for a difference that is called certain, so that skewed differences are in at most 3 %."""


def ppl(nats: float) -> float:
    """`exp(nats)`, infinite on overflow."""
    return math.exp(nats) if not nats > 700 else math.inf  # math.exp raises on overflow


def mean_interval(
    sums: Sequence[float], terms: Sequence[int], *, quantile: float = QUANTILE
) -> tuple[float, float] | None:
    """Interval of `Σ sums / Σ terms` over documents, of which these are a sample; by default of 95 %.

    The mean, plus and minus its HC3 error (MacKinnon and White, 1985) times a quantile of Student's t. That
    error is a little wider than the jackknife's. Documents of unequal length count as fewer: as many as
    `(Σ terms)² / Σ terms²`.

    Args:
        sums: sum of each document's losses in nats, or of the differences of two measurements.
        terms: number of losses in each sum.

    Returns:
        `(low, high)` in nats per token; None for fewer than three documents, or for a sum that is not finite.
    """
    from scipy.special import stdtrit  # of t, without the import of scipy.stats

    values, counts = np.asarray(sums, dtype=np.float64), np.asarray(terms, dtype=np.float64)
    values, counts = values[counts > 0], counts[counts > 0]
    if len(values) < FEWEST or not np.isfinite(values).all():
        return None
    weights, mean = counts / counts.sum(), values.sum() / counts.sum()
    error = math.sqrt(np.square(weights * (values / counts - mean) / (1 - weights)).sum())
    freedom = max(1.0, 1 / np.square(weights).sum() - 1)
    half = float(stdtrit(freedom, quantile)) * error
    return float(mean - half), float(mean + half)


@dataclass(frozen=True)
class Difference:
    """The difference between two measurements on the same tokens.

    Attributes:
        length: length in tokens.
        nats: mean loss of the second minus that of the first; below zero the second is better.
        low, high: the 95 % interval over documents; None for fewer than three documents.
        ratio: perplexity of the second divided by that of the first, `exp(nats)`.
        documents: number of documents.
        certain: whether the second is better with little doubt: in simulations, at most 3 % of such claims
            were wrong. None for fewer than five documents.
        better: number of documents in which the loss of the second is lower.
        before: perplexity of the first.
    """

    length: int
    nats: float
    low: float | None
    high: float | None
    ratio: float
    documents: int
    certain: bool | None = None
    better: int = 0
    before: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers. NaN and infinity become None."""
        return dict(plain(asdict(self)))

    @property
    def clear(self) -> bool:
        """Whether zero is outside the interval."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def paired(length: int, first: Sequence[float], second: Sequence[float], terms: Sequence[int]) -> Difference:
    """Compare two measurements document by document, by the sums of their losses in nats.

    A difficult document is difficult in both measurements, which cancels in the difference. So its interval
    is far narrower than those of the two perplexities.
    """
    differences = (np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)).tolist()
    nats = float(np.sum(differences)) / sum(terms)
    low, high = mean_interval(differences, terms) or (None, None)
    strict = mean_interval(differences, terms, quantile=CERTAIN) if len(terms) >= FEWEST_TO_DECIDE else None
    certain = None if strict is None else strict[1] < 0
    better = sum(difference < 0 for difference in differences)
    before = ppl(float(np.sum(first)) / sum(terms))
    return Difference(length, nats, low, high, ppl(nats), len(terms), certain, better, before)


@dataclass(frozen=True)
class Rate:
    """The mean score of some trials, 0 … 1, with its 95 % interval `low` … `high`."""

    trials: int
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, scores: Sequence[float]) -> Self:
        """From the scores of trials, at least one."""
        mean = sum(scores) / len(scores)
        return cls(len(scores), mean, *share_interval(mean, _effective_trials(scores)))

    def __str__(self) -> str:
        return f"{self.mean:.0%} ({100 * self.low:.0f}–{100 * self.high:.0f})"


def _effective_trials(scores: Sequence[float]) -> float:
    """As many trials of 0 or 1 as have the variance of these scores, and at least their number.

    Korn and Graubard's number (1998, Survey Methodology 24, 193), with the quantile of `mean_interval`. It
    does not see what is rarer than the trials are many: failures in 3 % of prompts, none of them in these 12.
    """
    from scipy.special import stdtrit

    trials, mean = len(scores), sum(scores) / len(scores)
    if len({*scores} - {0, 1}) < 2:
        return trials
    quantiles = float(stdtrit(trials - 1, 0.975) / stdtrit(trials - 1, QUANTILE))
    return max(trials, (trials - 1) * mean * (1 - mean) / float(np.var(scores, ddof=1)) * quantiles**2)


def share_interval(mean: float, trials: float) -> tuple[float, float]:
    """Clopper and Pearson's exact 95 % interval (1934) of a mean score over `trials`.

    Wilson's interval has 95 % on average over all shares, but 83 % for shares near 0 or 1.
    """
    from scipy.special import betaincinv

    solved = mean * trials
    low = betaincinv(solved, trials - solved + 1, 0.025) if solved > 0 else 0.0
    high = betaincinv(solved + 1, trials - solved, 0.975) if solved < trials else 1.0
    return float(low), float(high)


@dataclass(frozen=True)
class RateDifference:
    """The difference between two mean scores on the same prompts, with the interval `low` … `high`.

    Attributes:
        change: second minus first, −1 … 1; below zero the second is worse.
    """

    first: Rate
    second: Rate
    change: float
    low: float
    high: float

    def __str__(self) -> str:
        """The change in points, with its interval: `-15 (-36 … +4)`."""
        return f"{signed(100 * self.change, '+.0f')} ({interval(100 * self.low, 100 * self.high, '+.0f')})"


def paired_rates(first: Sequence[float], second: Sequence[float]) -> RateDifference:
    """Compare the scores, 0 … 1, of two measurements on the same prompts, prompt by prompt.

    The interval is Newcombe's for paired proportions (1998, Statistics in Medicine 17, 2635, method 10). It
    combines the intervals of the two shares by their correlation; here those of `Rate`. The correction for
    continuity is left out for scores between 0 and 1.
    """
    before, after = Rate.of(first), Rate.of(second)
    n, change = len(first), after.mean - before.mean
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    # n² times the covariance; for scores of 0 and 1 this is the determinant of their 2×2 table.
    covariance = n * float(a @ b) - float(a.sum() * b.sum())
    if covariance > 0 and {*first, *second} <= {0, 1}:
        covariance = max(covariance - n / 2, 0.0)  # the method's continuity correction
    spread = n**2 * float(a.std() * b.std())
    phi = covariance / spread if spread > 0 else 0.0

    def distance(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    low = change - distance(after.mean - after.low, before.high - before.mean)
    high = change + distance(after.high - after.mean, before.mean - before.low)
    return RateDifference(before, after, change, max(-1.0, low), min(1.0, high))


def plain(value: Any) -> Any:
    """A value as JSON has it: keys are text, arrays and tuples are lists, NaN and infinity are None."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [*map(plain, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
