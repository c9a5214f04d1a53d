"""The race on a formula: candidates stay in their space, and costs are as said."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from fakes import SHAPE, TARGET, FakeEvaluator, config
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rope_extend as rx
from rope_extend.encodings import NTK, YaRN, critical_range
from rope_extend.searching.search_config import PAPER_EVALUATIONS, RACE_SHARE
from rope_extend.searching.space import Table
from rope_extend.searching.strategy import closed_forms, race

FACTOR = TARGET / SHAPE.trained_length


def raced(**values: object) -> tuple[list[Table], FakeEvaluator]:
    """The finalists of a race, and the evaluator."""
    evaluator = FakeEvaluator(config(**values))
    return race(evaluator), evaluator


@settings(max_examples=5)
@given(seed=st.integers(0, 1000), factor=st.sampled_from([None, 1.05]))
def test_every_candidate_is_in_its_space(seed: int, factor: float | None) -> None:
    """The range, the order and the step, for all that is ever measured."""
    finalists, evaluator = raced(seed=seed, documents=2, holdout=2, attention_factor=factor)
    for table in [*evaluator.asked, *finalists]:
        hundredths = [round(100 * divisor) for divisor in table.divisors]
        assert [value / 100 for value in hundredths] == list(table.divisors)
        assert len(hundredths) == 16
        assert sorted(hundredths) == hundredths
        assert hundredths[0] >= 100
        assert hundredths[-1] <= round(100 * 2 * FACTOR)
        assert factor in (None, table.attention_factor)
    assert set(finalists) <= set(evaluator.asked)


@pytest.mark.parametrize("channels", [2, 4])
def test_a_race_ends_where_few_tables_exist(channels: int) -> None:
    """Random steps find only tables that are known, which cost no pass."""
    settings = config(target_length=8200, documents=10, holdout=1, attention_factor=1.0)
    evaluator = FakeEvaluator(settings, shape=rx.RopeShape(channels, 1e4, 8192))
    assert race(evaluator)
    assert evaluator.passes <= settings.race_passes


@given(documents=st.integers(1, 12), holdout=st.integers(1, 12), seed=st.integers(0, 99))
@example(documents=1, holdout=3, seed=0)
@settings(max_examples=12)
def test_the_race_takes_at_most_a_twentieth_of_longrope(documents: int, holdout: int, seed: int) -> None:
    if 1344 * documents // 20 - 7 * holdout < max(50, 8 * documents):
        with pytest.raises(rx.RopeExtendError, match="nothing is left of the budget"):
            config(documents=documents, holdout=holdout, seed=seed)
        return
    chosen = config(documents=documents, holdout=holdout, seed=seed)
    finalists, evaluator = raced(documents=documents, holdout=holdout, seed=seed)
    longrope = PAPER_EVALUATIONS * documents
    held_out = (len(finalists) + 4) * holdout
    assert evaluator.passes <= chosen.race_passes
    assert evaluator.passes + held_out <= longrope / RACE_SHARE
    assert evaluator.cost.passes == evaluator.passes


@pytest.mark.parametrize("attention", [0.8, 1.15, 1.6])
def test_the_race_finds_what_the_formula_hides(attention: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It beats every closed form, and looks for attention factors on both sides of theirs."""
    monkeypatch.setattr(FakeEvaluator, "attention", attention)
    finalists, evaluator = raced()
    best = evaluator.scores(finalists)[0]
    closed = evaluator.scores(closed_forms(evaluator.config, evaluator.space))
    assert best < min(closed) - 0.1
    assert finalists[0].attention_factor == pytest.approx(attention, rel=0.06)


def test_the_race_starts_from_closed_forms_with_a_moved_critical_pair() -> None:
    """NTK and YaRN of 2502.20082, besides the four published forms."""
    found = FakeEvaluator(config())
    pair = round(critical_range(SHAPE)[1])
    tables = closed_forms(found.config, found.space)
    for cls in (NTK, YaRN):
        divisors = SHAPE.inv_freq() / cls(FACTOR, critical=pair).inv_freq(SHAPE)
        assert [round(float(each), 2) for each in divisors] in [list(table.divisors) for table in tables]


def test_a_search_that_is_cut_anywhere_resumes_to_the_same_table(tmp_path: Path) -> None:
    """The log is cut at any byte: inside a line, at its end, or in the first line."""
    chosen = config(documents=2, holdout=2)
    whole = FakeEvaluator(chosen, file=tmp_path / "whole.jsonl")
    finalists = race(whole)
    content = (tmp_path / "whole.jsonl").read_bytes()
    rng = random.Random(0)
    for cut in [0, 3, 14, *(rng.randrange(len(content)) for _ in range(4)), len(content)]:
        file = tmp_path / f"{cut}.jsonl"
        file.write_bytes(content[:cut])
        again = FakeEvaluator(chosen, file=file)
        assert race(again) == finalists
        assert file.read_bytes() == content
        assert again.cost == whole.cost


LINE = {"divisors": [1.0], "attention_factor": 1.0, "losses": {"search 0": 2.0}, "seconds": 0.5}


@pytest.mark.parametrize(
    "changes",
    [
        *({"losses": losses} for losses in ([], {"search 0": []}, {"search 0": "2"})),
        *({"divisors": divisors} for divisors in ([[1]], 3, ["1e1"], [math.nan])),
        {"attention_factor": {}}, {"seconds": None}, {"seconds": "1e5"}, {"seconds": -1.0},
    ],
)  # fmt: skip
def test_an_edited_line_of_a_log_is_one_clear_error(changes: dict[str, Any], tmp_path: Path) -> None:
    file, chosen = tmp_path / "log.jsonl", config(target_length=8)
    file.write_text('{"identity": {}}\n' + json.dumps(LINE) + "\n")
    with FakeEvaluator(chosen, file=file) as evaluator:
        assert evaluator.losses == {(Table((1.0,)), "search 0"): 2.0}
    file.write_text('{"identity": {}}\n' + json.dumps({**LINE, **changes}) + "\n")
    with pytest.raises(rx.RopeExtendError, match=r"line 2 of .* is damaged .*delete the line"):
        FakeEvaluator(chosen, file=file)
