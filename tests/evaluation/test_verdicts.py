"""A verdict says what the numbers of its row say."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from test_report import row

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import cells
from rope_extend.evaluation.comparison import Comparison
from rope_extend.evaluation.evaluation_config import METHODS, StudyConfig
from rope_extend.evaluation.report_files import markdown_report
from rope_extend.evaluation.results import Cell, EvaluationRow, PerplexityResult, RetrievalResult
from rope_extend.evaluation.running import Found
from rope_extend.evaluation.statistics import (
    Difference,
    Rate,
    mean_interval,
    paired,
    paired_rates,
    share_interval,
)
from rope_extend.evaluation.verdicts import _gain, verdicts
from rope_extend.study import decision

TRAINED = 32


def retrieval(rates: dict[float, float], length: int = 64) -> RetrievalResult:
    """Passkeys at depths, ten trials each, of which a share is solved."""
    found = tuple(
        Cell("passkey", length, depth, tuple(float(n < round(10 * rate)) for n in range(10)))
        for depth, rate in rates.items()
    )
    return RetrievalResult(found)


def measured(
    label: str, method: str, level: float, adapter: str | None = None, **changes: Any
) -> EvaluationRow:
    """A row with a mean loss of `level` nats in five documents, two easier and two harder."""
    offsets = (-0.2, -0.1, 0.0, 0.1, 0.2)
    sums = {n: [(level + offset) * (n - 1) for offset in offsets] for n in (32, 64)}
    terms = {n: [n - 1] * 5 for n in (32, 64)}
    ppl = {n: math.exp(level) for n in (32, 64)}
    found = row(
        label, method, level, adapter, lengths=(32, 64), ppl=ppl, document_nll=sums, document_terms=terms,
        documents=5, block_nll=np.outer(np.add(level, offsets), np.arange(64) > 0),
        block_terms=np.tile(np.arange(64) > 0, (5, 1)).astype(np.int64), **changes,
    )  # fmt: skip
    return replace(found, trained_length=TRAINED)


def rows(level: float, found: RetrievalResult | None = None) -> list[EvaluationRow]:
    """Plain RoPE, the cropped control, and a fine-tuned row; they differ by the same in every document."""
    return [
        measured("none", "none", 3.0),
        measured("none, cropped to 32", "none", 3.0, protocol="cropped", window=TRAINED),
        replace(measured("yarn + LoRA", "yarn", level, "runs/yarn"), retrieval=found or RetrievalResult()),
    ]


@given(st.floats(-5, 5), st.floats(0, 5), st.floats(0, 5))
def test_the_interval_contains_the_gain_and_decides(nats: float, below: float, above: float) -> None:
    change = Difference(64, nats, nats - below, nats + above, math.exp(nats), 9, nats + above < 0)
    words, used = _gain(Comparison(row("control", "none", 2.0), row("yarn", "yarn", 2.0), [change]))
    gain, low, high = map(float, re.findall(r"-?\d+\.\d", words))
    assert low - 0.06 <= gain <= high + 0.06  # each is rounded to 0.1
    assert used == (nats + above < 0)
    assert ("chance" in words) == (nats - below <= 0 <= nats + above)


def test_a_gain_that_is_clear_but_decides_nothing_says_so() -> None:
    change = Difference(64, -0.03, -0.06, -0.01, math.exp(-0.03), 6, False)
    words, used = _gain(Comparison(row("control", "none", 2.0), row("yarn", "yarn", 2.0), [change]))
    assert words.endswith("6 documents), too uncertain for a success")
    assert used is False


def test_a_verdict_has_the_gain_the_passkeys_and_the_cost() -> None:
    level = 2.9
    (verdict,) = verdicts(rows(level, retrieval({0.0: 1.0, 0.5: 0.9, 1.0: 0.8})))
    # Every loss is 0.1 nats less than that of plain RoPE and of the control.
    assert (
        verdict.gain == "from 32 to 64, 9.5 % better than cropping before training (9.5 to 9.5, 5 documents)"
    )
    assert verdict.found == "passkey 90% (73–98), 80% at the worst depth"
    assert verdict.cost == "texts within 32 -9.5 % perplexity"
    assert verdict.success is False  # one depth is below 90 %
    assert str(verdict).endswith("No success yet.")


def test_a_row_that_is_not_wholly_measured_is_no_success() -> None:
    """It may lack depths, and finds all passkeys at the others."""
    begun = rows(2.9, retrieval({0.0: 1.0}))
    assert [verdict.success for verdict in verdicts(begun)] == [True]
    missing = [cells.Cell(cells.RETRIEVAL, cells.Row("yarn + LoRA", adapter="runs/yarn"), 0, 0, 1, 1, {})]
    found = Found(begun, missing).markdown()
    assert "Not decided: measure what is missing." in found
    assert "Success." not in found


def test_a_control_is_known_before_it_is_measured_with_a_cropped_context() -> None:
    """By the window that it was trained for. A run in a longer window is none."""
    for target, is_judged in ((TRAINED, False), (TRAINED - 1, False), (TRAINED + 1, True), (None, False)):
        run = replace(measured("LoRA", "none", 3.5, "runs/control"), target_length=target)
        again = EvaluationRow.from_dict(json.loads(json.dumps(run.to_dict())))
        found = [*rows(2.9)[:2], again]
        assert [verdict.label for verdict in verdicts(found)] == (["LoRA"] if is_judged else [])


def test_what_is_not_finite_is_not_called_unmeasured() -> None:
    def broken(one: EvaluationRow) -> EvaluationRow:
        nothing = {n: [math.nan] * 5 for n in (32, 64)}
        ppl = dict.fromkeys((32, 64), math.nan)
        blocks = np.full((5, 64), math.nan)
        return replace(one, result=replace(one.result, ppl=ppl, document_nll=nothing, block_nll=blocks))

    plain, control, tuned = rows(2.9, retrieval({0.5: 1.0}))
    (verdict,) = verdicts([plain, control, broken(tuned)])
    assert "not finite" in verdict.gain
    assert "no finite perplexity" in verdict.cost
    assert verdict.success is False
    (verdict,) = verdicts([broken(plain), broken(control), tuned])
    assert "none, cropped to 32 has no finite perplexity" in verdict.gain
    assert verdict.cost.endswith("no finite perplexity with none")
    assert verdict.success is None
    said = decision([broken(plain), broken(control), tuned], StudyConfig(model="m", target_length=64))
    assert said.notes[0].startswith("Not decided yet")  # the row itself is finite
    text = markdown_report([broken(plain), broken(control), tuned])
    assert re.search(r"\| yarn \+ LoRA +\|  *nan \|  *– \|", text)  # not "0 of 5" documents


def test_three_documents_decide_only_what_is_clear() -> None:
    for nats, clear, decided in ((-0.01, False, None), (0.01, False, None), (0.05, True, False)):
        change = Difference(64, nats, nats - 0.02, nats + 0.02, math.exp(nats), 3, None)
        assert change.clear == clear
        assert (
            _gain(Comparison(row("control", "none", 2.0), row("yarn", "yarn", 2.0), [change]))[1] is decided
        )


def test_what_is_not_measured_leaves_the_verdict_open() -> None:
    (verdict,) = verdicts(rows(2.9))
    assert verdict.found == "no task at 64 was measured"
    assert verdict.success is None
    elsewhere = verdicts(rows(2.9, retrieval({0.5: 1.0}, length=32)))[0]
    assert elsewhere.found == "no task at 64 was measured"  # those within the old window do not count
    # But a row that fails a criterion is no success, whatever is missing.
    (costly,) = verdicts(rows(3.1))
    assert costly.success is False
    assert "+10.5 % perplexity" in costly.cost


def test_all_three_criteria_are_a_success() -> None:
    (verdict,) = verdicts(rows(2.9, retrieval({0.0: 0.9, 1.0: 1.0})))
    assert verdict.success is True
    assert str(verdict).endswith("Success.")
    # 2.02 % more within the window is too much, and 1.98 % is not; the gain is at 64.
    for ratio, success in ((1.0202, False), (1.0198, True)):
        found = rows(2.9, retrieval({0.5: 1.0}))
        nll = {
            **found[2].result.document_nll,
            32: [(3 + math.log(ratio) + d / 10) * 31 for d in range(-2, 3)],
        }
        ppl = {**found[2].result.ppl, 32: math.exp(3) * ratio}
        found[2] = replace(found[2], result=replace(found[2].result, document_nll=nll, ppl=ppl))
        assert verdicts(found)[0].success is success


@pytest.mark.parametrize(
    ("parameters", "is_judged"),
    [
        (None, False),
        ({"rope_type": "default", "rope_theta": 1e4}, False),
        ({"rope_type": "longrope", "rope_theta": 1e4}, True),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, False),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}, True),
    ],
)
def test_a_model_with_scaling_of_its_own_is_no_control(
    parameters: dict[str, Any] | None, is_judged: bool
) -> None:
    own = measured("as-is", "none", 2.9)
    found = [*rows(2.9)[:2], replace(own, encoding=None, rope_parameters=parameters)]
    assert ([verdict.label for verdict in verdicts(found)] == ["as-is"]) == is_judged


def judged(label: str, level: float, found: float | None, **changes: Any) -> EvaluationRow:
    """A row with five documents, and passkeys if `found` is their share."""
    cells = () if found is None else (Cell("passkey", 64, 0.5, (found,), "x"),)
    return replace(measured(label, label, level), retrieval=RetrievalResult(cells), **changes)


PLAIN = judged("none", 1.0, None)
CONTROL = replace(PLAIN, label="none, cropped", result=replace(PLAIN.result, protocol="cropped", window=32))
RUN = replace(judged("none", 1.1, None), label="LoRA", adapter="runs/control", target_length=32)
NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "missing", "said"),
    [
        ([judged("yarn", 0.9, 1.0)], [], "Use yarn. It meets all three criteria at 64."),
        ([judged("yarn", 0.9, 0.0)], [], "No row meets all three criteria at 64. The nearest is yarn"),
        ([judged("yarn", 1.1, 1.0)], [], "No row meets all three criteria at 64. The nearest is yarn"),
        ([judged("yarn", 0.9, None)], [], "Not decided yet: no row meets all three criteria at 64, and not "
         "all were measured. The nearest is yarn"),
        # A row that failed is not called undecided; of the open ones, the nearest is named.
        ([judged("ntk", 0.9, 0.0), judged("yarn", 0.99, None), judged("rerope", 0.95, None)], [],
         "Not decided yet: no row meets all three criteria at 64, and not all were measured. The nearest is "
         "rerope"),
        # What is not finite is never the nearest.
        ([judged("ntk", NAN, 1.0), judged("yarn", 0.9, 0.0)], [],
         "No row meets all three criteria at 64. The nearest is yarn"),
        ([judged("yarn", NAN, 0.0)], [], "No extended row has a finite perplexity at 64: check the"),
        # While rows are missing.
        ([judged("yarn", NAN, 0.0)], ["ntk"], "Not decided yet: not wholly measured are ntk."),
        ([judged("yarn", 1.1, 1.0)], ["rerope", "string"],
         "Not decided yet: not wholly measured are rerope, string. The nearest is yarn"),
        ([judged("yarn", 0.9, 1.0)], ["yarn"], "Not decided yet: not wholly measured are yarn."),
        ([judged("yarn", 0.9, 1.0), judged("ntk", 0.95, 1.0)], ["yarn"], "Use ntk."),
        ([PLAIN, RUN], [], "No row can be judged: all are controls"),
        # The best row has the lowest perplexity. It need not gain most over its own control.
        ([judged("yarn", 0.9, 1.0), replace(CONTROL, label="LoRA, cropped", adapter="a", target_length=32,
          result=replace(judged("", 0.8, None).result, protocol="cropped", window=32)),
          judged("ntk", 0.75, 1.0, adapter="b", target_length=64)], [], "Use ntk."),
    ],
)  # fmt: skip
def test_the_verdict(rows: Sequence[EvaluationRow], missing: list[str], said: str, work: Path) -> None:
    verdict = decision([CONTROL, *rows], StudyConfig(model=str(work / "model"), target_length=64), missing)
    assert " ".join(verdict.notes).startswith(said)
    trains = any("rope-extend advise" in item for item in verdict.notes)
    assert trains == said.startswith("No row meets")


def test_a_report_on_tasks_alone_says_what_is_missing() -> None:
    rows = [replace(each, result=PerplexityResult()) for each in (PLAIN, judged("yarn", 1.0, 1.0))]
    found = decision(rows, StudyConfig(model="m", target_length=64)).notes
    assert found == ["No row can be judged: no perplexity was measured; give long documents (--data)."]


def test_the_next_command_names_no_folder_of_the_author_in_what_is_published(
    work: Path, tmp_path: Path
) -> None:
    model = tmp_path / "my model"
    shutil.copytree(work / "model", model)
    config = StudyConfig(model=str(model), target_length=64, trained_length=32)
    rows, command = [CONTROL, judged("yarn", 1.1, 1.0)], "--target-length 64 --trained-length 32 --gpu GPU"
    text = decision(rows, config).markdown()
    assert f"rope-extend advise 'path/to/my model' {command}" in text
    assert str(tmp_path) not in text
    own = decision(rows, config, model=config.model).markdown()
    assert f"rope-extend advise '{model}' {command}" in own


def test_settings() -> None:
    config = StudyConfig(model="m", target_length="16k")
    assert config.lengths == (2048, 4096, 8192, 16_384)
    assert (config.task_lengths, config.methods) == ((16_384,), METHODS)
    assert StudyConfig(model="m", target_length="16k", adapters=["a"]).methods == ("none",)
    assert StudyConfig(model="m", target_length=64, lengths=[16]).lengths == (16, 64)
    assert StudyConfig.from_dict(config.to_dict()) == config
    assert StudyConfig(model="m", target_length=64, tasks="none").tasks == ()
    for wrong, message in (
        ({}, "missing target_length"),
        ({"target_length": 64, "lengths": [128]}, "lengths must be at most target_length"),
        ({"target_length": 64, "task_lengths": [128]}, "task_lengths must be at most target_length"),
        ({"target_length": 64, "budget": "soon"}, "budget must be a duration"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            StudyConfig(model="m", **wrong)


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
    with pytest.raises(RopeExtendError, match="same documents twice"):
        paired(64, [1.0], [1.0, 2.0], [1])


def test_paired_scores_that_all_agree_have_an_interval() -> None:
    low, _ = share_interval(1.0, 20)
    found = paired_rates([1.0] * 20, [1.0] * 20)
    assert (found.change, found.low, found.high) == (0.0, pytest.approx(low - 1), pytest.approx(1 - low))
    equal = paired_rates([0.25, 0.5, 1.0] * 10, [0.25, 0.5, 1.0] * 10)  # scores between 0 and 1
    assert equal.low <= equal.change == 0 <= equal.high < 0.15
    first = [n / 32 for n in range(8, 20)]  # each prompt has two answers more
    more = paired_rates(first, [score + 2 / 32 for score in first])
    assert 0.04 < more.low < more.change == 2 / 32 < more.high < 0.09
    with pytest.raises(RopeExtendError, match="same prompts twice"):
        paired_rates([1.0], [])


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
