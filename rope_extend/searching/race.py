"""The default strategy: the best closed form, another attention factor, and then mutants.

1. Closed forms on one document, and other attention factors for the best of them.
2. Mutants of the three best tables, as in LongRoPE's search, one after another.

It measures at most a twentieth of the documents of LongRoPE's search.
"""

from __future__ import annotations

from rope_extend.searching.closed_forms import closed_forms
from rope_extend.searching.evaluations import Evaluator
from rope_extend.searching.genetic import new_mutant
from rope_extend.searching.search_config import FINALISTS
from rope_extend.searching.space import Table

HEAD_ROOM = 2.0
"""The largest divisor, divided by the factor."""
ATTENTION_STEP, ATTENTION_STEPS = 1.1, 6
"""The ratio of two attention factors that the best closed form is measured with, and their largest number."""


def run(search: Evaluator) -> list[Table]:
    """Search, and return the best candidates on all documents."""
    config = search.config
    closed = search.ranked(closed_forms(config, search.space), 1)[0]
    best = closed if config.attention_factor else _with_attention_factor(search, closed)
    found = search.ranked([best, closed])
    known = set(found)
    for _ in range((config.race_passes - search.passes) // config.documents):
        child = new_mutant(search.random.choice(found), search, known)
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
