"""The default strategy: the best closed form, another attention factor, gradient steps, and then mutants.

1. Closed forms on one document, and other attention factors for the best of them.
2. Gradient steps from there, with half of what is left, on all divisors and the attention factor.
3. Mutants of the best tables, as in LongRoPE's search, one after another. The loss is not smooth in the fast
   pairs, so gradients say little about them.

It measures at most a twentieth of the documents of LongRoPE's search. Without gradients (a device without
float64, or `gradient_steps: false`), there are more mutants instead.
"""

from __future__ import annotations

from rope_extend.searching.closed_forms import closed_forms, seeds
from rope_extend.searching.genetic import new_mutant
from rope_extend.searching.gradient import descend
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.space import Table
from rope_extend.searching.strategies import FINALISTS, Context, Strategy

HEAD_ROOM = 2.0
"""The largest divisor, divided by the factor."""
ATTENTION_STEP, ATTENTION_STEPS = 1.1, 6
"""The ratio of two attention factors that the best closed form is measured with, and their largest number."""


def budget(config: SearchConfig) -> int:
    """The largest number of documents that the race measures before the held-out ones."""
    return config.race_passes


def run(context: Context) -> list[Table]:
    """Search, and return the best candidates on all documents."""
    config, space, evaluator = context.config, context.space, context.evaluator
    forms = closed_forms(config, space) if space.long is None else seeds(space, space.long.attention_factor)
    closed = context.ranked(forms, 1)[0]
    found = context.ranked([_with_attention_factor(context, closed), closed])
    if config.gradient_steps and evaluator.has_gradients:
        steps = descend(context, found[0], (budget(config) - evaluator.passes) // 2)
        found = context.ranked([*steps, *found])[:FINALISTS]
    known = set(found)
    for _ in range((budget(config) - evaluator.passes) // config.documents):
        child = new_mutant(context.random.choice(found), context, known)
        found = context.ranked([*found, child])[:FINALISTS]
    return found


def _with_attention_factor(context: Context, table: Table) -> Table:
    """A table with the best attention factor, by steps up or else down, on one document."""
    if context.config.attention_factor is not None or context.space.long is not None:
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


STRATEGY = Strategy(HEAD_ROOM, budget, run)
