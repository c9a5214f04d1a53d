"""Intervals have the coverage that they claim, and only results on the same tokens are compared."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from test_perplexity import measure, naive_losses, texts, tiny
from test_report_and_plots import row

import rope_extend as rx
from rope_extend.cli.main import main
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import compare, compare_runs, comparison_table
from rope_extend.evaluation.statistics import (
    bootstrap,
    buckets,
    mean_over,
    paired,
    paired_rates,
    wilson,
)
from rope_extend.plots import curves as plots
from rope_extend.plots.style import Canvas


def test_the_interval_has_its_coverage() -> None:
    """300 experiments with 40 documents of different lengths: about 95 % of intervals contain the mean."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        terms = random.integers(50, 150, 40)
        sums = terms * random.normal(2.0, 0.3, 40)
        found = bootstrap(sums.tolist(), terms.tolist(), draws=500)
        assert found is not None
        inside += found[0] <= 2.0 <= found[1]
    assert 0.90 <= inside / 300 <= 0.98


def test_the_interval_is_close_to_the_formula_for_a_mean() -> None:
    values = np.random.default_rng(1).normal(3.0, 0.5, 200)
    low, high = bootstrap(values.tolist(), [1] * 200)
    half = 1.96 * values.std() / math.sqrt(200)
    assert low == pytest.approx(values.mean() - half, abs=0.01)
    assert high == pytest.approx(values.mean() + half, abs=0.01)
    assert (low, high) == bootstrap(values.tolist(), [1] * 200)  # the same seed
    assert (low, high) != bootstrap(values.tolist(), [1] * 200, seed=1)
    narrow = bootstrap(values.tolist(), [1] * 200, level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_the_interval_weighs_documents_by_their_tokens() -> None:
    low, high = bootstrap([1000.0, 3.0], [1000, 1])
    assert low == pytest.approx(1.0)  # only the long one drawn
    assert high == pytest.approx(3.0)  # only the short one
    assert bootstrap([1.0], [1]) is None
    assert bootstrap([1.0, math.nan], [1, 1]) is None
    for arguments in (([1.0], [1, 2]), ([1.0, 2.0], [1, 1])):
        with pytest.raises(RopeExtendError, match="a sum and a count"):
            bootstrap(*arguments, level=0.95 if len(arguments[0]) == 1 else 1.0)


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
    assert found.high - found.low < 0.1 * np.subtract(*reversed(bootstrap(first, terms)))
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


def from_table(both: int, first: int, second: int, neither: int) -> tuple[list[float], list[float]]:
    pairs = [(1.0, 1.0)] * both + [(1.0, 0.0)] * first + [(0.0, 1.0)] * second + [(0.0, 0.0)] * neither
    return [a for a, _ in pairs], [b for _, b in pairs]


def test_the_interval_of_paired_scores_is_newcombe_s() -> None:
    """The worked example of 1998, Statistics in Medicine 17, 2635: 0.2 with 0.0569 to 0.3404."""
    ours, other = from_table(36, 12, 2, 0)
    found = paired_rates(other, ours)
    assert found.change == pytest.approx(0.2)
    assert (found.low, found.high) == (pytest.approx(0.0569, abs=1e-4), pytest.approx(0.3404, abs=1e-4))
    back = paired_rates(ours, other)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low))


def test_paired_scores_that_all_agree_have_an_interval() -> None:
    low, _ = wilson(1.0, 20)
    found = paired_rates([1.0] * 20, [1.0] * 20)
    assert (found.change, found.low, found.high) == (0.0, pytest.approx(low - 1), pytest.approx(1 - low))
    equal = paired_rates([0.25, 0.5, 1.0] * 10, [0.25, 0.5, 1.0] * 10)  # scores between 0 and 1
    assert equal.low < equal.change == 0 < equal.high < 0.1
    for scores in (([1.0], []), ([], [])):
        with pytest.raises(RopeExtendError, match="same prompts twice"):
            paired_rates(*scores)


@pytest.mark.parametrize("correlated", [False, True])
def test_paired_intervals_have_their_coverage(correlated: bool) -> None:
    random = np.random.default_rng(4)
    inside = 0
    for _ in range(1000):
        draws = random.random((2, 30))
        one = draws[0] < 0.85
        other = (draws[0] if correlated else draws[1]) < 0.65
        found = paired_rates(one.astype(float).tolist(), other.astype(float).tolist())
        inside += found.low <= -0.2 <= found.high
    assert 0.92 <= inside / 1000 <= 0.995
