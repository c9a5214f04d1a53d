"""The race's draws and steps of fast pairs, and its attention factors, on formulas."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import SHAPE, TARGET, FakeEvaluator, config, context
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_extend.searching import race
from rope_extend.searching.closed_forms import published
from rope_extend.searching.fast_pairs import drawn, groups_of, is_better, moved, stepped
from rope_extend.searching.fitness import Loss
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.search_log import Cost
from rope_extend.searching.space import Space, Table
from rope_extend.searching.strategies import Context

SPACE = Space(SHAPE, TARGET, race.HEAD_ROOM)
YARN = published(SPACE)["yarn"]
END = 4
"""The first pair of `SHAPE` with 5 periods or fewer: 256 * 1e4 ** (-4 / 16) / (2 * pi) = 4.07."""


class Formula(FakeEvaluator):
    """Losses are a formula of the candidate and the document."""

    def __init__(self, settings: SearchConfig, loss: Callable[[Table, int], float]) -> None:
        super().__init__(settings)
        self.loss = loss

    def _measure(self, space: Space, table: Table, group: str, numbers: Sequence[int]) -> None:
        losses = [{str(TARGET): Loss(self.loss(table, number), 1)} for number in numbers]
        cost = Cost(1, len(numbers), TARGET * len(numbers), 0.0)
        self.log.add(table, [f"{group} {number}" for number in numbers], losses, cost)


def with_formula(loss: Callable[[Table, int], float], **values: object) -> Context:
    chosen = config(documents=2, holdout=2, **values)
    return Context(chosen, SPACE, Formula(chosen, loss), random.Random(chosen.seed))


def naive_move(divisors: Sequence[float], group: Sequence[int], change: float) -> list[float]:
    """The candidate with the moved divisors; others take the nearest value that keeps the order."""
    low, high = group[0], group[-1]
    result = [math.exp(change) * divisor if i in group else divisor for i, divisor in enumerate(divisors)]
    for i in range(len(result)):
        if i < low:
            result[i] = min(result[i : high + 1])
        if i > high:
            result[i] = max(result[low : i + 1])
    return [min(race.HEAD_ROOM * SPACE.factor, max(1.0, value)) for value in result]


@given(seed=st.integers(0, 10_000), low=st.integers(0, 15), count=st.integers(1, 4), change=st.floats(-2, 2))
@settings(max_examples=50)
def test_a_move_is_the_naive_one(seed: int, low: int, count: int, change: float) -> None:
    rng = random.Random(seed)
    table = SPACE.table(sorted(rng.uniform(1, 16) for _ in range(16)))
    group = list(range(low, min(16, low + count)))
    found = moved(table, group, change, SPACE)
    SPACE.check(found)
    assert found.divisors == pytest.approx(naive_move(table.divisors, group, change), abs=0.00501)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=12)
def test_draws_change_the_fastest_pairs_alone(seed: int) -> None:
    found = with_formula(lambda table, number: 1 / table.divisors[2] + number, seed=seed)
    tables = drawn(found, YARN, 20)
    assert found.evaluator.passes <= 20 + 2  # and the table itself
    assert tables[-1] == YARN or YARN in tables
    for table in {table for table, _ in found.evaluator.requested}:
        SPACE.check(table)
        assert table.divisors[0] == YARN.divisors[0]
        assert table.divisors[END:] == YARN.divisors[END:]
        assert table.attention_factor == YARN.attention_factor
    assert tables[0].divisors[2] == max(table.divisors[2] for table, _ in found.evaluator.requested)


def test_draws_of_a_wide_model_are_lines_between_three_divisors() -> None:
    """64 pairs, base 5e5, 8,192 tokens: pair 28 is the first with 5 periods or fewer."""
    shape = replace(SHAPE, dim=128, theta=5e5, trained_length=8192)
    space = Space(shape, 65_536, race.HEAD_ROOM)
    chosen = config(target_length=65_536, documents=2, holdout=2)
    evaluator = Formula(chosen, lambda table, number: table.divisors[14] + number)
    evaluator.weights = {"65536": 1.0}
    evaluator._measure = lambda space, table, group, numbers: evaluator.log.add(  # type: ignore[method-assign]
        table, [f"{group} {n}" for n in numbers], [{"65536": Loss(table.divisors[14], 1)} for n in numbers],
        Cost(),
    )  # fmt: skip
    start = published(space)["yarn"]
    drawn(Context(chosen, space, evaluator, random.Random(0)), start, 30)
    tables = {table for table, _ in evaluator.requested} - {start}
    assert len(tables) > 10
    for table in tables:
        logs = np.log(table.divisors)
        line = np.interp(range(29), [0, 7, 14, 21, 28], logs[[0, 7, 14, 21, 28]])
        assert logs[:29] == pytest.approx(line, abs=0.011)  # each divisor is rounded to 0.01
        assert table.divisors[28:] == start.divisors[28:]


def test_a_step_must_be_better_than_its_standard_error() -> None:
    """With two documents: better on both. Against numpy for more."""
    assert is_better([2.0, 3.0], [1.9, 2.99])
    assert not is_better([2.0, 3.0], [1.5, 3.01])
    assert is_better([2.0], [1.999])
    assert not is_better([2.0], [2.0])
    assert is_better([math.inf, 2.0], [1.0, 3.0])
    assert not is_better([math.inf, 2.0], [math.inf, 1.0])
    assert not is_better([1.0, 2.0], [0.5, math.nan])
    rng = np.random.default_rng(0)
    for _ in range(100):
        before, after = rng.normal(size=(2, 5))
        gains = before - after
        assert is_better(before, after) == (gains.mean() > gains.std(ddof=1) / math.sqrt(5))


def test_steps_that_one_document_alone_likes_are_not_kept() -> None:
    """The mean falls with the divisor of pair 3, but the second document's loss rises."""

    def loss(table: Table, number: int) -> float:
        return (-2.0 if number == 0 else 1.0) * table.divisors[3] + 50

    found = with_formula(loss)
    last, others = stepped(found, YARN, 60, range(1, 8), 0.25)
    assert last.divisors[3] == YARN.divisors[3]
    assert any(table.divisors[3] != YARN.divisors[3] for table in others)
    assert found.evaluator.passes <= 60


def test_steps_end_where_nothing_can_be_moved() -> None:
    found = with_formula(lambda table, number: 1.0)
    assert stepped(found, YARN, 60, [], 0.25) == (YARN, [])
    assert stepped(found, YARN, 60, range(1, 8), 0.0) == (YARN, [])
    assert groups_of(range(3)) == [[0], [1], [2]]
    assert [pair for group in groups_of(range(1, 40)) for pair in group] == list(range(1, 40))
    assert len(groups_of(range(1, 40))) == 12


@pytest.mark.parametrize("seed", range(5))
def test_draws_find_a_rugged_minimum_that_lies_apart(seed: int) -> None:
    """A plateau of the fast pairs and a climb, as LongRoPE's table of the bundled model, behind higher walls.

    Each fast pair's loss has a minimum every 15 % or so, and the best one is far from YaRN's divisor.
    """
    goal = [1.21, 1.28, 1.3]

    def loss(table: Table, number: int) -> float:
        total = 5.0 + number / 10
        for divisor, best in zip(table.divisors[1:END], goal, strict=True):
            away = math.log(divisor / best)
            total += 0.01 * (1 - math.cos(2 * math.pi * away / 0.15)) + 0.1 * abs(away)
        return total

    found = with_formula(loss, seed=seed)
    start = found.scores([YARN])[0]
    best = drawn(found, YARN, 20)[0]
    last, _ = stepped(found, best, 80, range(1, 8), race.WIDTH)
    assert found.scores([best])[0] < start
    assert found.scores([last])[0] < start - 0.03


@pytest.mark.parametrize("attention", [0.75, 1.4])
def test_the_race_finds_an_attention_factor_that_no_closed_form_has(attention: float) -> None:
    found = context(config(documents=2, holdout=2), race.HEAD_ROOM)
    assert isinstance(found.evaluator, FakeEvaluator)
    found.evaluator.attention = attention
    assert race.run(found)[0].attention_factor == pytest.approx(attention, rel=0.06)
