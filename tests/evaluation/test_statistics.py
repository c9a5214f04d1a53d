"""Intervals have the coverage that they claim, and only results on the same tokens are compared."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from test_perplexity import measure, naive_losses, texts, tiny
from test_report import row

import rope_extend as rx
from rope_extend.cli.main import main
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import compare, compare_runs, comparison_table
from rope_extend.evaluation.statistics import (
    buckets,
    mean_interval,
    mean_over,
    paired,
    paired_rates,
    share_interval,
)
from rope_extend.plots import curves as plots
from rope_extend.plots.style import Canvas

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
    narrow = mean_interval(values.tolist(), [1] * 20, quantile=0.9)
    assert low < narrow[0] < narrow[1] < high


def test_the_interval_weighs_documents_by_their_tokens() -> None:
    equal = mean_interval([1.0, 2.0, 6.0], [1, 1, 1])
    low, high = mean_interval([1000.0, 2.0, 6.0], [1000, 1, 1])
    assert low < 1.0 < high  # nearly one document, so it says little
    assert (low + high) / 2 == pytest.approx(1008 / 1002)
    assert mean_interval([1.0, 2.0, 6.0, 0.0], [1, 1, 1, 0]) == equal  # without a loss it does not count
    assert mean_interval([1.0, 2.0], [1, 1]) is None
    assert mean_interval([1.0, math.nan, 1.0], [1, 1, 1]) is None
    with pytest.raises(RopeExtendError, match="got 1 sums and 2 counts"):
        mean_interval([1.0], [1, 2])


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


def test_buckets_cover_every_position_once() -> None:
    nll = np.random.default_rng(2).normal(2, 1, 255)
    found = buckets(nll)
    assert [one.start for one in found[1:]] == [one.stop for one in found[:-1]]
    assert (found[0].start, found[-1].stop) == (1, 256)
    assert [one.stop for one in found] == [2, 4, 8, 16, 32, 64, 128, 256]
    for one in found:
        assert one.ppl == pytest.approx(math.exp(nll[one.start - 1 : one.stop - 1].mean()))
        assert one.tokens == one.stop - one.start
    scored = np.arange(255)  # none at position 1
    weighted = buckets(nll, scored)
    assert weighted[0].start == 2
    assert weighted[-1].ppl == pytest.approx(math.exp(np.average(nll[127:], weights=scored[127:])))
    assert sum(one.tokens for one in weighted) == scored.sum()
    assert math.isnan(mean_over(nll, np.zeros(255, dtype=np.int64), slice(None))[0])
    assert buckets(np.array([800.0]))[0].to_dict() == {"start": 1, "stop": 2, "ppl": None, "tokens": 1}


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
    with pytest.raises(RopeExtendError, match="same documents twice"):
        paired(64, [1.0], [1.0, 2.0], [1])


def test_a_measurement_keeps_the_sums_that_statistics_need() -> None:
    model, documents = tiny(), texts(64, 64, 70, 65)
    result = measure(model, documents, [16, 64], save_losses=True)
    for length in (16, 64):
        by_document = [naive_losses(model, d.input_ids[:length]).sum().item() for d in documents]
        assert result.document_nll[length] == pytest.approx(by_document, rel=1e-5)
        assert result.document_terms[length] == [length - 1] * 4
        low, high = result.interval(length)
        assert low < result.ppl[length] < high
    assert list(result.losses) == [64]
    for losses, document in zip(result.losses[64], documents, strict=True):
        assert losses.dtype == np.float32
        np.testing.assert_allclose(losses, naive_losses(model, document.input_ids[:64]), rtol=1e-4, atol=1e-5)
    ranges = result.buckets()
    nats = sum(one.tokens * math.log(one.ppl) for one in ranges)
    assert math.exp(nats / (4 * 63)) == pytest.approx(result.ppl[64])


def test_losses_are_saved_as_float32(tmp_path) -> None:
    documents = texts(30, 40)
    result = measure(tiny(), documents, [10, 20], protocol="sliding", stride=5, save_losses=True)
    with np.load(result.write_losses(tmp_path / "deep" / "losses.npz")) as arrays:
        for length in (10, 20):
            losses, offsets = arrays[f"losses_{length}"], arrays[f"offsets_{length}"]
            assert losses.dtype == np.float32
            assert offsets.tolist() == [0, 29, 68]
            assert math.exp(losses.mean(dtype=np.float64)) == pytest.approx(result.ppl[length])
    assert len(list((tmp_path / "deep").iterdir())) == 1
    assert "losses" not in result.to_dict()
    with pytest.raises(RopeExtendError, match="save_losses=True"):
        measure(tiny(), documents, [10]).write_losses(tmp_path / "x.npz")


def measured(label: str, model, lengths=(16, 64), documents=None, **options):
    result = measure(model, documents or texts(64, 64, 70, 65), list(lengths), **options)
    return rx.EvaluationRow(label, None, "m", None, result, 32)


def test_two_methods_are_compared_document_by_document() -> None:
    model = tiny()
    plain = measured("none", model)
    with rx.extend(model, 64, "linear"):
        linear = measured("linear", model)
    found = compare(plain, linear)
    assert [one.length for one in found.differences] == [16, 64]
    for one in found.differences:
        assert one.ratio == pytest.approx(linear.result.ppl[one.length] / plain.result.ppl[one.length])
    text = comparison_table([found])
    assert "linear against none, 4 documents" in text
    assert f"{found.differences[1].nats:+.4f}" in text
    # The second row has only one of the two lengths.
    assert [one.length for one in compare(plain, measured("b", model, [64])).differences] == [64]


def test_rows_that_cannot_be_compared_are_refused() -> None:
    model = tiny()
    first = measured("a", model)
    for second, message in (
        (measured("b", model, documents=texts(64, 64)), "on different texts"),
        (measured("b", model, [32]), "on different texts"),
        (
            measured("b", model, protocol="cropped", window=8),
            r"by different protocols \(prefix and cropped window=8\)",
        ),
        (row("b", None, 1.0, lengths=(32, 128), data=first.result.data), "have no length in common"),
        (row("b", None, 1.0, data=first.result.data), "without sums by document"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            compare(first, second)


def test_rows_of_runs_are_paired_by_label() -> None:
    model = tiny()
    a, b, c = (measured(label, model) for label in "abc")
    pairs = compare_runs([a, b], [b, c], names=("one", "two"))
    assert [(pair.first.label, pair.second.label) for pair in pairs] == [("b (one)", "b (two)")]
    (pair,) = compare_runs([a], [c], names=("one", "two"))
    assert (pair.first.label, pair.second.label) == ("a", "c")
    (pair,) = compare_runs([a, b], [a, b], names=("one", "one"), rows=["a", "b"])
    assert (pair.first.label, pair.second.label) == ("a", "b")
    for first, second, names, rows, message in (
        ([a, b], [c, c], ("one", "two"), [], "nothing to compare: one has 'a', 'b', two has 'c'"),
        ([a, b], [a, b], ("one", "one"), [], "nothing to compare"),
        ([a], [a], ("one", "one"), ["a"], "nothing to compare"),
        ([a, b], [a, b], ("one", "two"), ["d"], "no row 'd'; choose one of 'a', 'b'"),
        ([a, b], [a, b], ("one", "two"), ["a", "b", "b"], "one row or two"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            compare_runs(first, second, names=names, rows=rows)


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
def test_the_command_compares_two_runs(work: Path, tmp_path: Path, capsys) -> None:
    def run(command: str) -> str:
        main(shlex.split(command))
        return capsys.readouterr().out

    def fail(command: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command))
        assert ended.value.code == 2
        return capsys.readouterr().err

    base = f"evaluate {work / 'model'} --data {work / 'data'} --no-cropped"
    for name, more in (
        ("one", "--methods linear,ntk --lengths 16,64"),
        ("two", "--methods ntk,yarn --lengths 16,64"),
        ("other", "--methods ntk --lengths 16,128"),
        ("cropped", "--methods ntk --lengths 16,64 --protocol cropped --window 8"),
    ):
        run(f"{base} {more} --output {tmp_path / name}")
    one, two = tmp_path / "one", tmp_path / "two"
    text = run(f"compare {one} {two} --output {tmp_path / 'c'}")
    assert "ntk (two) against ntk (one), 3 documents" in text
    assert re.search(r"\| +\+0\.0000 \| \+0\.0000 … \+0\.0000 \| 1\.0000 \|", text)
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"comparison.md", "comparison.png"}
    assert (tmp_path / "c" / "comparison.md").read_text().strip() in text
    assert "already holds comparison.md" in fail(f"compare {one} {two} --output {tmp_path / 'c'}")
    assert "yarn against linear" in run(f"compare {one} {two} --row linear --row yarn")
    assert "ntk against linear" in run(f"compare {one} {one} --row linear --row ntk")
    assert "on different texts" in fail(f"compare {one} {tmp_path / 'other'}")
    assert "by different protocols" in fail(f"compare {one} {tmp_path / 'cropped'}")
    assert "nothing to compare" in fail(f"compare {one} {one}")
    assert "no results" in fail(f"compare {one} {tmp_path / 'none'}")


def test_a_comparison_is_drawn_with_both_curves_and_the_interval(tmp_path, monkeypatch) -> None:
    drawn = []
    save = Canvas.save
    monkeypatch.setattr(Canvas, "save", lambda self: drawn.append(self) or save(self))
    model = tiny()
    plain = measured("none", model)
    with rx.extend(model, 64, "linear"):
        linear = measured("linear", model)
    pair = compare(plain, linear)
    plots.plot_comparison([pair], 32, tmp_path / "a.png")
    upper, lower = drawn[0].panels
    curves = {line.get_label(): line for line in upper.lines}
    assert dict(zip(*curves["none"].get_data(), strict=True)) == plain.result.ppl
    assert dict(zip(*curves["linear"].get_data(), strict=True)) == linear.result.ppl
    assert any(
        np.allclose(line.get_ydata(), [one.nats for one in pair.differences])
        for line in lower.lines
        if len(line.get_ydata()) == len(pair.differences)
    )
    low, high = lower.collections[0].get_datalim(lower.transData).intervaly
    assert low == pytest.approx(min(one.low for one in pair.differences))
    assert high == pytest.approx(max(one.high for one in pair.differences))
    with pytest.raises(RopeExtendError, match="nothing to draw"):
        plots.plot_comparison([], 32, tmp_path / "b.png")


def test_paired_scores_that_all_agree_have_an_interval() -> None:
    low, _ = share_interval(1.0, 20)
    found = paired_rates([1.0] * 20, [1.0] * 20)
    assert (found.change, found.low, found.high) == (0.0, pytest.approx(low - 1), pytest.approx(1 - low))
    equal = paired_rates([0.25, 0.5, 1.0] * 10, [0.25, 0.5, 1.0] * 10)  # scores between 0 and 1
    assert equal.low < equal.change == 0 < equal.high < 0.15
    for scores in (([1.0], []), ([], [])):
        with pytest.raises(RopeExtendError, match="same prompts twice"):
            paired_rates(*scores)


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
