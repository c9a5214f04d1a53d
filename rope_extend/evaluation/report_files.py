"""The files of a report: written together, read back with a check of every line, and compared in pairs."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import Comparison, compare, pairs, regressions
from rope_extend.evaluation.labels import distinct_labels, distinct_names
from rope_extend.evaluation.output_directory import FILES, PROMPTS, RESULTS, TABLE, check_files
from rope_extend.evaluation.prompts import Prompt
from rope_extend.evaluation.report_parts import (
    comparison_parts,
    perplexity_section,
    report_parts,
    retrieval_sections,
    table_parts,
    tasks_of,
)
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.evaluation.statistics import plain
from rope_extend.evaluation.verdicts import verdict_sentences
from rope_extend.files import replacing_files, write_text
from rope_extend.report.page import Part, Picture, markdown, write_pages
from rope_extend.report.tables import writable
from rope_extend.report.versions import versions

logger = logging.getLogger(__name__)

COMPARISON = "comparison.md"
TITLE = "Perplexity and retrieval by length"


def write_report(
    rows: Sequence[EvaluationRow],
    directory: str | Path,
    *,
    title: str = TITLE,
    overwrite: bool = False,
    lead: Sequence[Part] = (),
    end: Sequence[Part] = (),
    prompts: Sequence[Prompt] = (),
) -> list[Path]:
    """Write `results.jsonl`, `table.csv`, `report.md`, `report.html` and the pictures; return their paths.

    Each line of `results.jsonl` holds a row's `to_dict()` and values derived from it: `intervals` of the
    perplexity by length, `within_window` (the trained window, compared with plain RoPE) and `versions`.
    `report.html` needs no other file.

    Args:
        rows: the rows, in the order of the table.
        directory: directory of the report; made if it does not exist.
        title: heading of the report.
        overwrite: replace an older report.
        lead: parts that come first.
        end: parts that come last.
        prompts: the prompts of all rows, for `prompts.jsonl`.

    Raises:
        RopeExtendError: there are no rows, two have the same label, or `check_files` refuses the directory.
    """
    labels = [row.label for row in rows]
    if not rows or len({*labels}) < len(labels):
        twice = sorted({label for label in labels if labels.count(label) > 1})
        raise RopeExtendError(
            f"rows with the same label cannot be told apart: {', '.join(twice)}; give each a label of its own"
            if rows
            else "no rows to report; measure at least one"
        )
    directory = check_files(directory, FILES, overwrite=overwrite)
    shown = [replace(row, label=writable(row.label)) for row in rows]
    with replacing_files(directory, last=RESULTS) as partial_files:
        write_text(partial_files / RESULTS, _lines(rows))
        write_text(partial_files / TABLE, writable(csv_table(rows)))
        lines = [json.dumps(prompt.to_dict(), ensure_ascii=False) + "\n" for prompt in prompts]
        if lines:
            write_text(partial_files / PROMPTS, "".join(lines))
        names = [RESULTS, TABLE, *([PROMPTS] if lines else [])]
        names += write_pages(partial_files, title, [*lead, *report_parts(shown), *end])
    for name in {*FILES} - {*names}:  # of an earlier report
        (directory / name).unlink(missing_ok=True)
    return [directory / name for name in names]


def _lines(rows: Sequence[EvaluationRow]) -> str:
    """The text of `results.jsonl`."""
    within = {id(pair.second): pair.to_dict() for pair in regressions(rows)}
    lines = []
    for row in rows:
        derived = {
            "intervals": {length: row.result.interval(length) for length in row.result.ppl},
            "within_window": within.get(id(row)),
            "versions": versions(),
        }
        lines.append(json.dumps({**row.to_dict(), **plain(derived)}, allow_nan=False) + "\n")
    return "".join(lines)


def csv_table(rows: Sequence[EvaluationRow]) -> str:
    """Perplexities and shares of solved trials in full precision, one line for each row and length."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "measured", "length", "value", "low", "high", "of"])
    for row in rows:
        for length, value in row.result.ppl.items():
            ends = row.result.interval(length) or ("", "")
            writer.writerow([row.label, "perplexity", length, value, *ends, row.result.documents])
        for task in row.retrieval.tasks:
            for length in row.retrieval.lengths(task):
                if rate := row.retrieval.rate(task, length):
                    writer.writerow([row.label, task, length, rate.mean, rate.low, rate.high, rate.trials])
    return text.getvalue()


def markdown_report(rows: Sequence[EvaluationRow]) -> str:
    """The verdicts, the tables of perplexity and retrieval, and the controls."""
    return markdown([*verdict_sentences(rows), *table_parts(rows)])


def read_results(path: str | Path) -> list[EvaluationRow]:
    """Read the rows of a `results.jsonl`, or of the directory that holds one.

    Raises:
        RopeExtendError: there is no such file, or a line of it is damaged.
    """
    file = Path(path) / RESULTS if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise RopeExtendError(
            f"no results at {str(file)!r}; give the directory of an evaluation, which has {RESULTS}"
        )
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):  # JSON decodes each line
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise RopeExtendError("not an object")
            rows.append(EvaluationRow.from_dict(values))
        except (ValueError, RecursionError, RopeExtendError) as error:
            raise RopeExtendError(
                f"line {number} of {str(file)!r} is damaged: {error}; evaluate again with --resume "
                "to write it anew"
            ) from error
    if not rows:
        raise RopeExtendError(f"{str(file)!r} is empty; evaluate again with --resume to write it anew")
    return rows


def read_runs(paths: Sequence[str | Path]) -> list[EvaluationRow]:
    """The rows of several runs in one list. Equal labels get the name of their run.

    Raises:
        RopeExtendError: one of them has no results.
    """
    rows, names = [], []
    for name, path in zip(distinct_names(paths), paths, strict=True):
        found = read_results(path)
        rows += found
        names += [name] * len(found)
    if len({row.result.data for row in rows if row.result}) > 1:
        logger.warning("these rows were measured on different texts, so they cannot be compared")
    cells = [cell for row in rows for cell in row.retrieval.cells]
    prompts = {(cell.task, cell.length, cell.depth, cell.data) for cell in cells}
    if len(prompts) > len({which[:3] for which in prompts}):
        logger.warning("these rows answered different prompts, so they cannot be compared")
    labels = distinct_labels([row.label for row in rows], names)
    return [replace(row, label=label) for row, label in zip(rows, labels, strict=True)]


def card_results(rows: Sequence[EvaluationRow]) -> dict[str, Any]:
    """The tables and the picture of an evaluation, as arguments of `checkpoint.card.write_card`.

    Raises:
        RopeExtendError: no row has a perplexity.
    """
    from rope_extend.plots.curves import plot_perplexity

    tables = [perplexity_section(rows).markdown(heading=False)]
    tables += [section.markdown() for section in retrieval_sections(rows)]
    scored = [row for row in rows if row.result]
    return {"results": "\n\n".join(tables) + "\n", "draw": partial(plot_perplexity, scored)}


def compare_saved(
    first: str | Path,
    second: str | Path,
    *,
    rows: Sequence[str] = (),
    output: str | Path | None = None,
    overwrite: bool = False,
) -> tuple[list[Comparison], list[Path]]:
    """Compare the rows of two runs on the same tokens and prompts.

    Args:
        first: a run's directory, or its `results.jsonl`.
        second: another run, or the same one.
        rows: labels. None: all labels that both runs have, or the only row of each. One: the label in both
            runs. Two: the label in the first run and the label in the second.
        output: directory for the table and the pictures.
        overwrite: replace a comparison in that directory.

    Returns:
        The comparisons, and the paths of the written files.

    Raises:
        RopeExtendError: the runs have different texts or prompts, there is nothing to pair, or the directory
            holds a comparison already.
    """
    both = [read_results(path) for path in (first, second)]
    found = [compare(*pair) for pair in pairs(*both, names=distinct_names([first, second]), rows=rows)]
    if output is None:
        return found, []
    pictures = _pictures(found)
    names = [COMPARISON, *(str(each.file) for each in pictures)]
    directory = check_files(output, names, overwrite=overwrite)
    with replacing_files(directory, last=COMPARISON) as files:
        write_text(files / COMPARISON, markdown(comparison_parts(found)))
        for each in pictures:
            each.draw(files / str(each.file))
    return found, [directory / name for name in names]


def _pictures(comparisons: Sequence[Comparison]) -> list[Picture]:
    """The ratio of the perplexities, and the accuracy in each task."""
    from rope_extend.plots.curves import plot_ratio
    from rope_extend.plots.retrieval_maps import plot_accuracy

    pictures = []
    if scored := [pair for pair in comparisons if pair.differences]:
        pictures.append(Picture("Ratio of perplexities", partial(plot_ratio, scored), "comparison.png"))
    rows = [row for pair in comparisons if pair.changes for row in (pair.first, pair.second)]
    rows = [*{row.label: row for row in rows}.values()]
    return pictures + [
        Picture(task, partial(plot_accuracy, rows, task), f"comparison_{task}.png") for task in tasks_of(rows)
    ]
