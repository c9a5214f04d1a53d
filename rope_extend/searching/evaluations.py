"""Measures candidates: each one once on each document, with a log, a progress bar and the cost."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from rope_extend.data.documents import Document
from rope_extend.evaluation.loss_computer import RunOptions
from rope_extend.evaluation.perplexity import perplexity
from rope_extend.memory.meta_device import quiet_patching
from rope_extend.patching import patch_model
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.search_log import Cost, Loss, Losses, SearchLog
from rope_extend.searching.space import Space, Table

SEARCH, HOLDOUT, AS_WRITTEN = "search", "held out", "held out, as written"
"""The two groups of documents.

The last name is that of held-out documents under an encoding with two lists, so that their losses are never
those of one table.
"""


def score(losses: Iterable[Losses], lengths: Sequence[int]) -> float:
    """The fitness, lower is better: the mean over lengths of the mean loss of documents, in nats per token.

    Infinite if a loss is not a finite number.
    """
    documents = list(losses)
    total = 0.0
    for length in lengths:
        values = [document[length] for document in documents]
        total += math.fsum(loss.total for loss in values) / sum(loss.terms for loss in values) / len(lengths)
    return total if math.isfinite(total) else math.inf


class Evaluator:
    """Measures the candidates of a search on documents, and ranks them.

    One forward gives the losses at all lengths, because the tables of candidates do not depend on the length.

    Args:
        model: the model.
        documents: the first ones are searched on, the others are held out.
        config: the settings.
        space: where the search looks.
        log: what is measured already, and where the rest is written.
        chunk: tokens of a document that are processed at a time, if whole documents do not fit into memory.
        bar: progress bar that counts documents; None for none.
    """

    def __init__(
        self,
        model: nn.Module,
        documents: Sequence[Document],
        config: SearchConfig,
        space: Space,
        *,
        log: SearchLog,
        chunk: int | None = None,
        bar: Any = None,
    ) -> None:
        self.model, self.config, self.space = model, config, space
        self.all_documents, self.documents, self.lengths = documents, config.documents, config.lengths
        self.log, self.chunk, self.bar = log, chunk, bar
        self.random = random.Random(config.seed)
        """Source of all random choices of the search."""
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
        return [score(self._losses(table, SEARCH, numbers), self.lengths) for table in tables]

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
        numbers = range(len(self.all_documents) - self.documents)
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
            self._note(score(losses, self.lengths))
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
            result = perplexity(
                self.model,
                [self.all_documents[shift + number] for number in numbers],
                self.lengths,
                progress=False,
                options=RunOptions(chunk=self.chunk),
            )
        sums, terms = result.document_nll, result.document_terms
        assert sums is not None
        assert terms is not None
        losses = [
            {length: Loss(sums[length][row], terms[length][row]) for length in self.lengths}
            for row in range(len(numbers))
        ]
        cost = Cost(1, len(numbers), len(numbers) * self.lengths[-1], time.perf_counter() - started)
        self.log.add(table, [f"{group} {number}" for number in numbers], losses, cost)

    def _note(self, value: float) -> None:
        if self.curve and not value < self.curve[-1][1]:
            return
        self.curve.append((self.passes, value))
        if self.bar is not None:
            self.bar.set_postfix_str(f"best {value:.4f} nats", refresh=False)  # the next update shows it
