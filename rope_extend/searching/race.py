"""The default strategy: closed forms first, then a race within a small family, then single steps.

LongRoPE's and LongRoPE2's results have few free numbers: where the divisors leave 1, where they reach their
largest value, that value, and the attention factor. So the race looks for these first:

1. Closed forms, on one document, and other attention factors for the best of them.
2. Successive halving over the family, on one document and then on more.
3. Gradient steps on all pairs from the best of both.
4. Draws of the fastest divisors, and then steps of the pairs with more than a period within the trained
   window. The loss is not smooth in these divisors, so gradients say little about them.

All stages together measure at most a twentieth of the documents of LongRoPE's search. Without gradients (a
device without float64, or `gradient_steps: false`) the third stage is random steps around the best of both,
with a shrinking width. The last steps are then those of all pairs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

from rope_extend.encodings.core.critical import critical_range
from rope_extend.searching.closed_forms import closed_forms
from rope_extend.searching.fast_pairs import KEEP, drawn, stepped
from rope_extend.searching.ordered_steps import ordered_steps
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.space import Space, Table
from rope_extend.searching.strategies import FINALISTS, Context, Strategy

HEAD_ROOM = 2.0
"""The largest divisor, divided by the factor."""
ATTENTION_STEP, ATTENTION_STEPS = 1.1, 6
"""The ratio of two attention factors that the best closed form is measured with, and their largest number."""
FAMILY_SHARE = 0.2
"""The part of what is left after the closed forms for halving."""
LEAST_FAMILY = 10
"""Halving needs this number of passes for each document; with fewer, the other stages get them."""
MIDDLE_SHARE, DRAWN_SHARE = 0.25, 0.25
"""The parts of what is left after halving for gradient steps or random steps, and for draws."""
WALK_PARENTS, WALK_CHILDREN = 3, 9
"""Candidates that a round of random steps starts from and makes."""
SHRINK = 0.75
"""Factor on the width of the random steps from one round to the next."""
WIDTH = 0.25
"""The largest of the last steps, in logarithms of divisors."""


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
    def of(cls, config: SearchConfig, space: Space, attention: float) -> Ranges:
        """The ranges for a model and a target, around an attention factor."""
        first, last = critical_range(space.shape)
        wide = ATTENTION_STEP if config.attention_factor is None else 1.0
        return cls(
            critical=(float(first), min(float(last + 1), space.pairs - 0.5)),
            start=(-0.5, float(max(last - 1, 0))),
            bend=(0.0, 1.2),
            end=(0.9, 1.6),
            attention=(attention / wide, attention * wide),
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
    gradients = config.gradient_steps and context.evaluator.has_gradients
    closed = context.ranked(closed_forms(config, space), 1)[0]
    best = _with_attention_factor(context, closed)
    ranges = Ranges.of(config, space, best.attention_factor)
    share = math.floor(FAMILY_SHARE * _left(context))
    points: list[Point] = []
    if not gradients or share >= LEAST_FAMILY * config.documents:
        points = _halving(context, ranges, share)
    found = context.ranked([best, closed, *(point.table(space) for point in points[:FINALISTS])])
    left = _left(context)
    if gradients:
        more = ordered_steps(context, found[0], math.floor(MIDDLE_SHARE * left))
    else:
        points = _walk(context, ranges, points, math.floor(MIDDLE_SHARE * left))
        more = [point.table(space) for point in points]
    found = context.ranked([*found, *more])
    found = context.ranked([*found, *drawn(context, found[0], math.floor(DRAWN_SHARE * left))])
    end = index_of_a_period(space) + 1 if gradients else space.pairs
    last, others = stepped(context, found[0], budget(config), range(1, min(end, space.pairs)), WIDTH)
    others = [table for table in context.ranked([*others, *found]) if table != last]
    return context.ranked([last, *others[: FINALISTS - 1]])


def _left(context: Context) -> int:
    """Documents that may still be measured before the held-out ones."""
    return budget(context.config) - context.evaluator.passes


def index_of_a_period(space: Space) -> int:
    """The first pair with a period or less within the window that divisors start from."""
    return math.ceil(space.shape.index_with_turns(1))


def _with_attention_factor(context: Context, table: Table) -> Table:
    """A table with the best attention factor, by steps up or else down, on one document."""
    if context.config.attention_factor is not None:
        return table
    tried = 0
    for ratio in (ATTENTION_STEP, 1 / ATTENTION_STEP):
        start = table
        while tried < ATTENTION_STEPS:
            other = context.space.table(table.divisors, table.attention_factor * ratio)
            tried += 1
            before, after = context.scores([table, other], 1)
            if not after < before:
                break
            table = other
        if table != start:
            break
    return table


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
    while (before := context.evaluator.passes) + WALK_CHILDREN * _documents(config) <= last:
        children = [
            ranges.near(points[number % len(points)], width, context.random)
            for number in range(WALK_CHILDREN)
        ]
        points = _ranked(context, [*points, *children], _documents(config))[:WALK_PARENTS]
        width *= SHRINK
        if context.evaluator.passes == before:  # few different tables exist, and all of these are known
            break
    return _ranked(context, points, config.documents)


def _ranked(context: Context, points: Sequence[Point], documents: int) -> list[Point]:
    """Points with different tables, the best first."""
    by_table: dict[Table, Point] = {}
    for point in points:
        by_table.setdefault(point.table(context.space), point)
    return [by_table[table] for table in context.ranked(list(by_table), documents)]


STRATEGY = Strategy(HEAD_ROOM, budget, run)
