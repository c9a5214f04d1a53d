"""Intervals cover the truth as often as they say, in simulations and against scipy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from scipy import stats

from rope_extend.evaluation.statistics import Rate, mean_interval, paired, paired_rates, share_interval

DOCUMENTS = (2, 3, 4, 5, 8, 16)
RUNS = 2000
BELOW = 3 * math.sqrt(0.93 * 0.07 / RUNS)
"""Three standard errors of a simulated coverage."""


def experiments(kind: str, lengths: str, count: int) -> Iterator[tuple[list[float], list[int]]]:
    """Differences of documents whose true mean is zero, as sums over tokens, and the tokens."""
    random = np.random.default_rng(count)
    for _ in range(RUNS):
        terms = {
            "equal": lambda: np.full(count, 1000),
            "unequal": lambda: (1000 * random.lognormal(0, 0.7, count)).astype(int) + 1,
            "one long": lambda: np.where(np.arange(count) == 0, 4000, 1000),
        }[lengths]()
        nats = random.normal(0, 1, count) if kind == "normal" else random.exponential(1, count) - 1
        yield (terms * (nats if kind != "skewed down" else -nats)).tolist(), terms.tolist()


@pytest.mark.parametrize("count", DOCUMENTS)
@pytest.mark.parametrize("lengths", ["equal", "unequal", "one long"])
@pytest.mark.parametrize("kind", ["normal", "skewed up", "skewed down"])
def test_intervals_cover_the_truth_or_are_not_given(kind: str, lengths: str, count: int) -> None:
    """And at most 3 % of differences that do not exist are called certain."""
    given = covered = certain = 0
    for sums, terms in experiments(kind, lengths, count):
        found = paired(64, [0.0] * count, sums, terms)
        given += found.low is not None
        covered += found.low is not None and found.low <= 0 <= found.high
        certain += bool(found.certain)
    assert given == (RUNS if count >= 3 else 0)
    assert covered >= (0.93 - BELOW) * given
    assert certain <= (0.03 + 3 * math.sqrt(0.03 * 0.97 / RUNS)) * RUNS
    assert count >= 5 or not certain


def test_the_interval_is_student_s_for_documents_of_equal_length() -> None:
    """The jackknife error of a mean is the standard error times the root of n / (n − 1)."""
    values = np.random.default_rng(1).normal(3.0, 0.5, 20)
    low, high = mean_interval(values.tolist(), [1] * 20)
    half = stats.t.ppf(0.99, 19) * values.std(ddof=1) / math.sqrt(20) * math.sqrt(20 / 19)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half))


def test_the_interval_weighs_documents_by_their_tokens() -> None:
    equal = mean_interval([1.0, 2.0, 6.0], [1, 1, 1])
    low, high = mean_interval([1000.0, 2.0, 6.0], [1000, 1, 1])
    assert low < 1.0 < high  # nearly one document, so it says little
    assert (low + high) / 2 == pytest.approx(1008 / 1002)
    assert mean_interval([1.0, 2.0, 6.0, 0.0], [1, 1, 1, 0]) == equal  # without a loss it does not count
    assert mean_interval([1.0, 2.0], [1, 1]) is None
    assert mean_interval([1.0, math.nan, 1.0], [1, 1, 1]) is None


@pytest.mark.parametrize("trials", [2, 3, 5, 10, 20, 50])
def test_intervals_of_shares_cover_every_share(trials: int) -> None:
    """Exactly, by the binomial distribution; the ends are scipy's."""
    ends = [share_interval(solved / trials, trials) for solved in range(trials + 1)]
    for solved, found in enumerate(ends):
        assert found == pytest.approx(stats.binomtest(solved, trials).proportion_ci(method="exact"))
    for share in np.linspace(0.001, 0.999, 200):
        chances = stats.binom.pmf(np.arange(trials + 1), trials, share)
        covered = sum(
            chance for chance, (low, high) in zip(chances, ends, strict=True) if low <= share <= high
        )
        assert covered >= 0.95


@pytest.mark.parametrize("trials", [6, 12, 24])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_intervals_of_scores_between_0_and_1_cover_their_mean(trials: int, share: float) -> None:
    """Each trial asks 32 questions, and some trials are harder than others."""
    random, covered = np.random.default_rng(1), []
    for _ in range(300):
        shares = random.beta(5 * share, 5 * (1 - share), trials)
        rate = Rate.of((random.binomial(32, shares) / 32).tolist())
        covered.append(rate.low <= share <= rate.high)
    assert np.mean(covered) >= 0.93
    assert rate.high - rate.low < np.subtract(*reversed(share_interval(rate.mean, trials)))


def test_the_difficulty_of_documents_cancels_in_a_paired_difference() -> None:
    random = np.random.default_rng(3)
    terms = [100] * 30
    hard = random.normal(3.0, 1.0, 30)
    first = (100 * hard).tolist()
    second = (100 * (hard - 0.05 + random.normal(0, 0.02, 30))).tolist()
    found = paired(64, first, second, terms)
    assert found.nats == pytest.approx((sum(second) - sum(first)) / 3000)
    assert found.ratio == pytest.approx(math.exp(found.nats))
    assert found.low < found.nats < found.high < 0
    assert found.clear
    assert found.certain
    assert found.high - found.low < 0.1 * np.subtract(*reversed(mean_interval(first, terms)))
    assert not paired(64, first, first, terms).clear
    assert paired(64, [1.0], [2.0], [4]).low is None


def test_paired_scores_that_all_agree_have_an_interval() -> None:
    low, _ = share_interval(1.0, 20)
    found = paired_rates([1.0] * 20, [1.0] * 20)
    assert (found.change, found.low, found.high) == (0.0, pytest.approx(low - 1), pytest.approx(1 - low))
    equal = paired_rates([0.25, 0.5, 1.0] * 10, [0.25, 0.5, 1.0] * 10)  # scores between 0 and 1
    assert equal.low <= equal.change == 0 <= equal.high < 0.15
    first = [n / 32 for n in range(8, 20)]  # each prompt has two answers more
    more = paired_rates(first, [score + 2 / 32 for score in first])
    assert 0.04 < more.low < more.change == 2 / 32 < more.high < 0.09


@pytest.mark.parametrize("trials", [3, 5, 10, 20])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
@pytest.mark.parametrize(("first", "second"), [(0.05, 0.05), (0.5, 0.7), (0.97, 0.3), (0.9, 0.95)])
def test_paired_intervals_have_their_coverage(
    first: float, second: float, correlation: float, trials: int
) -> None:
    random, runs = np.random.default_rng(4), 1000
    both = random.multivariate_normal([0, 0], [[1, correlation], [correlation, 1]], (runs, trials))
    inside = 0
    for one, other in zip(*np.moveaxis(both < stats.norm.ppf([first, second]), -1, 0), strict=True):
        found = paired_rates(one.astype(float).tolist(), other.astype(float).tolist())
        inside += found.low <= second - first <= found.high
    assert inside / runs >= 0.93 - 3 * math.sqrt(0.93 * 0.07 / runs)
