"""Cells of a measurement: the smallest things that are measured, kept when they are finished, and their rows.

A cell is the perplexity of one row on one document, or the answers of one row to a batch of prompts. Each
finished cell is a line of `cells.jsonl`. It is known by a digest of all that it depends on, so a cell of
another text, adapter or setting is another line, and is not used. Finished cells are put together as rows, on
the documents and prompts that rows share.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rope_extend.checkpoint.record import Record
from rope_extend.encodings import Encoding
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import statistics
from rope_extend.evaluation.prompts import joined_fingerprint
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult, Scores
from rope_extend.journal import Identity, Journal, differences

CELLS = "cells.jsonl"
"""File of the finished cells. Its first line says which model they belong to."""
ADVICE = "use the arguments of that measurement, another output directory, or overwrite=True to replace it"

PERPLEXITY, RETRIEVAL = "perplexity", "retrieval"
"""Kinds of cells, in the order in which those of a row are measured."""

Values = Mapping[str, Any]
"""The values of a finished cell: those of its row, and what was measured."""

_PARTS = re.compile(r"cells(\.\d+)?\.jsonl")
"""Names of our files. All others belong to the user."""


@dataclass(frozen=True)
class RowSpec:
    """A row that is to be measured: the model under a method, or with an adapter.

    Attributes:
        label: name of the row; rows with different labels are different.
        source: the untrained method, or the directory of the adapter.
        encoding: its encoding; None for the checkpoint's own.
        record: that of the adapter; None for an untrained row.
        crop: number of tokens of context that the model sees; None for all.
    """

    label: str
    source: str
    encoding: Encoding | None = field(compare=False)
    record: Record | None = field(default=None, compare=False)
    crop: int | None = None

    @property
    def adapter(self) -> str | None:
        """The directory of the adapter; None for an untrained row."""
        return None if self.record is None else self.source


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Attributes:
        kind: `perplexity` or `retrieval`.
        row: the row that is measured.
        number: number of the document, or of the batch of prompts.
        round: cells of one round are measured before those of the next, so that rows stay comparable.
        work: estimated seconds, or tokens if there is no estimate.
        tokens: tokens that the model processes.
        identity: all that the result depends on besides the model, as plain JSON values.
    """

    kind: str
    row: RowSpec
    number: int
    round: int
    work: float
    tokens: int
    identity: Identity

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of all that the result depends on besides the model."""
        text = json.dumps([self.kind, self.identity], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class CellStore:
    """The finished cells of a measurement of a model, in memory and, with a directory, on disk.

    If several processes measure together, each writes a file of its own, `part` of them.
    """

    def __init__(self, directory: Path | None, model: Identity, part: int = 0) -> None:
        self.directory = directory
        name = CELLS if part == 0 else f"cells.{part}.jsonl"
        path = None if directory is None else directory / name
        self.journal = _journal(path, model)
        self.records = {record["cell"]: record for record in self.journal.records}

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """The values of a finished cell; None if it is not finished.

        The label and the adapter's directory are those of the cell, whatever they were when it was measured.
        """
        record = self.records.get(cell.digest)
        return None if record is None else {**record, "label": cell.row.label, "adapter": cell.row.adapter}

    def write(self, cell: Cell, values: Mapping[str, Any]) -> None:
        """Keep a finished cell."""
        self._add({"cell": cell.digest, "kind": cell.kind, **values, "identity": cell.identity})

    def _add(self, record: Mapping[str, Any]) -> None:
        self.journal.append(record)
        self.records[record["cell"]] = self.journal.records[-1]

    def take(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Keep the cells that other processes finished."""
        for record in records:
            if record["cell"] not in self.records:
                self._add(record)

    def take_parts(self) -> None:
        """Take over the files of other processes, also of an interrupted measurement, and delete them."""
        for path in [] if self.directory is None else our_parts(self.directory):
            if path.name != CELLS:
                with _journal(path, self.journal.identity) as part:
                    self.take(part.records)
                path.unlink()

    def close(self) -> None:
        """Close the file; the cells stay in memory."""
        self.journal.close()


def _journal(path: Path | None, model: Identity) -> Journal:
    return Journal(path, model, holds="measurements", advice=ADVICE, check=_check)


def _check(record: Mapping[str, Any]) -> None:
    """Refuse what is no finished cell: the values of one make a row."""
    row = row_of(record)
    whole = isinstance(record["cell"], str) and isinstance(record["identity"], dict)
    if record["kind"] == PERPLEXITY:
        result = row.result
        whole &= result.block_nll.size > 0 and result.documents == 1
        whole &= result.document_nll.keys() == result.ppl.keys()
    if not whole or any(type(trial["trial"]) is not int for trial in record.get("trials", ())):
        raise ValueError("no finished cell")


def check_resumed(store: CellStore, cells: Iterable[Cell]) -> None:
    """Refuse to add cells to a measurement that has none of them."""
    cells = list(cells)
    if store.records and not any(cell.digest in store.records for cell in cells):
        raise RopeExtendError(
            f"{str(store.directory)!r} holds a measurement of something else, which differs in "
            f"{_what_differs([*store.records.values()], cells)}; {ADVICE}"
        )


def _what_differs(finished: Iterable[dict[str, Any]], cells: Iterable[Cell]) -> str:
    """The smallest difference between a finished cell and one of the same kind and row."""
    pairs = [
        differences(record["identity"], cell.identity)
        for record in finished
        for cell in cells
        if (cell.kind, cell.row.label) == (record["kind"], record.get("label"))
    ]
    return min((pair for pair in pairs if pair), key=len, default="its rows")


def finished_in(directory: str | Path) -> set[str]:
    """The digests of the finished cells in a directory, without a lock; damaged lines are left out."""
    found = set()
    for path in our_parts(directory):
        with suppress(OSError):
            for line in path.read_bytes().splitlines():
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    found.add(str(json.loads(line)["cell"]))
    return found


def our_parts(directory: str | Path) -> list[Path]:
    """The files of finished cells in a directory."""
    return sorted(path for path in Path(directory).glob("cells*.jsonl") if _PARTS.fullmatch(path.name))


def row_of(cell: Values) -> EvaluationRow:
    """A finished cell as a row: of one document, or of some prompts; any error if it is none."""
    if cell["kind"] == PERPLEXITY:
        return EvaluationRow.from_dict(cell)
    trials = sorted(cell["trials"], key=lambda trial: trial["trial"])
    scores = [{**trial, "scores": [trial["score"]], "data": trial["prompt"]} for trial in trials]
    return EvaluationRow.from_dict({**cell, "retrieval": {**cell, "cells": scores}})


def collect(cells: Iterable[Values], labels: Sequence[str]) -> list[EvaluationRow]:
    """Put finished cells together as rows, on the documents that all of them have.

    Documents are known by their tokens: two files of one name in two folders are two documents. A row is left
    out if the others would share less than half of their documents with it. If no row has a document, those
    that answered prompts are the rows. `labels` are those of the rows, in order.
    """
    scored: dict[str, dict[str, PerplexityResult]] = {}
    answered: dict[str, list[RetrievalResult]] = {}
    about: dict[str, EvaluationRow] = {}
    for cell in sorted(cells, key=_trial):
        row = about[cell["label"]] = row_of(cell)
        if row.result:
            scored.setdefault(row.label, {})[row.result.data] = row.result
        else:
            answered.setdefault(row.label, []).append(row.retrieval)
    ranked = [label for label in labels if label in scored]
    ranked.sort(key=lambda label: len(scored[label]), reverse=True)
    begun, shared = list[str](), list[str]()
    for n in range(len(ranked), 0, -1):
        rows = [scored[label] for label in ranked[:n]]
        shared = [data for data in rows[0] if all(data in row for row in rows)]
        if 2 * len(shared) >= len(rows[0]):
            begun = [label for label in labels if label in ranked[:n]]
            break
    return [
        replace(
            about[label],
            result=merged([scored[label][data] for data in shared]) if begun else PerplexityResult(),
            retrieval=_merged_answers(answered.get(label, [])),
        )
        for label in begun or [label for label in labels if label in answered]
    ]


def _trial(cell: Values) -> int:
    """The number of the first trial of a cell; cells of documents stay in their order."""
    return min((trial["trial"] for trial in cell.get("trials", ())), default=0)


def merged(results: Sequence[PerplexityResult]) -> PerplexityResult:
    """One result from results on one document each, of the same model and lengths.

    Sums are over documents in order, as in a measurement of all of them together.
    """
    if len(results) < 2:
        return results[0] if results else PerplexityResult()
    first = results[0]
    layouts = [(each.measured_by, each.ppl.keys(), each.block_edges.tolist()) for each in results]
    if any(layout != layouts[0] for layout in layouts):
        raise RopeExtendError(
            "a row was measured by two protocols, or in different blocks of tokens, as by two versions of "
            "rope_extend; delete the finished cells of one of them"
        )
    nll = {length: [result.document_nll[length][0] for result in results] for length in first.ppl}
    terms = {length: [result.document_terms[length][0] for result in results] for length in first.ppl}
    return replace(
        first,
        ppl={length: statistics.ppl(sum(nll[length]) / sum(terms[length])) for length in first.ppl},
        tokens={length: sum(result.tokens[length] for result in results) for length in first.ppl},
        block_nll=np.concatenate([result.block_nll for result in results]),
        block_terms=np.concatenate([result.block_terms for result in results]),
        documents=len(results),
        data=joined_fingerprint(result.data for result in results),
        document_nll=nll,
        document_terms=terms,
        **_cost(results),
    )


def _merged_answers(parts: Sequence[RetrievalResult]) -> RetrievalResult:
    """One result from the answers to a few prompts each, in order."""
    if not parts:
        return RetrievalResult()
    groups: dict[tuple[str, int, float | None], list[Scores]] = {}
    for part in parts:
        for each in part.cells:
            groups.setdefault((each.task, each.length, each.depth), []).append(each)
    cells = tuple(
        replace(
            group[0],
            scores=tuple(score for each in group for score in each.scores),
            data=joined_fingerprint(str(each.data) for each in group),
        )
        for group in groups.values()
    )
    return RetrievalResult(cells, parts[0].crop, **_cost(parts))


def _cost(parts: Sequence[PerplexityResult] | Sequence[RetrievalResult]) -> dict[str, Any]:
    """The cost of several parts together."""
    return {
        "forward_tokens": sum(part.forward_tokens for part in parts),
        "seconds": sum(part.seconds for part in parts),
        "peak_memory_bytes": max(part.peak_memory_bytes for part in parts),
    }
