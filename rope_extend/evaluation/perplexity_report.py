"""Reports of perplexity: results as JSON lines, a table, pictures, and an HTML page of all of it."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.controls import regressions
from rope_extend.evaluation.labels import distinct_labels, distinct_names
from rope_extend.evaluation.report_sections import (
    check_labels,
    control_sections,
    cost_section,
    encoding_section,
    measured_lengths,
    perplexity_section,
    position_section,
)
from rope_extend.evaluation.results import EvaluationRow, file_name, or_none
from rope_extend.files import write_text
from rope_extend.report.html import Picture, page
from rope_extend.report.versions import versions

logger = logging.getLogger(__name__)

RESULTS = "results.jsonl"
FILES = (RESULTS, "table.md", "table.csv", "perplexity.png", "loss_by_position.png", "report.html")
"""The files of a report, see `write_report`."""

LOSSES = "losses"
"""Directory of the losses by token, if they were kept."""

UNFINISHED = "unfinished"
"""Directory of the finished documents of a running evaluation; deleted when the report is written."""


def check_output(
    directory: str | Path, *, overwrite: bool = False, resume: bool = False, files: Sequence[str] = FILES
) -> Path:
    """Check that a report can be written; call it before the measurement.

    Args:
        directory: directory of the report.
        overwrite: a report in the directory may be replaced.
        resume: an interrupted evaluation in the directory will be resumed.
        files: the files that will be written.

    Raises:
        RopeExtendError: the directory is a file, holds a report and `overwrite` is not set, or holds an
            interrupted evaluation and neither `overwrite` nor `resume` is set.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise RopeExtendError(f"{str(directory)!r} is a file; a report needs a directory")
    if overwrite and resume:
        raise RopeExtendError(
            "resume continues the evaluation on disk and overwrite replaces it; choose one of them"
        )
    if (directory / UNFINISHED).exists() and not (overwrite or resume):
        raise RopeExtendError(
            f"{str(directory)!r} holds an interrupted evaluation; resume it (resume=True), or replace it "
            "(overwrite=True)"
        )
    existing = [name for name in files if (directory / name).exists()]
    if existing and not overwrite:
        raise RopeExtendError(
            f"{str(directory)!r} already holds {', '.join(existing)}; use another directory, or "
            "overwrite=True to replace them"
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
    """Write `results.jsonl`, the table as Markdown and CSV, the plots and a page; return their paths.

    Each line of `results.jsonl` holds a row's `to_dict()` and values derived from it: `intervals` of the
    perplexity by length, `buckets` of positions, `tokens_per_second`, `within_window` (the trained window,
    before and after), `losses` (the file of the losses, if they were kept) and `versions`. `report.html`
    needs no other file.

    Args:
        rows: the rows, in the order of the table.
        directory: directory of the report; made if it does not exist.
        trained_length: the pretrained window in tokens.
        title: heading of the pictures.
        overwrite: replace an older report.

    Raises:
        RopeExtendError: there are no rows, two have the same label, or `check_output` refuses the directory.
    """
    from rope_extend.plots.curves import plot_loss_by_position, plot_perplexity

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
    within = {id(regression.row): regression.to_dict() for regression in regressions(rows)}
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
    write_text(paths[0], "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
    write_text(paths[1], markdown_report(rows))
    write_text(paths[2], csv_table(rows))
    plot_perplexity(rows, trained_length, paths[3], title=title)
    plot_loss_by_position(rows, trained_length, paths[4], title=title)
    write_text(paths[5], _page(rows, title or "Perplexity by length", paths[3:5]))
    return paths + [directory / name for name in kept.values()]


def read_runs(paths: Sequence[str | Path]) -> list[EvaluationRow]:
    """The rows of several runs in one list. Equal labels get the name of their run.

    Raises:
        RopeExtendError: one of them has no results.
    """
    rows = [
        (name, row)
        for name, path in zip(distinct_names(paths), paths, strict=True)
        for row in read_results(path)
    ]
    if len({row.result.data for _, row in rows}) > 1:
        logger.warning("these rows were measured on different texts, so they cannot be compared")
    labels = distinct_labels([row.label for _, row in rows], [name for name, _ in rows])
    return [replace(row, label=label) for (_, row), label in zip(rows, labels, strict=True)]


def _derived(row: EvaluationRow) -> dict[str, Any]:
    """Values derived from a row, for other tools that read the file."""
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
    """Read the rows of a `results.jsonl`, or of the directory that holds one.

    Raises:
        RopeExtendError: there is no such file, or it holds something else.
    """
    path = Path(path)
    file = path / RESULTS if path.is_dir() else path
    if not file.is_file():
        raise RopeExtendError(
            f"no results at {str(file)!r}; give the directory of an evaluation, which has {RESULTS}"
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


def perplexity_table(rows: Sequence[EvaluationRow]) -> str:
    """Perplexity by row and length, with notes for comparing the rows."""
    return perplexity_section(rows).markdown(heading=False) + "\n"


def markdown_report(rows: Sequence[EvaluationRow]) -> str:
    """The table of perplexity, and the controls: cropped context, and the trained window."""
    parts = [perplexity_table(rows).rstrip("\n"), *(section.markdown() for section in control_sections(rows))]
    return "\n\n".join(parts) + "\n"


def csv_table(rows: Sequence[EvaluationRow]) -> str:
    """The same table in full precision; the cell of a length that was not measured is empty."""
    lengths = measured_lengths(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", *lengths])
    for row in rows:
        writer.writerow([row.label, *(row.result.ppl.get(length, "") for length in lengths)])
    return text.getvalue()


def _page(rows: Sequence[EvaluationRow], title: str, pictures: Sequence[Path]) -> str:
    """The HTML page of an evaluation."""
    first, *sections = perplexity_section(rows), *control_sections(rows)
    descriptions = ("Perplexity against length", "Loss by position")
    return page(
        title,
        ["Model: " + ", ".join(sorted({row.model for row in rows}))],
        [
            first,
            "Small: 95 % interval, by bootstrap over documents. To compare two rows, use their difference on "
            "the same documents, which is far more precise: rope-extend compare.",
            *(Picture(path, text) for path, text in zip(pictures, descriptions, strict=True)),
            *sections,
            position_section(rows),
            cost_section(rows),
            encoding_section(rows),
        ],
        versions(),
    )
