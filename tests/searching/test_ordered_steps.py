"""The race's gradient steps on all divisors: order, range, cost, descent and resuming, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes import SHAPE
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gradient import context

from rope_extend.searching import race
from rope_extend.searching.closed_forms import published
from rope_extend.searching.ordered_steps import OrderedPoint
from rope_extend.searching.search_log import SearchLog
from rope_extend.searching.space import Space
from rope_extend.searching.strategies import Context


def raced(log: SearchLog | None = None, **values: object) -> Context:
    return context(log, strategy="race", **values)


@given(seed=st.integers(0, 10_000), width=st.floats(0, 8))
@settings(max_examples=12)
def test_divisors_are_in_order_and_range_after_any_step(seed: int, width: float) -> None:
    space = Space(SHAPE, 2048, race.HEAD_ROOM)
    point = OrderedPoint(published(space)["yarn"], space)
    before = point.numbers.detach().clone()
    noise = torch.randn(len(before), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        point.numbers += width * noise
    point.settle(before)
    logs = point.divisors().detach().log()
    assert bool((logs.diff() >= 0).all())
    assert logs[0] == 0
    assert float(logs[-1]) <= point.largest + 1e-12
    space.check(point.table(space))


def test_what_is_in_order_stays_and_fast_pairs_move_less() -> None:
    """Against the formula in plain floats: pairs with a period or less move in full, with 2 by half."""
    space = Space(SHAPE, 2048, race.HEAD_ROOM)
    point = OrderedPoint(published(space)["yarn"], space)
    before = point.numbers.detach().clone()
    moves = torch.linspace(0.01, 0.15, len(before), dtype=torch.float64)
    with torch.no_grad():
        point.numbers += moves
    point.settle(before)
    for pair, (old, new, move) in enumerate(
        zip(before.tolist(), point.numbers.tolist(), moves.tolist(), strict=True), start=1
    ):
        periods = 256 * 1e4 ** (-pair / 16) / (2 * torch.pi)
        assert new - old == pytest.approx(move * min(1.0, 1 / periods), rel=1e-9)


def test_the_race_descends_within_its_budget_and_resumes_to_the_same_table(tmp_path: Path) -> None:
    whole = raced(SearchLog(tmp_path / "whole.jsonl", {}))
    finalists = race.run(whole)
    assert len(whole.evaluator.log.gradients) >= 2
    assert whole.evaluator.passes <= race.budget(whole.config)
    scores = whole.scores(finalists)
    assert scores == sorted(scores)
    assert scores[0] < min(whole.evaluator.scores(whole.space, list(published(whole.space).values())))
    for table in finalists:
        whole.space.check(table)
    content = (tmp_path / "whole.jsonl").read_bytes()
    for cut in (len(content) // 3, 2 * len(content) // 3):
        file = tmp_path / f"{cut}.jsonl"
        file.write_bytes(content[:cut])
        assert race.run(raced(SearchLog(file, {}))) == finalists


@pytest.mark.slow
def test_without_gradient_steps_none_is_computed() -> None:
    found = raced(gradient_steps=False)
    race.run(found)
    assert not found.evaluator.log.gradients
    assert found.evaluator.passes <= race.budget(found.config)


@pytest.mark.slow
def test_a_fixed_attention_factor_does_not_move() -> None:
    found = raced(attention_factor=1.05)
    assert {table.attention_factor for table in race.run(found)} == {1.05}


@pytest.mark.slow
def test_halving_over_the_family_comes_first_if_there_is_enough_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    halving = race._halving
    monkeypatch.setattr(race, "_halving", lambda *given: calls.append(given) or halving(*given))
    many = raced()
    race.run(many)
    assert len(calls) == 1
    assert many.evaluator.passes <= race.budget(many.config)
    monkeypatch.setattr(race, "LEAST_FAMILY", 1000)
    race.run(raced())
    assert len(calls) == 1
