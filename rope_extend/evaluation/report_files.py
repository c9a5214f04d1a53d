"""The files of a report: written together, read back with a check of every line, and compared in pairs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import Comparison, against_cropped, compare, pairs
from rope_extend.evaluation.labels import distinct_names, model_name
from rope_extend.evaluation.output_directory import FILES, PROMPTS, RESULTS, TABLE, check_files
from rope_extend.evaluation.prompts import Prompt
from rope_extend.evaluation.report_parts import (
    perplexity_section,
    report_parts,
    retrieval_sections,
    table_parts,
)
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.evaluation.statistics import plain, ppl
from rope_extend.evaluation.verdicts import decide
from rope_extend.files import replacing_files, write_text
from rope_extend.report.page import Part, markdown, write_pages
from rope_extend.report.tables import writable
from rope_extend.report.versions import versions
from rope_extend.units import format_length


def write_report(
    rows: Sequence[EvaluationRow],
    directory: str | Path,
    *,
    overwrite: bool = False,
    lead: Sequence[Part] = (),
    end: Sequence[Part] = (),
    prompts: Sequence[Prompt] = (),
) -> list[Path]:
    """Write `results.jsonl`, `table.csv`, `report.md`, `report.html` and the pictures; return their paths.

    Each line of `results.jsonl` holds a row's `to_dict()` and the `versions` of the software. `report.html`
    needs no other file. It begins with `lead` and ends with `end`; `prompts` are written to `prompts.jsonl`.
    """
    directory = check_files(directory, FILES, overwrite=overwrite)
    shown = [replace(row, label=writable(row.label)) for row in rows]
    with replacing_files(directory, last=RESULTS) as partial_files:
        values = [{**row.to_dict(), "versions": versions()} for row in rows]
        write_text(partial_files / RESULTS, _lines(values))
        write_text(partial_files / TABLE, writable(csv_table(rows)))
        names = [RESULTS, TABLE]
        if prompts:
            write_text(partial_files / PROMPTS, _lines(map(asdict, prompts)))
            names.append(PROMPTS)
        models = ", ".join(sorted({model_name(row.model) for row in rows}))
        title = f"{models}: perplexity and retrieval by length"
        names += write_pages(partial_files, title, [*lead, *report_parts(shown), *end])
    for name in {*FILES} - {*names}:  # of an earlier report
        (directory / name).unlink(missing_ok=True)
    return [directory / name for name in names]


def _lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(plain(record), allow_nan=False) + "\n" for record in records)


def csv_table(rows: Sequence[EvaluationRow]) -> str:
    """All tables in full precision: one line for each row and length."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "measured", "length", "value", "low", "high", "of"])
    for row in rows:
        for length, value in row.result.levels.items():
            ends = row.result.interval(length) or ("", "")
            writer.writerow([row.label, "perplexity", length, value, *ends, row.result.documents])
        for task in row.retrieval.tasks:
            for length in row.retrieval.lengths(task):
                if rate := row.retrieval.rate(task, length):
                    values = rate.mean, rate.low, rate.high, rate.trials
                    writer.writerow([row.label, task, length, *values])
    for gain in against_cropped(rows):
        measured = f"beyond {format_length(gain.beyond or 0)}, divided by {gain.first.label}"
        for change in gain.differences:
            low, high = ("" if end is None else ppl(end) for end in (change.low, change.high))
            begin = gain.second.label, measured, change.length, change.ratio
            writer.writerow([*begin, low, high, change.documents])
    return text.getvalue()


def markdown_report(rows: Sequence[EvaluationRow]) -> str:
    """The verdict, the tables of perplexity and retrieval, and the controls."""
    decision = decide(rows)
    return markdown([*([decision.section] if decision.verdicts else []), *table_parts(rows)])


def read_results(path: str | Path) -> list[EvaluationRow]:
    """Read the rows of a `results.jsonl`, or of the directory that holds one."""
    file = Path(path) / RESULTS if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise RopeExtendError(
            f"no results at {str(file)!r}; give the directory of an evaluation, which has {RESULTS}"
        )
    rows: list[EvaluationRow] = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):  # JSON decodes each line
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise RopeExtendError("not an object")
            row = EvaluationRow.from_dict(values)
            if any(row.label == each.label for each in rows):
                raise RopeExtendError(f"an earlier row is called {row.label!r} too")
            rows.append(row)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RopeExtendError(
                f"line {number} of {str(file)!r} is damaged ({type(error).__name__}: {error}); evaluate "
                "again with --resume to write it anew"
            ) from error
    if not rows:
        raise RopeExtendError(f"{str(file)!r} is empty; evaluate again with --resume to write it anew")
    return rows


def card_results(rows: Sequence[EvaluationRow]) -> dict[str, Any]:
    """The tables and the picture of an evaluation, as arguments of `checkpoint.card.write_card`."""
    from rope_extend.plots.curves import plot_perplexity

    tables = [perplexity_section(rows).markdown(heading=False)]
    tables += [section.markdown() for section in retrieval_sections(rows)]
    scored = [row for row in rows if row.result]
    return {"results": "\n\n".join(tables) + "\n", "draw": partial(plot_perplexity, scored)}


def compare_saved(first: str | Path, second: str | Path, rows: Sequence[str] = ()) -> list[Comparison]:
    """Compare the rows of two runs on the same tokens and prompts.

    Args:
        first: a run's directory, or its `results.jsonl`.
        second: another run, or the same one.
        rows: labels. None: all labels that both runs have, or the only row of each. One: the label in both
            runs. Two: the label in the first run and the label in the second.
    """
    both = [read_results(path) for path in (first, second)]
    return [compare(*pair) for pair in pairs(*both, names=distinct_names([first, second]), rows=rows)]
