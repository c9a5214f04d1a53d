"""Cells of a measurement: the smallest things that are measured, and where finished ones are kept.

A cell is the perplexity of one row on one document, or the answers of one row to a batch of prompts. Each
finished cell is a line of `cells.jsonl`. It is known by a digest of all that it depends on, so a cell of
another text, adapter or setting is another line, and is not used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rope_extend.checkpoint.record import Record
from rope_extend.encodings import Encoding
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.collecting import PERPLEXITY, row_of
from rope_extend.journal import Identity, Journal, differences

CELLS = "cells.jsonl"
"""File of the finished cells. Its first line says which model they belong to."""
ADVICE = "use the arguments of that measurement, another output directory, or overwrite=True to replace it"

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
    """The finished cells of a measurement, in memory and on disk.

    Args:
        directory: directory of the measurement; None keeps the cells in memory.
        model: identity of the model.
        part: number of the process, if several measure together. Each writes a file of its own.
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
