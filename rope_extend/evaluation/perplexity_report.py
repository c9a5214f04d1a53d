"""Reports of perplexity: results as JSON lines, a table, pictures, and an HTML page of all of it."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.controls import against_cropped, regressions
from rope_extend.evaluation.labels import distinct_labels, distinct_names
from rope_extend.evaluation.output_directory import (
    FILES,
    LOSSES,
    RESULTS,
    check_files,
    losses_in,
    remove_losses,
)
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
from rope_extend.evaluation.retrieval_report import heat_maps, retrieval_sections
from rope_extend.evaluation.samples import sample_parts
from rope_extend.evaluation.verdicts import verdict_sentences
from rope_extend.files import replacing_files, write_text
from rope_extend.report.page import Part, page, picture
from rope_extend.report.tables import Code, Sentences, public_name, writable
from rope_extend.report.versions import versions

logger = logging.getLogger(__name__)


def write_report(
    rows: Sequence[EvaluationRow],
    directory: str | Path,
    *,
    trained_length: int,
    title: str | None = None,
    overwrite: bool = False,
    lead: Sequence[Sentences] = (),
    made_by: Sequence[Code] = (),
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
        lead: what the table and the page begin with.
        made_by: the commands that made the report, with which the table and the page end.

    Raises:
        RopeExtendError: there are no rows, two have the same label, or `check_files` refuses the directory.
    """
    from rope_extend.plots.curves import plot_loss_by_position, plot_perplexity

    check_labels(rows)
    kept = {row.label: f"{LOSSES}/{file_name(row.label)}.npz" for row in rows if row.result.losses}
    directory = check_files(directory, (*FILES, *kept.values()), overwrite=overwrite)
    rows = [replace(row, trained_length=trained_length) for row in rows]
    earlier = losses_in(directory)
    with replacing_files(directory, last=RESULTS) as partial:
        for row in rows:
            if row.label in kept:
                row.result.write_losses(partial / kept[row.label])
        results, table, data, curve, positions, html = (partial / name for name in FILES)
        write_text(results, _lines(rows, kept))
        parts = [part.markdown() for part in (*sample_parts(rows), *made_by)]
        head = "".join(f"{part.markdown()}\n\n" for part in lead)
        text = head + markdown_report(rows) + "".join(f"\n{part}\n" for part in parts)
        write_text(table, writable(text))
        write_text(data, writable(csv_table(rows)))
        shown = [replace(row, label=writable(row.label)) for row in rows]
        plot_perplexity(shown, trained_length, curve, title=title)
        plot_loss_by_position(shown, trained_length, positions, title=title)
        write_text(html, _page(shown, title or "Perplexity by length", lead, made_by))
    remove_losses(directory, earlier - {*kept.values()})
    return [directory / name for name in (*FILES, *kept.values())]


def _lines(rows: Sequence[EvaluationRow], losses: Mapping[str, str]) -> str:
    """The text of `results.jsonl`; `losses` has the file of a row's losses, if they were kept, by label."""
    within = {id(regression.row): regression.to_dict() for regression in regressions(rows)}
    lines = [
        {
            **row.to_dict(),
            **_derived(row),
            "within_window": within.get(id(row)),
            "losses": losses.get(row.label),
            "versions": versions(),
        }
        for row in rows
    ]
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


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
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):  # JSON decodes each line
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
    """The verdicts, the table of perplexity, and the controls: cropped context, and the trained window."""
    said = verdict_sentences(rows)
    parts = [] if said is None else [said.markdown()]
    parts += [perplexity_table(rows).rstrip("\n"), *(part.markdown() for part in control_sections(rows))]
    return "\n\n".join(parts) + "\n"


def card_results(rows: Sequence[EvaluationRow]) -> dict[str, Any]:
    """The tables and the picture of an evaluation, as arguments of `checkpoint.card.write_card`.

    Raises:
        RopeExtendError: the rows do not state the trained window.
    """
    from rope_extend.plots.curves import plot_perplexity

    trained = next((row.trained_length for row in rows if row.trained_length), None)
    if trained is None:
        raise RopeExtendError("the results do not state the trained window; evaluate again")
    retrieved = [row.retrieval for row in rows if row.retrieval is not None]
    tables = [perplexity_table(rows).rstrip("\n")]
    tables += [section.markdown() for section in retrieval_sections(retrieved)]
    return {
        "results": "\n\n".join(tables) + "\n",
        "draw": lambda path: plot_perplexity(rows, trained, path),
    }


def csv_table(rows: Sequence[EvaluationRow]) -> str:
    """The same table in full precision; the cell of a length that was not measured is empty."""
    lengths = measured_lengths(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", *lengths])
    for row in rows:
        writer.writerow([row.label, *(row.result.ppl.get(length, "") for length in lengths)])
    return text.getvalue()


def _page(
    rows: Sequence[EvaluationRow], title: str, lead: Sequence[Sentences], made_by: Sequence[Code]
) -> str:
    """The HTML page: the verdicts and what they rest on, curves, tables, samples of text, and commands."""
    from rope_extend.plots.curves import plot_loss_by_position, plot_perplexity, plot_ratio

    trained = rows[0].trained_length
    said, gains = verdict_sentences(rows), against_cropped(rows)
    answers: list[Part] = [*lead, *([] if said is None else [said])]
    if gains:
        heading = f"Perplexity divided by that of {gains[0].first.label}"
        answers.append(picture(heading, plot_ratio, gains))
    return page(
        title,
        ["Model: " + ", ".join(sorted({public_name(row.model) for row in rows}))],
        [
            *answers,
            picture("Perplexity by length", plot_perplexity, rows, trained),
            picture("Loss by position", plot_loss_by_position, rows, trained),
            perplexity_section(rows),
            "Small: 95 % interval, Student's t over documents. To compare two rows, use their "
            "difference on the same documents, which is far more precise: rope-extend compare.",
            *control_sections(rows),
            *heat_maps([row.retrieval for row in rows if row.retrieval is not None]),
            position_section(rows),
            cost_section(rows),
            encoding_section(rows),
            *sample_parts(rows),
            *made_by,
        ],
        versions(),
    )
