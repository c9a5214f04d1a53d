"""Measures candidates, each one once on each document. A journal keeps what is measured, for resuming.

A line of the journal has a candidate, the losses of the documents that were measured, and the seconds.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import nn

from rope_extend.checks import number, require
from rope_extend.data.documents import Document
from rope_extend.evaluation.loss_computer import RunOptions
from rope_extend.evaluation.perplexity import perplexity
from rope_extend.evaluation.statistics import plain
from rope_extend.journal import Identity, Journal
from rope_extend.memory.meta_device import quiet_patching
from rope_extend.patching import patch_model
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.space import Space, Table

LOG = "evaluations.jsonl"
"""Name of the journal."""
_ADVICE = "give the settings of that search, use another directory, or overwrite=True"
SEARCH, HOLDOUT = "search", "held out"
"""The two groups of documents."""


class Cost(NamedTuple):
    """What evaluations cost.

    Attributes:
        evaluations: the number of candidates that were measured, each counted once for each set of documents.
        passes: forward passes.
        forward_tokens: tokens of these passes.
        seconds: wall time.
    """

    evaluations: int
    passes: int
    forward_tokens: int
    seconds: float


def score(losses: Sequence[float]) -> float:
    """The fitness, lower is better: the mean of the losses of documents, in nats per token.

    Infinite if a loss is not a finite number.
    """
    mean = math.fsum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf


class Evaluator:
    """Measures the candidates of a search on documents, and ranks them.

    Args:
        model: the model.
        documents: the first ones are searched on, the others are held out.
        config: the settings.
        space: where the search looks.
        file: the journal; None keeps the evaluations in memory only.
        identity: everything that the evaluations depend on.
        chunk: tokens of a document that are processed at a time, if whole documents do not fit into memory.

    Raises:
        RopeExtendError: as `Journal`.
    """

    bar: Any = None
    """Progress bar that counts documents; None for none."""

    def __init__(
        self,
        model: nn.Module,
        documents: Sequence[Document],
        config: SearchConfig,
        space: Space,
        *,
        file: Path | None = None,
        identity: Identity | None = None,
        chunk: int | None = None,
    ) -> None:
        self.model, self.config, self.space, self.chunk = model, config, space, chunk
        self.all_documents, self.documents = documents, config.documents
        self.random = random.Random(config.seed)
        """Source of all random choices of the search."""
        self.requested: set[tuple[Table, str]] = set()
        """What this search has asked for. Unlike `losses`, it is the same in a resumed search."""
        self.losses: dict[tuple[Table, str], float] = {}
        """The mean loss of each candidate on each document that was measured, such as `search 3`, in nats."""
        self._journal = Journal(
            file, identity or {}, holds="evaluations", advice=_ADVICE, check=self._keep
        )  # what is measured already

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    @property
    def passes(self) -> int:
        """Documents that this search has asked for, each counted once for each candidate."""
        return len(self.requested)

    @property
    def cost(self) -> Cost:
        """What all evaluations cost, also those before the search was resumed."""
        records = self._journal.records
        passes = sum(len(record["losses"]) for record in records)
        seconds = math.fsum(record["seconds"] for record in records)
        return Cost(len(records), passes, passes * self.config.target_length, seconds)

    def scores(self, tables: Sequence[Table], documents: int | None = None) -> list[float]:
        """The fitness of candidates, lower is better: on the first documents to search on, or on all."""
        numbers = range(min(documents or self.documents, self.documents))
        return [score(self._losses(table, SEARCH, numbers)) for table in tables]

    def ranked(self, tables: Sequence[Table], documents: int | None = None) -> list[Table]:
        """Different candidates by fitness, the best first; those with equal fitness keep their order."""
        different = list(dict.fromkeys(tables))
        scores = dict(zip(different, self.scores(different, documents), strict=True))
        return sorted(different, key=scores.__getitem__)

    def held_out(self, table: Table) -> list[float]:
        """The losses of a candidate on each of the documents that are not searched on."""
        return self._losses(table, HOLDOUT, range(len(self.all_documents) - self.documents))

    def _losses(self, table: Table, group: str, numbers: Sequence[int]) -> list[float]:
        names = [f"{group} {number}" for number in numbers]
        new = {(table, name) for name in names} - self.requested
        self.requested |= new
        missing = [number for number in numbers if (table, f"{group} {number}") not in self.losses]
        if missing:
            self._measure(table, group, missing)
        if self.bar is not None:
            self.bar.update(len(new))
        return [self.losses[table, name] for name in names]

    def _measure(self, table: Table, group: str, numbers: Sequence[int]) -> None:
        """Measure a candidate on the documents with these numbers of a group, and write the line."""
        started, space, length = time.perf_counter(), self.space, self.config.target_length
        shift = 0 if group == SEARCH else self.documents
        with (
            quiet_patching(),
            patch_model(
                self.model,
                space.encoding(table),
                trained_length=space.shape.trained_length,
                target_length=space.target_length,
            ),
        ):
            result = perplexity(
                self.model,
                [self.all_documents[shift + number] for number in numbers],
                length,
                progress=False,
                options=RunOptions(chunk=self.chunk),
            )
        sums, terms = result.document_nll[length], result.document_terms[length]
        losses = {f"{group} {number}": sums[row] / terms[row] for row, number in enumerate(numbers)}
        self.add(table, losses, time.perf_counter() - started)

    def add(self, table: Table, losses: Mapping[str, float], seconds: float) -> None:
        """Add an evaluation, and write its line; a loss that is not finite becomes infinity."""
        self._journal.append({**vars(table), "losses": plain(losses), "seconds": seconds})
        self._keep(self._journal.records[-1])  # as it will be read again

    def _keep(self, record: Mapping[str, Any]) -> None:
        table = Table(tuple(map(_number, record["divisors"])), _number(record["attention_factor"]))
        for name, value in record["losses"].items():
            self.losses[table, name] = math.inf if value is None else _number(value, -math.inf)
        _number(record["seconds"])


def _number(value: Any, minimum: float = 0) -> float:
    """A finite number; settings also take text such as 2e-4, which a journal never has."""
    require(not isinstance(value, str))
    found: float = number(minimum).parse(value)
    return found
