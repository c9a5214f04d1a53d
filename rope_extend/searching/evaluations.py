"""Measures candidates: each one once on each document, with a log, a progress bar and the cost."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from rope_extend.errors import RopeExtendError
from rope_extend.memory.meta_device import quiet_patching
from rope_extend.patching import patch_model
from rope_extend.searching.fitness import Fitness, Losses
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.search_log import Cost, SearchLog
from rope_extend.searching.space import Space, Table

SEARCH, HOLDOUT, AS_WRITTEN = "search", "held out", "held out, as written"
"""The two groups of documents.

The last name is that of held-out documents under an encoding with two lists, so that their losses are never
those of one table.
"""


def score(losses: Iterable[Losses], weights: Mapping[str, float]) -> float:
    """The fitness, lower is better: the weighted sum of the mean loss of each part, in nats per token.

    Infinite if a loss is not a finite number.
    """
    documents = list(losses)
    total = 0.0
    for part, weight in weights.items():
        values = [document[part] for document in documents]
        total += weight * math.fsum(loss.total for loss in values) / sum(loss.terms for loss in values)
    return total if math.isfinite(total) else math.inf


class Evaluator:
    """Measures the candidates of a search on documents, and ranks them.

    Args:
        model: the model.
        fitness: the losses of documents; the first ones are searched on, the others are held out.
        config: the settings.
        space: where the search looks.
        log: what is measured already, and where the rest is written.
        bar: progress bar that counts documents; None for none.

    Raises:
        RopeExtendError: a loss in the log lacks a part of the fitness.
    """

    def __init__(
        self,
        model: nn.Module,
        fitness: Fitness,
        config: SearchConfig,
        space: Space,
        *,
        log: SearchLog,
        bar: Any = None,
    ) -> None:
        self.model, self.fitness, self.config, self.space = model, fitness, config, space
        self.weights, self.documents = config.weights(), config.documents
        self.log, self.bar = log, bar
        self.random = random.Random(config.seed)
        """Source of all random choices of the search."""
        for (_, name), losses in log.losses.items():
            if missing := self.weights.keys() - losses.keys():
                raise RopeExtendError(
                    f"{str(log.file)!r} has losses of {name!r} without the part {min(missing)!r}, which this "
                    "search needs; delete the lines without it"
                )
        self.requested: set[tuple[Table, str]] = set()
        """What this search has asked for. Unlike the log, it is the same in a resumed search."""
        self.curve: list[tuple[int, float]] = []
        """Passes over documents, and the best score on all documents so far, each time that it improves."""

    @property
    def passes(self) -> int:
        """Documents that this search has asked for, each counted once for each candidate."""
        return len(self.requested)

    def scores(self, tables: Sequence[Table], documents: int | None = None) -> list[float]:
        """The fitness of candidates, lower is better: on the first documents to search on, or on all.

        Raises:
            RopeExtendError: a candidate is outside the space.
        """
        for table in tables:
            self.space.check(table)
        numbers = range(min(documents or self.documents, self.documents))
        return [score(self._losses(table, SEARCH, numbers), self.weights) for table in tables]

    def ranked(self, tables: Sequence[Table], documents: int | None = None) -> list[Table]:
        """Different candidates by fitness, the best first; those with equal fitness keep their order."""
        different = list(dict.fromkeys(tables))
        scores = dict(zip(different, self.scores(different, documents), strict=True))
        return sorted(different, key=scores.__getitem__)

    def held_out(self, table: Table) -> list[Losses]:
        """The losses of a candidate on each of the documents that are not searched on.

        They are those of the encoding that the search would write, `space.result(table)`.
        """
        one_table = self.space.result(table) == self.space.encoding(table)
        numbers = range(len(self.fitness.documents) - self.documents)
        return self._losses(table, HOLDOUT if one_table else AS_WRITTEN, numbers)

    def _losses(self, table: Table, group: str, numbers: Sequence[int]) -> list[Losses]:
        names = [f"{group} {number}" for number in numbers]
        new = len({(table, name) for name in names} - self.requested)
        self.requested |= {(table, name) for name in names}
        missing = [number for number in numbers if (table, f"{group} {number}") not in self.log.losses]
        if missing:
            self._measure(table, group, missing)
        losses = [self.log.losses[table, name] for name in names]
        if group == SEARCH and len(names) == self.documents:
            self._note(score(losses, self.weights))
        if self.bar is not None:
            self.bar.update(new)
        return losses

    def _measure(self, table: Table, group: str, numbers: Sequence[int]) -> None:
        """Measure a candidate on the documents with these numbers of a group, and write the line."""
        started, space = time.perf_counter(), self.space
        shift = 0 if group == SEARCH else self.documents
        with (
            quiet_patching(),
            patch_model(
                self.model,
                space.result(table) if group == AS_WRITTEN else space.encoding(table),
                trained_length=space.pretrained.trained_length,
                target_length=space.target_length,
            ),
        ):
            losses = self.fitness.measure(self.model, [shift + number for number in numbers])
        passes, tokens = len(numbers) * self.fitness.passes, len(numbers) * self.fitness.tokens
        cost = Cost(1, passes, tokens, time.perf_counter() - started)
        self.log.add(table, [f"{group} {number}" for number in numbers], losses, cost)

    def _note(self, value: float) -> None:
        if self.curve and not value < self.curve[-1][1]:
            return
        self.curve.append((self.passes, value))
        if self.bar is not None:
            self.bar.set_postfix_str(f"best {value:.4f} nats", refresh=False)  # the next update shows it
