"""Draws and steps of fast pairs, which have many periods within the trained window.

The loss is not smooth in their divisors: a change of a few hundredths turns the phase at far distances by
whole periods. So a gradient does not lead to a better divisor. Instead, random ones are tried, first on one
document.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean, stdev

from rope_extend.searching.space import STEP, Space, Table, steps_of
from rope_extend.searching.strategies import Context

ROUGH_PERIODS = 5
"""Pairs with more periods than this within the trained window are drawn."""
DRAWN_KNOTS = 3
"""The largest number of independent divisors in a draw; those between follow on a line of logarithms."""
KEEP = 3
"""One draw in this number is measured on all documents."""
GROUPS = 12
"""The largest number of groups of pairs that are moved one by one."""
ATTEMPTS = 10
"""Attempts at a step for each document that may be measured: a step may change nothing."""


def drawn(context: Context, table: Table, passes: int) -> list[Table]:
    """Draw the fastest divisors of a table anew, several times, and keep the rest of it.

    All draws are measured on one document, and the best third on all.

    Args:
        context: the search.
        table: a candidate that is measured on all documents.
        passes: documents that may be measured.

    Returns:
        The table and the best draws, the best on all documents first.
    """
    space, config = context.space, context.config
    end = min(math.ceil(space.shape.index_with_turns(ROUGH_PERIODS)), space.pairs - 1)
    each = 1 + (config.documents - 1) / KEEP
    count = math.floor(passes / each)
    if end < 2 or count < KEEP:
        return [table]
    tables = context.ranked([_draw(context, table, end) for _ in range(count)], 1)
    return context.ranked([table, *tables[: count // KEEP]])


def _draw(context: Context, table: Table, end: int) -> Table:
    """A table with random divisors before the pair `end`: a few in order, and lines of logarithms between."""
    space, highest = context.space, math.log(table.divisors[end])
    knots = min(DRAWN_KNOTS, end - 1)
    lowest = math.log(table.divisors[0])
    heights = sorted(context.random.uniform(lowest, highest) for _ in range(knots))
    heights = [lowest, *heights, highest]
    divisors = list(table.divisors)
    for pair in range(1, end):
        below, share = divmod(pair * (knots + 1) / end, 1)
        low, high = heights[int(below) : int(below) + 2]
        divisors[pair] = math.exp(low + share * (high - low))
    return space.table(divisors, table.attention_factor, table.start_tokens)


def stepped(
    context: Context, table: Table, passes: int, pairs: Sequence[int], width: float
) -> tuple[Table, list[Table]]:
    """Move groups of neighbours by random factors, one group at a time, and keep what is better.

    A step is first measured on one of the documents, by chance, so that no document decides more than others.

    Args:
        context: the search.
        table: where the steps start.
        passes: the number of documents after which they end, counted from the start of the search.
        pairs: the pairs that are moved.
        width: the largest step, in logarithms of divisors.

    Returns:
        Where the steps ended, and every other table that was measured on all documents.
    """
    config, evaluator, rng = context.config, context.evaluator, context.random
    groups = groups_of(pairs)
    everything = range(config.documents)
    others: list[Table] = []
    order: list[list[int]] = []
    for _ in range(ATTEMPTS * passes if groups else 0):
        if evaluator.passes + config.documents > passes:
            break
        if not order:
            order = rng.sample(groups, len(groups))
        child = moved(table, order.pop(), rng.uniform(-width, width), context.space)
        first = [rng.randrange(config.documents)]
        if child == table or not (
            evaluator.by_document(context.space, child, first)
            < evaluator.by_document(context.space, table, first)
        ):
            continue
        before, after = (evaluator.by_document(context.space, each, everything) for each in (table, child))
        better = is_better(before, after)
        others.append(table if better else child)
        table = child if better else table
    return table, others


def is_better(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether losses fell by more than the standard error of their mean difference over documents.

    Smaller gains are mostly those of the documents searched on. A single document has no standard error.
    """
    gains = [old - new for old, new in zip(before, after, strict=True)]
    if not all(map(math.isfinite, gains)):
        return all(map(math.isfinite, after))
    error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return fmean(gains) > error


def groups_of(pairs: Sequence[int]) -> list[list[int]]:
    """At most `GROUPS` groups of neighbours, as equal in size as possible."""
    count = min(GROUPS, len(pairs))
    edges = [len(pairs) * number // max(count, 1) for number in range(count + 1)]
    return [list(pairs[low:high]) for low, high in itertools.pairwise(edges)]


def moved(table: Table, group: Sequence[int], change: float, space: Space) -> Table:
    """The divisors of some pairs multiplied by `exp(change)`; others move if their order asks for it."""
    steps = [float(step) for step in steps_of(table)]
    for pair in group:
        steps[pair] *= math.exp(change)
    for pair in range(group[0] - 1, -1, -1):
        steps[pair] = min(steps[pair], steps[pair + 1])
    for pair in range(group[-1] + 1, len(steps)):
        steps[pair] = max(steps[pair], steps[pair - 1])
    return space.table([step / STEP for step in steps], table.attention_factor, table.start_tokens)
