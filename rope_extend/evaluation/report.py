"""Measured rows to files: one JSON line for each row, a table to read, the pictures, and a page of it all."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rope_extend import plots
from rope_extend.data import format_length
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import Comparison, comparison_table
from rope_extend.evaluation.html import Regression, page
from rope_extend.evaluation.protocols import PROTOCOLS
from rope_extend.evaluation.results import EvaluationRow, file_name

RESULTS = "results.jsonl"
FILES = (RESULTS, "table.md", "table.csv", "perplexity.png", "loss_by_position.png", "report.html")
"""What :func:`write_report` writes."""

COMPARISON = ("comparison.md", "comparison.png")
"""What :func:`write_comparison` writes."""

LOSSES = "losses"
"""Directory of the losses by token, where they were kept."""

UNFINISHED = "unfinished"
"""Directory of the documents that are done, while an evaluation runs; it goes when the report is written."""


def check_output(
    directory: str | Path, *, overwrite: bool = False, resume: bool = False, files: Sequence[str] = FILES
) -> Path:
    """Make sure that a report can be written; call it before the measurement, not after it.

    Args:
        directory: where to.
        overwrite: what is there may be replaced.
        resume: an interrupted evaluation that is there will be gone on with.
        files: what would be written.

    Raises:
        RopeExtendError: if the directory holds a report already and ``overwrite`` is not given, holds an
            interrupted evaluation and neither is, or is a file.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise RopeExtendError(f"{str(directory)!r} is a file; a report needs a directory")
    if overwrite and resume:
        raise RopeExtendError("resume goes on with what is there and overwrite replaces it; give one of them")
    if (directory / UNFINISHED).exists() and not (overwrite or resume):
        raise RopeExtendError(
            f"{str(directory)!r} holds an interrupted evaluation; resume it (--resume), or overwrite it "
            "(--overwrite)"
        )
    found = [name for name in files if (directory / name).exists()]
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
    """Write ``results.jsonl``, the table as Markdown and CSV, the plots and a page; return their paths.

    Each line of ``results.jsonl`` holds a row's ``to_dict()`` and what follows from it: ``intervals`` of the
    perplexity by length, ``buckets`` of positions, ``tokens_per_second``, ``losses`` (a file beside it, where
    they were kept) and ``versions``. ``report.html`` needs no other file.

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
    directory = check_output(directory, overwrite=overwrite, resume=not overwrite)
    rows = [replace(row, trained_length=trained_length) for row in rows]
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / name for name in FILES]
    shutil.rmtree(directory / LOSSES, ignore_errors=True)
    kept = {row.label: f"{LOSSES}/{file_name(row.label)}.npz" for row in rows if row.result.losses}
    for row in rows:
        if row.label in kept:
            row.result.write_losses(directory / kept[row.label])
    packages = ("rope_extend", "torch", "transformers", "numpy")
    versions = {"python": platform.python_version(), **{name: _version(name) for name in packages}}
    lines = [
        {**row.to_dict(), **_derived(row), "losses": kept.get(row.label), "versions": versions}
        for row in rows
    ]
    paths[0].write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines), encoding="utf-8")
    paths[1].write_text("\n".join([markdown_table(rows), *short_context_table(rows)]), encoding="utf-8")
    paths[2].write_text(csv_table(rows), encoding="utf-8")
    plots.plot_perplexity(rows, trained_length, paths[3], title=title)
    plots.plot_loss_by_position(rows, trained_length, paths[4], title=title)
    whole = page(
        rows, title=title or "Perplexity by length", notes=_notes(rows), regressions=regressions(rows),
        pictures=paths[3:5], versions=versions, number=_number,
    )  # fmt: skip
    paths[5].write_text(whole, encoding="utf-8")
    return paths + [directory / name for name in kept.values()]


def write_comparison(
    comparisons: Sequence[Comparison],
    directory: str | Path,
    *,
    trained_length: int,
    overwrite: bool = False,
) -> list[Path]:
    """Write the table of :func:`comparison_table` and the picture of both curves; return their paths.

    Raises:
        RopeExtendError: if there are no pairs, or :func:`check_output` objects.
    """
    directory = check_output(directory, overwrite=overwrite, resume=not overwrite, files=COMPARISON)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / name for name in COMPARISON]
    plots.plot_comparison(comparisons, trained_length, paths[1])
    paths[0].write_text(comparison_table(comparisons), encoding="utf-8")
    return paths


def read_runs(paths: Sequence[str | Path]) -> list[EvaluationRow]:
    """The rows of several runs in one list; where labels are equal, the run's directory is added to them.

    Raises:
        RopeExtendError: one of them has no results.
    """
    runs = [(Path(path), read_results(path)) for path in paths]
    labels = [row.label for _, rows in runs for row in rows]
    return [
        replace(row, label=f"{row.label} ({run_name(path)})") if labels.count(row.label) > 1 else row
        for path, rows in runs
        for row in rows
    ]


def run_name(path: str | Path) -> str:
    """What a run is called: its directory."""
    path = Path(path)
    return path.parent.name if path.name == RESULTS else path.resolve().name


def _derived(row: EvaluationRow) -> dict[str, Any]:
    """What follows from a row's numbers, for those who read the file with other tools."""
    result = row.result
    intervals = {str(length): result.interval(length) for length in result.ppl}
    speed = result.tokens_per_second
    return {
        "intervals": {
            length: None if ends is None or not all(map(math.isfinite, ends)) else list(ends)
            for length, ends in intervals.items()
        },
        "buckets": [bucket.to_dict() for bucket in result.buckets()],
        "tokens_per_second": speed if math.isfinite(speed) else None,
    }


def regressions(rows: Sequence[EvaluationRow]) -> list[Regression]:
    """What extending costs within the trained window: each other row's perplexity there, and plain RoPE's.

    Before is the first untrained row of plain RoPE, cropped or not, as both read the same within the window;
    else the model as it is. Without such a row, or any other on the same text, there is none.
    """
    trained = rows[0].trained_length if rows else None
    untrained = [row for row in rows if row.adapter is None and row.method == "none"]
    plain = [row for row in untrained if row.encoding is not None] or untrained
    before = _within(plain[0], trained) if plain and trained is not None else None
    if trained is None or before is None:
        return []
    base = plain[0].result
    protocol = "prefix" if base.protocol == "cropped" else base.protocol
    found = [
        (row, _within(row, trained))
        for row in rows
        if row not in plain and row.result.protocol == protocol and row.result.data == base.data
    ]
    return [Regression(row, after, before, plain[0].label) for row, after in found if after is not None]


def _within(row: EvaluationRow, trained: int) -> float | None:
    """Perplexity within the trained window: as read at it, where it was; else from the longest pass."""
    if trained in row.result.ppl:
        return row.result.ppl[trained]
    try:
        return row.result.within(trained)
    except RopeExtendError:
        return None


def short_context_table(rows: Sequence[EvaluationRow]) -> list[str]:
    """Markdown lines: perplexity within the trained window, before and after; none where nothing changed."""
    found = regressions(rows)
    if not found:
        return []
    trained = rows[0].trained_length
    assert trained is not None
    return [
        f"Within the trained window of {format_length(trained)}, against {found[0].against}:",
        "",
        "|  | before | after | ratio |",
        "|--|-------:|------:|------:|",
        *(
            f"| {row.label} | {_number(before)} | {_number(after)} | {after / before:.3f} |"
            for row, after, before, _ in found
        ),
        "",
    ]


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
    what = f"of {first.documents} documents, token-weighted (text {first.data})."
    if first.protocol in ("prefix", "cropped"):
        notes = [f"Perplexity over the first N tokens of each {what}"]
    else:
        rule = PROTOCOLS[first.protocol]
        settings = {"stride": first.stride, "last": first.last}
        words = "".join(f", {name} {value}" for name, value in settings.items() if value is not None)
        notes = [
            f"Perplexity {what.replace(', token-weighted', '') if rule.average == 'window' else what}",
            f"Protocol {first.protocol}{words}. {rule.measures} But: {rule.flaw}",
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
