"""The ways to search. `race` compares closed forms and their mutants; `longrope` is the search of its paper.

`race`, the default, measures the closed forms on one document, and other attention factors for the best of
them. Then it measures mutants of the three best tables, one after another: at most a twentieth of what
`longrope` measures.

`longrope` is algorithm 1 of 2402.13753, an evolution of non-decreasing divisors. The paper says that children
are rejected unless they are monotone. A mutant of 64 independent divisors is nearly never monotone. So a
mutated divisor is drawn between its neighbours here, as in the authors' code.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from rope_extend.encodings import NTK, Linear, Llama3, RopeEncoding, ScaledRope, YaRN, critical_range
from rope_extend.errors import RopeExtendError
from rope_extend.searching.evaluations import Evaluator
from rope_extend.searching.search_config import FINALISTS, GENETIC, RACE, SearchConfig
from rope_extend.searching.space import START_TOKENS, STEP, Space, Table, steps_of

TRIES = 20
"""Attempts at a crossover that is monotone and new, and at a mutant that is new."""
ATTENTION_STEP, ATTENTION_STEPS = 1.1, 6
"""The ratio of two attention factors that the best closed form is measured with, and their largest number."""


def _forms(space: Space) -> dict[str, RopeEncoding]:
    """The closed forms as published, by name."""
    forms: dict[str, type[ScaledRope]] = {"linear": Linear, "yarn": YaRN, "ntk": NTK, "llama3": Llama3}
    if space.pairs == 1:  # NTK keeps the fastest pair, and needs another one
        del forms["ntk"]
    return {name: cls(space.factor) for name, cls in forms.items()}


def _longrope_seeds(config: SearchConfig, space: Space) -> list[Table]:
    """Position interpolation, NTK and YaRN, with LongRoPE's attention factor or that of the settings."""
    attention = config.attention_factor
    if attention is None:
        attention = math.sqrt(1 + math.log(space.factor) / math.log(space.shape.trained_length))
    forms = _forms(space)
    return [space.of_encoding(forms[name], attention) for name in ("linear", "ntk", "yarn") if name in forms]


def published(config: SearchConfig, space: Space) -> dict[str, Table]:
    """The closed forms as published, by name, each with its own attention factor or that of the settings."""
    return {
        name: space.of_encoding(form, config.attention_factor or form.attention_factor(space.shape))
        for name, form in _forms(space).items()
    }


def _with_moved_critical_pair(config: SearchConfig, space: Space) -> list[Table]:
    """YaRN and NTK with up to four critical pairs each, with YaRN's attention factor (2502.20082)."""
    first, last = critical_range(space.shape)
    factor = config.attention_factor or YaRN(space.factor).attention_factor(space.shape)
    tables = []
    for index in sorted({round(first + (last - first) * n / 3) for n in range(4)}):
        for cls in (NTK, YaRN):
            # YaRN's must be above the start of its ramp, and the model must have the pair.
            with suppress(RopeExtendError):
                tables.append(space.of_encoding(cls(space.factor, critical=index), factor))
    return tables


def closed_forms(config: SearchConfig, space: Space) -> list[Table]:
    """What the race starts from: the closed forms, as published and with a moved critical pair."""
    tables = [*published(config, space).values(), *_with_moved_critical_pair(config, space)]
    return list(dict.fromkeys(tables))


def _mutant(table: Table, space: Space, config: SearchConfig, rng: random.Random) -> Table:
    """A copy in which each divisor is drawn anew with the probability of the settings.

    It is drawn between its neighbours, or between the ends of the range for the first and last pair. With
    `start_tokens`, their number is drawn anew with the same probability.
    """
    steps = steps_of(table)
    for pair in range(len(steps)):
        if rng.random() < config.probability:
            low = steps[pair - 1] if pair else STEP
            high = steps[pair + 1] if pair + 1 < len(steps) else space.largest
            steps[pair] = rng.randint(low, high)
    start = table.start_tokens
    if config.start_tokens and rng.random() < config.probability:
        start = rng.choice(START_TOKENS)
    return space.table([step / STEP for step in steps], table.attention_factor, start)


def _crossover(first: Table, second: Table, space: Space, rng: random.Random) -> Table | None:
    """Each divisor, and the start tokens, from either parent; None if the divisors are not monotone."""
    divisors = [rng.choice(pair) for pair in zip(first.divisors, second.divisors, strict=True)]
    start = rng.choice((first.start_tokens, second.start_tokens))
    if divisors != sorted(divisors):
        return None
    return space.table(divisors, first.attention_factor, start)


def _new_mutant(parent: Table, search: Evaluator, known: set[Table]) -> Table:
    """A mutant that is not known, or the last of several attempts; it is known afterwards."""
    for _ in range(TRIES):
        child = _mutant(parent, search.space, search.config, search.random)
        if child not in known:
            break
    known.add(child)
    return child


def _new_crossover(parents: list[Table], search: Evaluator, known: set[Table]) -> Table:
    """A crossover of two parents that is not known; a mutant of the first, if several attempts fail."""
    first, second = search.random.sample(parents, 2)
    for _ in range(TRIES):
        child = _crossover(first, second, search.space, search.random)
        if child is not None and child not in known:
            known.add(child)
            return child
    return _new_mutant(first, search, known)


def longrope(search: Evaluator) -> list[Table]:
    """LongRoPE's search; returns the best candidates ever seen."""
    config = search.config
    first = _longrope_seeds(config, search.space)
    population, known = list(first), set(first)
    for number in range(config.population - len(first)):
        population.append(_new_mutant(first[number % len(first)], search, known))
    best = search.ranked(population)[: config.parents]
    for _ in range(config.iterations):
        mutants = [_new_mutant(search.random.choice(best), search, known) for _ in range(config.mutants)]
        crossed = [_new_crossover(best, search, known) for _ in range(config.crossovers)]
        best = search.ranked([*best, *mutants, *crossed])[: config.parents]
    return best[:FINALISTS]


def race(search: Evaluator) -> list[Table]:
    """The race; returns the best candidates on all documents."""
    config = search.config
    closed = search.ranked(closed_forms(config, search.space), 1)[0]
    best = closed if config.attention_factor else _with_attention_factor(search, closed)
    found = search.ranked([best, closed])
    known = set(found)
    for _ in range((config.race_passes - search.passes) // config.documents):
        child = _new_mutant(search.random.choice(found), search, known)
        found = search.ranked([*found, child])[:FINALISTS]
    return found


def _with_attention_factor(search: Evaluator, table: Table) -> Table:
    """A table with the best attention factor, by steps up or else down, on one document."""
    tried = 0
    for ratio in (ATTENTION_STEP, 1 / ATTENTION_STEP):
        start = table
        while tried < ATTENTION_STEPS:
            other = search.space.table(table.divisors, table.attention_factor * ratio)
            tried += 1
            before, after = search.scores([table, other], 1)
            if not after < before:
                break
            table = other
        if table != start:
            break
    return table


class Strategy(NamedTuple):
    """A way to search.

    Attributes:
        head_room: the largest divisor, divided by the factor.
        passes: the largest number of documents that it measures, each counted once for each candidate.
        run: searches, and returns the finalists, the best first.
    """

    head_room: float
    passes: Callable[[SearchConfig], int]
    run: Callable[[Evaluator], list[Table]]


def _longrope_passes(config: SearchConfig) -> int:
    """The first population, and the offspring of each iteration, on all documents."""
    offspring = config.mutants + config.crossovers
    return (config.population + config.iterations * offspring) * config.documents


STRATEGIES = {
    RACE: Strategy(2.0, lambda config: config.race_passes, race),
    GENETIC: Strategy(1.25, _longrope_passes, longrope),
}
"""The strategies by name."""
