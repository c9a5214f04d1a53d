"""LongRoPE2's search (2502.20082): a critical pair, above which the divisors evolve between s and 2s.

The divisors of the pairs before the critical pair c follow from its own: `lambda_c^(i/c)`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rope_extend.encodings.core.critical import critical_range
from rope_extend.errors import RopeExtendError
from rope_extend.searching.closed_forms import longrope_attention_factor
from rope_extend.searching.genetic import TRIES, passes
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.space import STEP, Space, Table
from rope_extend.searching.strategies import FINALISTS, Context, Strategy

HEAD_ROOM = 2.0
"""The largest divisor, divided by the factor."""


@dataclass(frozen=True)
class Individual:
    """A critical pair, and the divisors from there on, in hundredths."""

    critical: int
    upper: tuple[int, ...]

    def table(self, space: Space, attention_factor: float) -> Table:
        """The candidate: the divisors before the critical pair follow the curve of NTK."""
        largest = self.upper[0] / STEP
        lower = [largest ** (pair / self.critical) for pair in range(self.critical)]
        return space.table([*lower, *(step / STEP for step in self.upper)], attention_factor)


def bounds(space: Space) -> tuple[int, int]:
    """The range of the divisors from the critical pair on, in hundredths: from s to 2s."""
    return round(space.factor * STEP), space.largest


def first_individual(critical: int, space: Space, rng: random.Random) -> Individual:
    """Algorithm 1 of the paper: one divisor between s and 2s for all pairs from the critical one on."""
    return Individual(critical, (rng.randint(*bounds(space)),) * (space.pairs - critical))


def mutant(individual: Individual, space: Space, config: SearchConfig, rng: random.Random) -> Individual:
    """Algorithm 2: each divisor from the critical pair on is drawn anew with the given probability.

    It is drawn between its neighbours, as in `genetic`.
    """
    low, high = bounds(space)
    upper = list(individual.upper)
    for number in range(len(upper)):
        if rng.random() < config.probability:
            least = upper[number - 1] if number else low
            most = upper[number + 1] if number + 1 < len(upper) else high
            upper[number] = rng.randint(least, most)
    return Individual(individual.critical, tuple(upper))


def crossover(first: Individual, second: Individual, rng: random.Random) -> Individual | None:
    """Each divisor of the pairs that evolve in both parents from either; None if they are not monotone."""
    lower, higher = sorted((first, second), key=lambda parent: parent.critical)
    shift = higher.critical - lower.critical
    shared = [rng.choice(pair) for pair in zip(lower.upper[shift:], higher.upper, strict=True)]
    child = Individual(lower.critical, (*lower.upper[:shift], *shared))
    return None if any(a > b for a, b in itertools.pairwise(child.upper)) else child


def run(context: Context) -> list[Table]:
    """Search, and return the best candidates ever seen.

    Raises:
        RopeExtendError: the model rotates too few channel pairs to have a critical one.
    """
    config, space, rng = context.config, context.space, context.random
    if space.pairs < 3:
        raise RopeExtendError(
            f"longrope2 needs 3 or more rotated channel pairs, this model has {space.pairs}; use race"
        )
    assert config.population is not None
    assert config.mutants is not None
    assert config.crossovers is not None
    factor = longrope_attention_factor(config, space)
    first, last = critical_range(space.shape)
    known: set[Individual] = set()

    def new_mutant(parent: Individual) -> Individual:
        for _ in range(TRIES):
            child = mutant(parent, space, config, rng)
            if child not in known:
                break
        known.add(child)
        return child

    def new_crossover(parents: Sequence[Individual]) -> Individual:
        pair = rng.sample(parents, 2)
        for _ in range(TRIES):
            child = crossover(pair[0], pair[1], rng)
            if child is not None and child not in known:
                known.add(child)
                return child
        return new_mutant(pair[0])

    def ranked(individuals: Sequence[Individual]) -> list[Individual]:
        by_table: dict[Table, Individual] = {}
        for individual in individuals:
            by_table.setdefault(individual.table(space, factor), individual)
        return [by_table[table] for table in context.ranked(list(by_table))][: config.parents]

    indices = range(first, last + 1)
    population = [
        first_individual(indices[number % len(indices)], space, rng) for number in range(config.population)
    ]
    known.update(population)
    best = ranked(population)
    for _ in range(config.iterations):
        mutants = [new_mutant(rng.choice(best)) for _ in range(config.mutants)]
        crossed = [
            new_crossover(best) if len(best) > 1 else new_mutant(best[0]) for _ in range(config.crossovers)
        ]
        best = ranked([*best, *mutants, *crossed])
    return [individual.table(space, factor) for individual in best[:FINALISTS]]


STRATEGY = Strategy(HEAD_ROOM, passes, run)
