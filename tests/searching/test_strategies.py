"""The strategies on a formula: candidates stay in their space, costs are as said, naive transcriptions."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from fakes import SHAPE, TARGET, FakeEvaluator, config
from hypothesis import given, settings
from hypothesis import strategies as st

import rope_extend as rx
from rope_extend.encodings import NTK, Linear, YaRN, critical_range
from rope_extend.searching.evaluations import Loss
from rope_extend.searching.search_config import PAPER_EVALUATIONS, RACE_SHARE
from rope_extend.searching.space import START_TOKENS, Space, Table
from rope_extend.searching.strategies import STRATEGIES, closed_forms

SMALL = {"population": 12, "mutants": 4, "crossovers": 4, "parents": 6, "iterations": 6}
FACTOR = TARGET / SHAPE.trained_length


def asked(strategy: str, **values: object) -> tuple[list[Table], list[Table], FakeEvaluator]:
    """All candidates that a strategy measures, its finalists, and the evaluator."""
    evaluator = FakeEvaluator(config(strategy=strategy, **values), STRATEGIES[strategy].head_room)
    finalists = STRATEGIES[strategy].run(evaluator)
    return evaluator.asked, finalists, evaluator


@settings(max_examples=5)
@given(seed=st.integers(0, 1000), start=st.booleans(), factor=st.sampled_from([None, 1.05]))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_candidate_is_in_its_space(strategy: str, seed: int, start: bool, factor: float | None) -> None:
    """The range, the order, the step and n-hat of the papers, for all that is ever measured."""
    extra = {"attention_factor": factor, **({"start_tokens": start} if strategy == "longrope" else {})}
    tables, finalists, _ = asked(strategy, seed=seed, documents=2, holdout=2, **SMALL, **extra)
    largest = 1.25 * FACTOR if strategy == "longrope" else 2 * FACTOR
    for table in [*tables, *finalists]:
        hundredths = [round(100 * divisor) for divisor in table.divisors]
        assert [value / 100 for value in hundredths] == list(table.divisors)
        assert len(hundredths) == 16
        assert sorted(hundredths) == hundredths
        assert hundredths[0] >= 100
        assert hundredths[-1] <= round(100 * largest)
        assert table.start_tokens in (START_TOKENS if start else (0,))
        assert factor in (None, table.attention_factor)
    assert set(finalists) <= set(tables)


@pytest.mark.parametrize(("channels", "documents"), [(2, 10), (4, 10)])
def test_a_race_ends_where_few_tables_exist(channels: int, documents: int) -> None:
    """Random steps find only tables that are known, which cost no pass."""
    settings = config(target_length=8200, documents=documents, holdout=1, attention_factor=1.0)
    evaluator = FakeEvaluator(settings, 2.0, shape=rx.RopeShape(channels, 1e4, 8192))
    assert STRATEGIES["race"].run(evaluator)
    assert evaluator.passes <= settings.race_passes


@given(documents=st.integers(1, 12), holdout=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=12)
def test_the_race_takes_at_most_a_twentieth_of_longrope(documents: int, holdout: int, seed: int) -> None:
    if 1344 * documents // 20 - 7 * holdout < max(50, 8 * documents):
        with pytest.raises(rx.RopeExtendError, match="nothing is left of the race's budget"):
            config(documents=documents, holdout=holdout, seed=seed)
        return
    chosen = config(documents=documents, holdout=holdout, seed=seed)
    _, finalists, evaluator = asked("race", documents=documents, holdout=holdout, seed=seed)
    longrope = PAPER_EVALUATIONS * documents
    held_out = (len(finalists) + 4) * holdout
    assert evaluator.passes <= chosen.race_passes
    assert evaluator.passes + held_out <= longrope / RACE_SHARE
    assert evaluator.cost.passes == evaluator.passes


@pytest.mark.parametrize("attention", [0.8, 1.15, 1.6])
def test_the_race_finds_what_the_formula_hides(attention: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It beats every closed form, and looks for attention factors on both sides of theirs."""
    monkeypatch.setattr(FakeEvaluator, "attention", attention)
    _, finalists, evaluator = asked("race")
    best = evaluator.scores(finalists)[0]
    closed = evaluator.scores(closed_forms(evaluator.config, evaluator.space))
    assert best < min(closed) - 0.1
    assert finalists[0].attention_factor == pytest.approx(attention, rel=0.06)


def test_the_race_starts_from_closed_forms_with_a_moved_critical_pair() -> None:
    """NTK and YaRN of 2502.20082, besides the four published forms."""
    found = FakeEvaluator(config(), 2.0)
    pair = round(critical_range(SHAPE)[1])
    tables = closed_forms(found.config, found.space)
    for cls in (NTK, YaRN):
        divisors = SHAPE.inv_freq() / cls(FACTOR, critical=pair).inv_freq(SHAPE)
        assert [round(float(each), 2) for each in divisors] in [list(table.divisors) for table in tables]


# A naive transcription of algorithm 1, on lists of hundredths, with one loop for each line of the paper.


def naive_search(goal: FakeEvaluator, values: dict[str, int], p: float, seed: int) -> list[int]:
    rng, largest = random.Random(seed), int(125 * FACTOR)
    factor = math.sqrt(1 + math.log(8) / math.log(256))

    def perplexity(genes: list[int]) -> float:
        return goal.scores([Table(tuple(gene / 100 for gene in genes), 0, round(factor, 4))])[0]

    def mutate(parent: list[int]) -> list[int]:
        for _ in range(20):
            child = list(parent)
            for i in range(len(child)):
                if rng.random() < p:
                    below = 100 if i == 0 else child[i - 1]
                    child[i] = rng.randint(below, largest if i == len(child) - 1 else child[i + 1])
            if tuple(child) not in seen:
                break
        seen.add(tuple(child))
        return child

    def cross(first: list[int], second: list[int]) -> list[int]:
        for _ in range(20):
            child = [rng.choice(pair) for pair in zip(first, second, strict=True)]
            rng.choice((0, 0))  # n-hat
            if child == sorted(child) and tuple(child) not in seen:
                seen.add(tuple(child))
                return child
        return mutate(first)

    ratios = [SHAPE.inv_freq() / each.inv_freq(SHAPE) for each in (Linear(FACTOR), NTK(FACTOR), YaRN(FACTOR))]
    seeds = [[round(100 * float(value)) for value in ratio] for ratio in ratios]
    population, seen = list(seeds), {tuple(each) for each in seeds}
    while len(population) < values["population"]:
        population.append(mutate(seeds[(len(population) - 3) % 3]))
    top = sorted(population, key=perplexity)[: values["parents"]]
    for _ in range(values["iterations"]):
        mutated = [mutate(rng.choice(top)) for _ in range(values["mutants"])]
        crossed = [cross(*rng.sample(top, 2)) for _ in range(values["crossovers"])]
        top = sorted([*top, *mutated, *crossed], key=perplexity)[: values["parents"]]
    return top[0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_longrope_is_algorithm_1(seed: int) -> None:
    _, finalists, _ = asked("longrope", seed=seed, documents=1, holdout=1, **SMALL)
    naive = naive_search(FakeEvaluator(config(strategy="longrope", documents=1)), SMALL, 0.3, seed)
    assert [round(100 * divisor) for divisor in finalists[0].divisors] == naive


def test_longrope_measures_what_the_paper_says() -> None:
    """64 + 40 * 32 = 1,344 evaluations; a child that cannot be new is the only reason for fewer."""
    settings_of_paper = config(strategy="longrope", documents=1)
    assert STRATEGIES["longrope"].passes(settings_of_paper) == PAPER_EVALUATIONS == 1344
    _, _, evaluator = asked("longrope", documents=1)
    assert 1300 <= evaluator.cost.evaluations <= 1344
    halved = config(strategy="longrope", target_length="1M", documents=3)
    assert (halved.population, halved.mutants, halved.crossovers, halved.parents) == (32, 8, 8, 16)
    assert STRATEGIES["longrope"].passes(halved) == 3 * (32 + 40 * 16)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_search_that_is_cut_anywhere_resumes_to_the_same_table(strategy: str, tmp_path: Path) -> None:
    """The log is cut at any byte: inside a line, at its end, or in the first line."""
    values = {"documents": 2, "holdout": 2, **SMALL}
    chosen, head_room = config(strategy=strategy, **values), STRATEGIES[strategy].head_room
    whole = FakeEvaluator(chosen, head_room, file=tmp_path / "whole.jsonl")
    finalists = STRATEGIES[strategy].run(whole)
    content = (tmp_path / "whole.jsonl").read_bytes()
    rng = random.Random(0)
    for cut in [0, 3, 14, *(rng.randrange(len(content)) for _ in range(4)), len(content)]:
        file = tmp_path / f"{cut}.jsonl"
        file.write_bytes(content[:cut])
        again = FakeEvaluator(chosen, head_room, file=file)
        assert STRATEGIES[strategy].run(again) == finalists
        assert file.read_bytes() == content
        assert again.cost == whole.cost
        assert again.curve == whole.curve


LINE = {
    "divisors": [1.0], "start_tokens": 0, "attention_factor": 1.0, "losses": {"search 0": {"8": [2.0, 4]}},
    "evaluations": 1, "passes": 1, "forward_tokens": 8, "seconds": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        *({"losses": losses} for losses in ([], {"search 0": [1]}, {"search 0": {"8": 1}}, {"search 0": {}})),
        *({"losses": {"search 0": {"8": loss}}} for loss in ([2.0, 0], [2.0, None], ["2", 4])),
        *({"divisors": divisors} for divisors in ([[1]], 3, ["1e1"], [math.nan])),
        {"passes": None}, {"seconds": "1e5"}, {"seconds": -1.0}, {"start_tokens": {}},
    ],
)  # fmt: skip
def test_an_edited_line_of_a_log_is_one_clear_error(changes: dict[str, Any], tmp_path: Path) -> None:
    file, chosen = tmp_path / "log.jsonl", config(target_length=8)
    file.write_text('{"identity": {}}\n' + json.dumps(LINE) + "\n")
    with FakeEvaluator(chosen, file=file) as evaluator:
        assert evaluator.losses == {(Table((1.0,)), "search 0"): {8: Loss(2.0, 4)}}
    file.write_text('{"identity": {}}\n' + json.dumps({**LINE, **changes}) + "\n")
    with pytest.raises(rx.RopeExtendError, match=r"line 2 of .* is damaged .*delete the line"):
        FakeEvaluator(chosen, file=file)


@pytest.mark.parametrize(
    "table",
    [
        *(Table((1.0,) * 14 + end) for end in ((1.0,), (1.0, 0.99), (2.0, 1.5), (1.0, 10.01), (1.0, 1.005))),
        Table((1.0,) * 16, start_tokens=3),
        Table((1.0,) * 16, attention_factor=0.0),
    ],
)
def test_candidates_outside_the_space_are_refused(table: Table) -> None:
    space = Space(SHAPE, TARGET, 1.25)
    space.check(Table((1.0,) * 15 + (10.0,), 4, 1.2))
    with pytest.raises(rx.RopeExtendError, match="a candidate needs 16 non-decreasing divisors from 1 to 10"):
        space.check(table)
