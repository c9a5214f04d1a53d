"""Measured rows to files: one JSON line for each row, a table to read, and the pictures."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rope_extend import plots
from rope_extend.data import format_length
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.perplexity import EvaluationRow

RESULTS = "results.jsonl"
FILES = (RESULTS, "table.md", "table.csv", "perplexity.png", "loss_by_position.png")
"""What :func:`write_report` writes."""


def check_output(directory: str | Path, *, overwrite: bool = False) -> Path:
    """Make sure that a report can be written; call it before the measurement, not after it.

    Raises:
        RopeExtendError: if the directory holds a report already and ``overwrite`` is not given, or is a file.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise RopeExtendError(f"{str(directory)!r} is a file; a report needs a directory")
    found = [name for name in FILES if (directory / name).exists()]
    if found and not overwrite:
        raise RopeExtendError(
            f"{str(directory)!r} already holds {', '.join(found)}; give another directory, or overwrite=True "
            "to replace them"
        )
    return directory


def write_report(
    rows: Sequence[EvaluationRow],
    directory: str | Path,
    *,
    trained_length: int,
    title: str | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write ``results.jsonl``, the table as Markdown and CSV, and the plots; return their paths.

    Args:
        rows: what was measured, in the order of the table.
        directory: where to; made if need be.
        trained_length: the window the model was pretrained with, in tokens.
        title: heading of the pictures.
        overwrite: replace an older report.

    Raises:
        RopeExtendError: if there are no rows, two have one label, or :func:`check_output` objects.
    """
    _check_labels(rows)
    directory = check_output(directory, overwrite=overwrite)
    rows = [replace(row, trained_length=trained_length) for row in rows]
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / name for name in FILES]
    versions = {name: _version(name) for name in ("rope_extend", "torch", "transformers")}
    lines = [json.dumps({**row.to_dict(), "versions": versions}, allow_nan=False) + "\n" for row in rows]
    paths[0].write_text("".join(lines), encoding="utf-8")
    paths[1].write_text(markdown_table(rows), encoding="utf-8")
    paths[2].write_text(csv_table(rows), encoding="utf-8")
    plots.plot_perplexity(rows, trained_length, paths[3], title=title)
    plots.plot_loss_by_position(rows, trained_length, paths[4], title=title)
    return paths


def read_results(path: str | Path) -> list[EvaluationRow]:
    """Read the rows of a ``results.jsonl``, or of the directory that holds one.

    Raises:
        RopeExtendError: if there is no such file, or it holds something else.
    """
    path = Path(path)
    file = path / RESULTS if path.is_dir() else path
    if not file.is_file():
        raise RopeExtendError(
            f"no results at {str(file)!r}; an evaluation writes {RESULTS} into its directory"
        )
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(EvaluationRow.from_dict(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise RopeExtendError(
                f"line {number} of {str(file)!r} is not a row of results: {type(error).__name__}: {error}"
            ) from error
    return rows


def markdown_table(rows: Sequence[EvaluationRow]) -> str:
    """Perplexity by row and length, with what one must know to compare the rows written beneath."""
    _check_labels(rows)
    lengths = _lengths(rows)
    lines = [["", *map(format_length, lengths)]]
    lines += [[row.label, *(_number(row.result.ppl.get(length)) for length in lengths)] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]])
    table = [
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
        for line in lines
    ]
    return "\n".join([*table, "", *_notes(rows)]) + "\n"


def csv_table(rows: Sequence[EvaluationRow]) -> str:
    """The same table in full precision; an empty cell where a row was not measured at a length."""
    lengths = _lengths(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", *lengths])
    for row in rows:
        writer.writerow([row.label, *(row.result.ppl.get(length, "") for length in lengths)])
    return text.getvalue()


def _notes(rows: Sequence[EvaluationRow]) -> list[str]:
    first = rows[0].result
    notes = [
        f"Perplexity over the first N tokens of each of {first.documents} documents, token-weighted "
        f"(text {first.data})."
    ]
    if rows[0].trained_length is not None:
        notes.append(f"Trained window: {rows[0].trained_length} tokens.")
    for row in rows:
        result = row.result
        if result.protocol == "cropped":
            notes.append(f"{row.label}: the model sees {result.window} tokens at a time (protocol cropped).")
        if result.passes > 1:
            notes.append(f"{row.label}: tables depend on the length, so {result.passes} passes per document.")
        if result.data != first.data:
            notes.append(f"{row.label}: measured on other text ({result.data}); DO NOT COMPARE.")
    return [f"- {note}" for note in notes]


def _check_labels(rows: Sequence[EvaluationRow]) -> None:
    labels = [row.label for row in rows]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if not labels or twice:
        raise RopeExtendError(
            f"rows with the same label cannot be told apart: {', '.join(twice)}"
            if labels
            else "no rows to report"
        )


def _lengths(rows: Sequence[EvaluationRow]) -> list[int]:
    return sorted({length for row in rows for length in row.result.ppl})


def _number(value: float | None) -> str:
    """Three to five digits: 9.87, 98.7, 987, 9,877."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{2 if value < 20 else 1 if value < 200 else 0}f}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
