"""LongRoPE's search: algorithm 1 of 2402.13753, an evolution of non-decreasing divisors.

The paper says that offspring are rejected unless they are monotone. A mutant of 64 independent divisors is
nearly never monotone. So a mutated divisor is drawn between its neighbours here, as in the authors' code.
"""

from __future__ import annotations

import itertools
import random

from rope_extend.searching.closed_forms import longrope_attention_factor, seeds
from rope_extend.searching.evaluations import Evaluator
from rope_extend.searching.search_config import FINALISTS, SearchConfig
from rope_extend.searching.space import START_TOKENS, STEP, Space, Table, steps_of

HEAD_ROOM = 1.25
"""The largest divisor, divided by the factor."""
TRIES = 20
"""Attempts at a crossover that is monotone and new, and at a mutant that is new."""


def mutant(table: Table, space: Space, config: SearchConfig, rng: random.Random) -> Table:
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
    return space.from_steps(steps, table.attention_factor, start)


def crossover(first: Table, second: Table, space: Space, rng: random.Random) -> Table | None:
    """Each divisor, and the start tokens, from either parent; None if the divisors are not monotone."""
    steps = [rng.choice(pair) for pair in zip(steps_of(first), steps_of(second), strict=True)]
    start = rng.choice((first.start_tokens, second.start_tokens))
    if any(low > high for low, high in itertools.pairwise(steps)):
        return None
    return space.from_steps(steps, first.attention_factor, start)


def new_mutant(parent: Table, search: Evaluator, known: set[Table]) -> Table:
    """A mutant that is not known, or the last of several attempts; it is known afterwards."""
    for _ in range(TRIES):
        child = mutant(parent, search.space, search.config, search.random)
        if child not in known:
            break
    known.add(child)
    return child


def new_crossover(parents: list[Table], search: Evaluator, known: set[Table]) -> Table:
    """A crossover of two parents that is not known; a mutant of the first, if several attempts fail."""
    first, second = search.random.sample(parents, 2)
    for _ in range(TRIES):
        child = crossover(first, second, search.space, search.random)
        if child is not None and child not in known:
            known.add(child)
            return child
    return new_mutant(first, search, known)


def run(search: Evaluator) -> list[Table]:
    """Search, and return the best candidates ever seen."""
    config = search.config
    first = seeds(search.space, longrope_attention_factor(config, search.space))
    population, known = list(first), set(first)
    for number in range(config.population - len(first)):
        population.append(new_mutant(first[number % len(first)], search, known))
    best = search.ranked(population)[: config.parents]
    for _ in range(config.iterations):
        mutants = [new_mutant(search.random.choice(best), search, known) for _ in range(config.mutants)]
        crossed = [new_crossover(best, search, known) for _ in range(config.crossovers)]
        best = search.ranked([*best, *mutants, *crossed])[: config.parents]
    return best[:FINALISTS]


def passes(config: SearchConfig) -> int:
    """The first population, and the offspring of each iteration, on all documents."""
    offspring = config.mutants + config.crossovers
    return (config.population + config.iterations * offspring) * config.documents
