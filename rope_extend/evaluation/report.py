"""Measured rows to files: one JSON line for each row, a table to read, the pictures, and a page of it all."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rope_extend import plots
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.controls import regressions
from rope_extend.evaluation.html import Picture, page
from rope_extend.evaluation.results import EvaluationRow, file_name, or_none
from rope_extend.evaluation.sections import (
    check_labels,
    control_sections,
    cost_section,
    encoding_section,
    measured_lengths,
    perplexity_section,
    position_section,
)
from rope_extend.evaluation.versions import versions

RESULTS = "results.jsonl"
FILES = (RESULTS, "table.md", "table.csv", "perplexity.png", "loss_by_position.png", "report.html")
"""What :func:`write_report` writes."""

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
    perplexity by length, ``buckets`` of positions, ``tokens_per_second``, ``within_window`` (the trained
    window, before and after), ``losses`` (a file beside it, where they were kept) and ``versions``.
    ``report.html`` needs no other file.

    Args:
        rows: what was measured, in the order of the table.
        directory: where to; made if need be.
        trained_length: the window the model was pretrained with, in tokens.
        title: heading of the pictures.
        overwrite: replace an older report.

    Raises:
        RopeExtendError: if there are no rows, two have one label, or :func:`check_output` objects.
    """
    check_labels(rows)
    directory = check_output(directory, overwrite=overwrite, resume=not overwrite)
    rows = [replace(row, trained_length=trained_length) for row in rows]
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / name for name in FILES]
    shutil.rmtree(directory / LOSSES, ignore_errors=True)
    kept = {row.label: f"{LOSSES}/{file_name(row.label)}.npz" for row in rows if row.result.losses}
    for row in rows:
        if row.label in kept:
            row.result.write_losses(directory / kept[row.label])
    within = {id(one.row): one.to_dict() for one in regressions(rows)}
    lines = [
        {
            **row.to_dict(),
            **_derived(row),
            "within_window": within.get(id(row)),
            "losses": kept.get(row.label),
            "versions": versions(),
        }
        for row in rows
    ]
    paths[0].write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines), encoding="utf-8")
    paths[1].write_text(markdown_report(rows), encoding="utf-8")
    paths[2].write_text(csv_table(rows), encoding="utf-8")
    plots.plot_perplexity(rows, trained_length, paths[3], title=title)
    plots.plot_loss_by_position(rows, trained_length, paths[4], title=title)
    paths[5].write_text(_page(rows, title or "Perplexity by length", paths[3:5]), encoding="utf-8")
    return paths + [directory / name for name in kept.values()]


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
    return {
        "intervals": {
            length: None if ends is None or not all(map(math.isfinite, ends)) else list(ends)
            for length, ends in intervals.items()
        },
        "buckets": [bucket.to_dict() for bucket in result.buckets()],
        "tokens_per_second": or_none(result.tokens_per_second),
    }


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
    return perplexity_section(rows).markdown(heading=False) + "\n"


def markdown_report(rows: Sequence[EvaluationRow]) -> str:
    """All of :func:`markdown_table`, and the controls: context cropped, and the trained window."""
    parts = [markdown_table(rows).rstrip("\n"), *(section.markdown() for section in control_sections(rows))]
    return "\n\n".join(parts) + "\n"


def csv_table(rows: Sequence[EvaluationRow]) -> str:
    """The same table in full precision; an empty cell where a row was not measured at a length."""
    lengths = measured_lengths(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", *lengths])
    for row in rows:
        writer.writerow([row.label, *(row.result.ppl.get(length, "") for length in lengths)])
    return text.getvalue()


def _page(rows: Sequence[EvaluationRow], title: str, pictures: Sequence[Path]) -> str:
    """All there is to see of an evaluation."""
    first, *sections = perplexity_section(rows), *control_sections(rows)
    words = ("Perplexity against length", "Loss by position")
    return page(
        title,
        ["Model: " + ", ".join(sorted({row.model for row in rows}))],
        [
            first,
            "Small: 95 % interval, by bootstrap over documents. To compare two rows, their difference on the "
            "same documents says far more: rope-extend compare.",
            *(Picture(path, what) for path, what in zip(pictures, words, strict=True)),
            *sections,
            position_section(rows),
            cost_section(rows),
            encoding_section(rows),
        ],
        versions(),
    )
