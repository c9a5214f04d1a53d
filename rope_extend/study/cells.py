"""Cells of a study: the smallest things that are measured, and the files in which finished ones are kept.

A cell is the perplexity of one row on one document, or the answer of one row to one prompt. A finished cell
is a JSON file whose name has a digest of all that the measurement depends on. So a cell of another model,
text or setting is another file: it is neither used nor overwritten. The row's label is in the name too, but a
cell is found under any label, because that of an adapter depends on the other adapters.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult, file_name
from rope_extend.files import PARTIAL, write_json
from rope_extend.journal import Identity

FOLDER = "cells"
"""Folder of the finished cells in the directory of a study."""
PERPLEXITY, RETRIEVAL = "perplexity", "retrieval"
BIN = 128
"""Positions whose mean loss is kept together."""

_FILE = re.compile(rf"({PERPLEXITY}|{RETRIEVAL})-[A-Za-z0-9-]+-[0-9a-f]{{16}}\.json")
_PARTIAL = re.compile(rf"\.({PERPLEXITY}|{RETRIEVAL})-.*\.[0-9a-f]{{8}}{re.escape(PARTIAL)}")
"""Names of the files of cells. All other files in the folder belong to the user."""


@dataclass(frozen=True)
class StudyRow:
    """A row of a study.

    Attributes:
        label: its name in tables.
        method: the untrained method; None for an adapter.
        adapter: the directory of the adapter; None for an untrained row.
        crop: number of tokens of context that the model sees; None for all.
    """

    label: str
    method: str | None = None
    adapter: str | None = None
    crop: int | None = None


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Attributes:
        kind: `perplexity` or `retrieval`.
        row: the row that is measured.
        number: number of the document, or of the prompt.
        round: cells of one round are measured before those of the next, so that rows stay comparable.
        work: estimated operations.
        identity: all that the result depends on, as plain JSON values.
    """

    kind: str
    row: StudyRow
    number: int
    round: int
    work: float
    identity: Identity

    @property
    def file(self) -> str:
        """Name of the cell's file."""
        return f"{self.kind}-{file_name(self.row.label)}-{self.digest}.json"

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of all that the result depends on."""
        text = json.dumps(self.identity, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class CellStore:
    """The finished cells of a study, one JSON file each.

    Args:
        directory: directory of the study; made when the first cell is finished.
    """

    def __init__(self, directory: str | Path) -> None:
        self.folder = Path(directory) / FOLDER

    @property
    def files(self) -> list[str]:
        """Names of the files of finished cells, sorted; files of other names are not ours."""
        return sorted(path.name for path in self._ours(_FILE))

    def every(self) -> dict[str, dict[str, Any]]:
        """The values of all finished cells by file, also of another study; damaged ones are left out."""
        found = {}
        for name in self.files:
            with suppress(OSError, ValueError):
                found[name] = json.loads((self.folder / name).read_text(encoding="utf-8"))
        known = {"kind", "label", "identity"}
        return {name: one for name, one in found.items() if isinstance(one, dict) and known <= one.keys()}

    def remove(self) -> None:
        """Delete the finished cells, and the folder if it is empty then."""
        for path in (*self._ours(_FILE), *self._ours(_PARTIAL)):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # there is none, or it has files of other people
            self.folder.rmdir()

    def _ours(self, name: re.Pattern[str]) -> list[Path]:
        return [path for path in self.folder.glob("*") if name.fullmatch(path.name) and not path.is_dir()]

    def has(self, cell: Cell) -> bool:
        """Whether a cell is finished."""
        return self.read(cell) is not None

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """The values of a finished cell; None if it is not finished, or its file is damaged.

        The label and the adapter's directory are those of the cell, whatever they were when it was measured.
        """
        for path in self.paths(cell):
            with suppress(OSError, ValueError):
                values = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(values, dict) and values.get("identity") == cell.identity:
                    return {**values, "label": cell.row.label, "adapter": cell.row.adapter}
        return None

    def paths(self, cell: Cell) -> list[Path]:
        """The files of a cell that exist: that of its label first, and those of earlier labels."""
        own = self.folder / cell.file
        if own.exists():
            return [own]
        named = sorted(self.folder.glob(f"{cell.kind}-*-{cell.digest}.json"))
        return [path for path in named if _FILE.fullmatch(path.name) and not path.is_dir()]

    def write(self, cell: Cell, values: dict[str, Any]) -> None:
        """Keep a finished cell."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plain = {"kind": cell.kind, **values, "identity": cell.identity}
        write_json(self.folder / cell.file, plain, indent=0)


def perplexity_values(row: EvaluationRow, document: str) -> dict[str, Any]:
    """The values of a cell of perplexity, for JSON: the row, with the mean loss of each few positions.

    Args:
        row: the row on one document.
        document: name of the document.
    """
    values = row.to_dict()
    result = values["result"]
    result["bin"] = bin_of(len(row.result.nll_by_position) + 1)
    result["nll_by_position"] = binned(row.result, result["bin"])
    return {"document": document, **values}


def bin_of(length: int) -> int:
    """How many positions share a mean: `BIN` or fewer, so that the ranges of a report begin where a bin does.

    These ranges double, from a 128th of the length on. Lengths that have no 128th keep all positions.
    """
    if length % 128:
        return 1
    width = length // 128
    while width > BIN and width % 2 == 0:
        width //= 2
    return width


def binned(result: PerplexityResult, width: int = BIN) -> list[float | None]:
    """The mean loss of the targets in each range of `width` positions, `[ceil(length / width)]` in nats."""
    nll = result.nll_by_position
    edges = [0, *range(width - 1, len(nll), width)]  # the first target is at position 1
    means = [float(np.mean(part)) for part in np.split(nll, edges[1:])]
    return [round(mean, 5) if np.isfinite(mean) else None for mean in means]


def unbinned(means: Sequence[float | None], length: int, width: int = BIN) -> list[float | None]:
    """A loss for each of `length - 1` targets from the means of their ranges."""
    return [means[(position + 1) // width] for position in range(length - 1)]


def row_of_cell(values: dict[str, Any]) -> EvaluationRow:
    """The row of a cell of perplexity."""
    result = dict(values["result"])
    longest = max(int(length) for length in result["ppl"])
    width = result.pop("bin", BIN)  # cells of earlier versions do not state it
    result["nll_by_position"] = unbinned(result["nll_by_position"], longest, width)
    return EvaluationRow.from_dict({**values, "result": result})


def retrieval_values(trial: int, result: RetrievalResult) -> dict[str, Any]:
    """The values of a cell of retrieval, for JSON: the number of the trial, and its result."""
    return {"trial": trial, **result.to_dict()}
