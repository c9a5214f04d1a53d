"""Whether a study continues the one on disk: its cells fit, and its report was made from cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.output_directory import RESULTS
from rope_extend.evaluation.perplexity_report import read_results
from rope_extend.evaluation.results import EvaluationRow, file_name
from rope_extend.journal import differences
from rope_extend.study.cells import PERPLEXITY, Cell, CellStore, row_of_cell

ADVICE = "use the arguments of that study, another output directory, or overwrite=True to replace it"


def check_resumed(directory: Path, cells: Sequence[Cell]) -> None:
    """Refuse to resume another study, or to replace a report that is not the study's.

    Args:
        directory: directory of the study.
        cells: all cells of the study that would be resumed.

    Raises:
        RopeExtendError: none of the finished cells is one of `cells`, or the report is damaged or has a row
            that was not made from finished cells.
    """
    store = CellStore(directory)
    if store.files and not any(map(store.paths, cells)):
        raise RopeExtendError(
            f"{str(directory)!r} holds a study of something else, which differs in "
            f"{_what_differs([*store.every().values()], cells)}; {ADVICE}"
        )
    unexplained = _unexplained(directory / RESULTS, store)
    if unexplained:
        raise RopeExtendError(
            f"{str(directory / RESULTS)!r} holds what the study did not measure: {', '.join(unexplained)}; "
            "use another output directory, or move the report"
        )


def _what_differs(finished: Sequence[dict[str, Any]], cells: Sequence[Cell]) -> str:
    """The smallest difference between a finished cell and one of the same kind and row."""
    labels = {cell.row.label for cell in cells}
    shared = [values for values in finished if values.get("label") in labels]
    for values in shared:
        stored = values["identity"]
        same = [cell for cell in cells if (cell.kind, cell.row.label) == (values["kind"], values["label"])]
        if same:
            nearest = min(same, key=lambda cell: len(_differing(stored, cell.identity)))
            return differences(stored, nearest.identity)
    there = sorted({str(values.get("label")) for values in finished})
    return f"its rows ({', '.join(there) or 'unreadable'} there, {', '.join(sorted(labels))} here)"


def _differing(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    return [name for name in {**stored, **current} if stored.get(name) != current.get(name)]


def _unexplained(file: Path, store: CellStore) -> list[str]:
    """Labels of the rows of a report that have a document which no finished cell of the row measured."""
    if not file.exists():
        return []
    finished = store.every()
    cells = [row_of_cell(dict(values)) for values in finished.values() if values["kind"] == PERPLEXITY]
    measured = {key for row in cells for key in _documents(row)}
    damaged = [name for name in store.files if name not in finished]  # these are measured again
    return [
        row.label
        for row in read_results(file)
        if not (keys := _documents(row))
        or not (measured >= {*keys} or any(name.startswith(_prefix(row.label)) for name in damaged))
    ]


def _prefix(label: str) -> str:
    return f"{PERPLEXITY}-{file_name(label)}-"


def _documents(row: EvaluationRow) -> list[str]:
    """The losses of a row on a document at each length, for each of its documents; its label may change."""
    by_length = row.result.document_nll or {}
    count = min(map(len, by_length.values()), default=0)
    return [
        json.dumps(sorted((length, sums[number]) for length, sums in by_length.items()))
        for number in range(count)
    ]
