"""The default strategy: closed forms first, then a race within a small family, then single steps.

LongRoPE's and LongRoPE2's results have few free numbers: where the divisors leave 1, where they reach their
largest value, that value, and the attention factor. So the race looks for these first:

1. Closed forms, on one document.
2. Successive halving over the family, on one document and then on more.
3. Gradient steps on all pairs from the best of both.
4. Steps of single fast pairs, those with more than a period within the trained window. The loss is not smooth
   in their divisors, so gradients say little about them.

All stages together measure at most a twentieth of the documents of LongRoPE's search. Without gradients (a
device without float64, or `gradient_steps: false`) the third stage is:

- random steps around the best of both, with a shrinking width;
- steps of single pairs or groups of pairs, from the pair with ten periods in the trained window on. Faster
  pairs turn so often within the target that the loss is not smooth in their divisors. They follow the family.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

from rope_extend.encodings.core.critical import critical_range
from rope_extend.searching.closed_forms import (
    longrope_attention_factor,
    published,
    seeds,
    with_moved_critical_pair,
    yarn_attention_factor,
)
from rope_extend.searching.ordered_steps import ordered_steps
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.space import STEP, Space, Table, steps_of
from rope_extend.searching.strategies import FINALISTS, Context, Strategy

HEAD_ROOM = 2.0
"""The largest divisor, divided by the factor."""
FAMILY_SHARE, WALK_SHARE = 0.35, 0.35
"""The parts of what is left after the closed forms for halving and for random steps."""
GRADIENT_FAMILY_SHARE = 0.2
"""The part for halving, if gradient steps follow."""
FAST_SHARE = 0.4
"""The part of what is left before the gradient steps for steps of fast pairs after them."""
FAST_WIDTH = 0.08
"""The first step of a fast pair, in logarithms of its divisor."""
LEAST_FAMILY = 8
"""Halving needs this number of passes for each document; with fewer, gradient steps get them."""
KEEP = 3
"""One candidate in this number survives a round of halving."""
WALK_PARENTS, WALK_CHILDREN = 3, 9
"""Candidates that a round of random steps starts from and makes."""
SHRINK = 0.75
"""Factor on the width of the random steps from one round to the next."""
WIDTH = 0.16
"""The first step of single pairs or groups of pairs, in logarithms of their divisors."""
KNOTS = 12
"""The largest number of groups of pairs that are moved one by one."""


@dataclass(frozen=True)
class Point:
    """A member of the family.

    The divisors are 1 up to the pair `start`, and `end * s` from the pair `critical` on. Between the two,
    `u` goes from 0 to 1, and the divisor is the power mean of 1 and `end * s` with the weights 1 - u and u.
    Its exponent is `-bend`: 0 is geometric, as in NTK, and 1 harmonic, as in YaRN.
    """

    critical: float
    start: float
    bend: float
    end: float
    attention: float

    def table(self, space: Space) -> Table:
        """The candidate."""
        largest = self.end * space.factor
        divisors = []
        for pair in range(space.pairs):
            share = (pair - self.start) / max(self.critical - self.start, 1e-9)
            share = min(1.0, max(0.0, share))
            if self.bend < 1e-3:
                divisors.append(largest**share)
            else:
                divisors.append((1 - share + share * largest**-self.bend) ** (-1 / self.bend))
        return space.table(divisors, self.attention)


@dataclass(frozen=True)
class Ranges:
    """The range of each number of a point."""

    critical: tuple[float, float]
    start: tuple[float, float]
    bend: tuple[float, float]
    end: tuple[float, float]
    attention: tuple[float, float]

    @classmethod
    def of(cls, config: SearchConfig, space: Space) -> Ranges:
        """The ranges for a model and a target."""
        first, last = critical_range(space.shape)
        fixed = config.attention_factor
        most = 2 * yarn_attention_factor(space) - 1
        return cls(
            critical=(float(first), min(float(last + 1), space.pairs - 0.5)),
            start=(-0.5, float(max(last - 1, 0))),
            bend=(0.0, 1.2),
            end=(0.9, 1.6),
            attention=(1.0, most) if fixed is None else (fixed, fixed),
        )

    def clamp(self, values: Sequence[float]) -> Point:
        """The nearest point within the ranges; the divisors leave 1 before the critical pair."""
        limited = [
            min(high, max(low, value)) for value, (low, high) in zip(values, vars(self).values(), strict=True)
        ]
        limited[1] = min(limited[1], limited[0] - 0.5)
        return Point(*limited)

    def draw(self, rng: random.Random) -> Point:
        """A random point."""
        return self.clamp([rng.uniform(low, high) for low, high in vars(self).values()])

    def near(self, point: Point, width: float, rng: random.Random) -> Point:
        """A random point near another; `width` is in units of the ranges."""
        values = [getattr(point, field.name) for field in fields(point)]
        return self.clamp(
            [
                value + rng.gauss(0, width) * (high - low)
                for value, (low, high) in zip(values, vars(self).values(), strict=True)
            ]
        )


def budget(config: SearchConfig) -> int:
    """The largest number of documents that the race measures before the held-out ones."""
    return config.race_passes


def run(context: Context) -> list[Table]:
    """Search, and return the best candidates on all documents."""
    config, space = context.config, context.space
    closed = _closed_forms(config, space)
    best = context.ranked(closed, 1)
    left = budget(config) - context.evaluator.passes
    if config.gradient_steps and context.evaluator.has_gradients:
        return _by_gradients(context, best, left)
    ranges = Ranges.of(config, space)
    points = _halving(context, ranges, math.floor(FAMILY_SHARE * left))
    points = _walk(context, ranges, points, math.floor(WALK_SHARE * left))
    top = context.ranked([*best[:FINALISTS], *(point.table(space) for point in points[:FINALISTS])])
    first, _ = critical_range(space.shape)
    groups = _groups(list(range(min(first, space.pairs - 1), space.pairs)))
    passes = budget(config) - FINALISTS * config.documents
    top = _single_steps(context, top[0], passes, groups, WIDTH) + top
    return context.ranked(top[: 2 * FINALISTS])[:FINALISTS]


def _by_gradients(context: Context, best: list[Table], left: int) -> list[Table]:
    """Halving over the family, if there is enough left for it, and gradient steps from the best table."""
    config, space = context.config, context.space
    share = math.floor(GRADIENT_FAMILY_SHARE * left)
    points: list[Point] = []
    if share >= LEAST_FAMILY * config.documents:
        points = _halving(context, Ranges.of(config, space), share)
    top = context.ranked([*best[:FINALISTS], *(point.table(space) for point in points[:FINALISTS])])
    left = budget(config) - context.evaluator.passes
    found = ordered_steps(context, top[0], left - math.floor(FAST_SHARE * left))
    fast = [[pair] for pair in range(1, min(index_of_a_period(space), space.pairs))]
    found = _single_steps(context, found[0], budget(config), fast, FAST_WIDTH) + found
    return context.ranked([*found, *top])[:FINALISTS]


def index_of_a_period(space: Space) -> int:
    """The first pair with a period or less within the window that divisors start from."""
    return math.ceil(space.shape.index_with_turns(1))


def _closed_forms(config: SearchConfig, space: Space) -> list[Table]:
    """The closed forms: as published, with a moved critical pair, and with other attention factors."""
    factors = [1.0, yarn_attention_factor(space)]
    tables = [*published(space).values(), *with_moved_critical_pair(space).values()]
    for factor in factors:
        tables += seeds(space, factor)
    if config.attention_factor is not None:
        tables = [space.table(table.divisors, config.attention_factor) for table in tables]
    else:
        tables += seeds(space, longrope_attention_factor(config, space))
    return list(dict.fromkeys(tables))


def _documents(config: SearchConfig) -> int:
    """The number of documents of the stages between the first and the last."""
    return max(1, round(0.4 * config.documents))


def _halving(context: Context, ranges: Ranges, passes: int) -> list[Point]:
    """The best points of the family, the best first; spends about `passes` documents.

    All points are measured on one document, a third of them on more, and a third of these on all.
    """
    config = context.config
    each = 1 + (_documents(config) - 1) / KEEP + (config.documents - _documents(config)) / KEEP**2
    points = [ranges.draw(context.random) for _ in range(max(KEEP**2, math.floor(passes / each)))]
    points = _ranked(context, points, 1)
    points = _ranked(context, points[: len(points) // KEEP], _documents(config))
    return _ranked(context, points[: max(1, len(points) // KEEP)], config.documents)


def _walk(context: Context, ranges: Ranges, points: list[Point], passes: int) -> list[Point]:
    """Random steps around the best points; spends at most `passes` documents beyond what is known."""
    config, width = context.config, 0.15
    points = points[:WALK_PARENTS]
    last = context.evaluator.passes + passes - FINALISTS * config.documents
    while context.evaluator.passes + WALK_CHILDREN * _documents(config) <= last:
        children = [
            ranges.near(points[number % len(points)], width, context.random)
            for number in range(WALK_CHILDREN)
        ]
        points = _ranked(context, [*points, *children], _documents(config))[:WALK_PARENTS]
        width *= SHRINK
    return _ranked(context, points, config.documents)


def _ranked(context: Context, points: Sequence[Point], documents: int) -> list[Point]:
    """Points with different tables, the best first."""
    by_table: dict[Table, Point] = {}
    for point in points:
        by_table.setdefault(point.table(context.space), point)
    return [by_table[table] for table in context.ranked(list(by_table), documents)]


def _single_steps(
    context: Context, table: Table, passes: int, groups: Sequence[Sequence[int]], width: float
) -> list[Table]:
    """Move groups of pairs one by one, and keep what is better on all documents; the results, best first.

    A step is first measured on a part of the documents. Every step that fails halves its group's width.

    Args:
        context: the search.
        table: where the steps start.
        passes: the number of documents after which they end, counted from the start of the search.
        groups: pairs that move together.
        width: the first step of each group, in logarithms of divisors.
    """
    config, space = context.config, context.space
    widths = [width] * len(groups)
    found = [table]
    part = _documents(config)
    while max(widths, default=0) > 1 / (STEP * 2):
        for number, group in enumerate(groups):
            signs = [1, -1] if context.random.random() < 0.5 else [-1, 1]
            for sign in signs:
                if context.evaluator.passes + config.documents > passes:
                    return found[:FINALISTS]
                child = _moved(found[0], group, sign * widths[number], space)
                if child == found[0]:
                    continue
                before, after = context.scores([found[0], child], part)
                if not after < before:
                    continue
                before, after = context.scores([found[0], child])
                if after < before:
                    found.insert(0, child)
                    break
            else:
                widths[number] /= 2
    return found[:FINALISTS]


def _groups(pairs: Sequence[int]) -> list[list[int]]:
    """At most `KNOTS` groups of neighbours, as equal in size as possible."""
    count = min(KNOTS, len(pairs))
    edges = [len(pairs) * number // count for number in range(count + 1)]
    return [list(pairs[low:high]) for low, high in itertools.pairwise(edges)]


def _moved(table: Table, group: Sequence[int], change: float, space: Space) -> Table:
    """The divisors of some pairs multiplied by `exp(change)`; others move if their order asks for it."""
    steps = [float(step) for step in steps_of(table)]
    for pair in group:
        steps[pair] *= math.exp(change)
    for pair in range(group[0] - 1, -1, -1):
        steps[pair] = min(steps[pair], steps[pair + 1])
    for pair in range(group[-1] + 1, len(steps)):
        steps[pair] = max(steps[pair], steps[pair - 1])
    return space.table([step / STEP for step in steps], table.attention_factor, table.start_tokens)


STRATEGY = Strategy(HEAD_ROOM, budget, run)
