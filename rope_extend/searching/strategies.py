"""The strategies by name. A strategy asks for the fitness of candidates, and returns its finalists."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rope_extend.searching.evaluations import Evaluator
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.space import Space, Table


@dataclass(frozen=True)
class Context:
    """What a strategy works with.

    Attributes:
        config: the settings.
        space: where it looks.
        evaluator: measures candidates.
        random: source of all random choices.
    """

    config: SearchConfig
    space: Space
    evaluator: Evaluator
    random: random.Random

    def scores(self, tables: Sequence[Table], documents: int | None = None) -> list[float]:
        """The fitness of candidates, lower is better; on the first documents, or on all."""
        return self.evaluator.scores(self.space, tables, documents)

    def ranked(self, tables: Sequence[Table], documents: int | None = None) -> list[Table]:
        """Different candidates by fitness, the best first; those with equal fitness keep their order."""
        different = list(dict.fromkeys(tables))
        scores = self.scores(different, documents)
        order = sorted(range(len(different)), key=lambda number: (scores[number], number))
        return [different[number] for number in order]


@dataclass(frozen=True)
class Strategy:
    """A way to search.

    Attributes:
        head_room: the largest divisor, divided by the factor.
        passes: the largest number of documents that it measures, each counted once for each candidate.
        run: searches, and returns the finalists, the best first.
    """

    head_room: float
    passes: Callable[[SearchConfig], int]
    run: Callable[[Context], list[Table]]


FINALISTS = 3
"""Candidates of a strategy that are compared on held-out documents."""
