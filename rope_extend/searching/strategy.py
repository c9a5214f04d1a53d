"""The race of candidates: closed forms first, then mutants of the best.

The closed forms are measured on one document, and the best of them with other attention factors. Then mutants
of the three best tables are measured one after another: at most a twentieth of what LongRoPE's search
measures (2402.13753). A mutant of 64 independent divisors is nearly never monotone, so a mutated divisor is
drawn between its neighbours, as in the code of LongRoPE's authors.
"""

from __future__ import annotations

from contextlib import suppress

from rope_extend.encodings import NTK, Linear, Llama3, RopeEncoding, ScaledRope, YaRN, critical_range
from rope_extend.errors import RopeExtendError
from rope_extend.searching.evaluations import Evaluator
from rope_extend.searching.search_config import FINALISTS, SearchConfig
from rope_extend.searching.space import STEP, Space, Table

TRIES = 20
"""Attempts at a mutant that is new."""
PROBABILITY = 0.3
"""Probability that a divisor mutates, as in LongRoPE (2402.13753, table 8)."""
ATTENTION_STEP, ATTENTION_STEPS = 1.1, 6
"""The ratio of two attention factors that the best closed form is measured with, and their largest number."""


def published(config: SearchConfig, space: Space) -> dict[str, Table]:
    """The closed forms as published, by name, each with its own attention factor or that of the settings."""
    classes: dict[str, type[ScaledRope]] = {"linear": Linear, "yarn": YaRN, "ntk": NTK, "llama3": Llama3}
    if space.pairs == 1:  # NTK keeps the fastest pair, and needs another one
        del classes["ntk"]
    forms: dict[str, RopeEncoding] = {name: cls(space.factor) for name, cls in classes.items()}
    return {
        name: space.of_encoding(form, config.attention_factor or form.attention_factor(space.shape))
        for name, form in forms.items()
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


def _mutant(table: Table, search: Evaluator) -> Table:
    """A copy in which some divisors are drawn anew, between their neighbours or the ends of the range."""
    steps, space, rng = [round(divisor * STEP) for divisor in table.divisors], search.space, search.random
    for pair in range(len(steps)):
        if rng.random() < PROBABILITY:
            low = steps[pair - 1] if pair else STEP
            high = steps[pair + 1] if pair + 1 < len(steps) else space.largest
            steps[pair] = rng.randint(low, high)
    return space.table([step / STEP for step in steps], table.attention_factor)


def _new_mutant(parent: Table, search: Evaluator, known: set[Table]) -> Table:
    """A mutant that is not known, or the last of several attempts; it is known afterwards."""
    for _ in range(TRIES):
        child = _mutant(parent, search)
        if child not in known:
            break
    known.add(child)
    return child


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
