"""Compare two saved runs, of perplexity or of retrieval: `rope-extend compare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import (
    compare_retrieval,
    compare_runs,
    comparison_table,
    pairs,
    retrieval_comparison_table,
)
from rope_extend.evaluation.labels import distinct_names
from rope_extend.evaluation.output_directory import check_files
from rope_extend.evaluation.perplexity_report import read_results
from rope_extend.evaluation.retrieval_report import holds_retrieval, read_retrieval
from rope_extend.files import replacing_files, write_text

TABLE = "comparison.md"
KINDS = {False: "perplexity", True: "retrieval"}


def compare_saved(
    first: str | Path,
    second: str | Path,
    *,
    rows: Sequence[str] = (),
    output: str | Path | None = None,
    overwrite: bool = False,
) -> tuple[str, list[Path]]:
    """Compare the rows of two runs on the same tokens or prompts.

    Args:
        first: a run's directory, or its `results.jsonl`.
        second: another run of the same kind, or the same run.
        rows: labels. None: all labels that both runs have, or the only row of each. One: the label in both
            runs. Two: the label in the first run and the label in the second.
        output: directory for the table and the pictures.
        overwrite: replace a comparison in that directory.

    Returns:
        The table as Markdown, and the paths of the written files.

    Raises:
        RopeExtendError: the runs are of different kinds or have different texts or prompts, there is nothing
            to pair, or the directory holds a comparison already.
    """
    kinds = holds_retrieval(first), holds_retrieval(second)
    one, other = distinct_names([first, second])
    names = one, other
    if all(kinds):
        return _retrieval(first, second, names, rows, output, overwrite)
    if any(kinds):
        for run, kind in zip((first, second), kinds, strict=True):
            if not kind:
                read_results(run)  # raises if these are no results at all
        raise RopeExtendError(
            f"{first} holds {KINDS[kinds[0]]} and {second} holds {KINDS[kinds[1]]}, which cannot be "
            "compared; give two runs of `rope-extend evaluate`, or two of `rope-extend retrieve`"
        )
    return _perplexity(first, second, names, rows, output, overwrite)


def comparison_values(
    first: str | Path, second: str | Path, *, rows: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The numbers of `compare_saved`, as plain values for JSON: one dict for each pair of rows."""
    one, other = distinct_names([first, second])
    if holds_retrieval(first):
        both = read_retrieval(first), read_retrieval(second)
        compared = [compare_retrieval(*pair) for pair in pairs(*both, names=(one, other), rows=rows)]
        return [
            {
                "first": pair.first.label,
                "second": pair.second.label,
                "changes": [
                    {"task": change.task, "length": change.length, **change.change.to_dict()}
                    for change in pair.changes
                ],
            }
            for pair in compared
        ]
    found = compare_runs(read_results(first), read_results(second), names=(one, other), rows=rows)
    return [
        {
            "first": pair.first.label,
            "second": pair.second.label,
            "differences": [change.to_dict() for change in pair.differences],
        }
        for pair in found
    ]


def _perplexity(
    first: str | Path,
    second: str | Path,
    names: tuple[str, str],
    rows: Sequence[str],
    output: str | Path | None,
    overwrite: bool,
) -> tuple[str, list[Path]]:
    both = read_results(first), read_results(second)
    comparisons = compare_runs(*both, names=names, rows=rows)
    text, paths = comparison_table(comparisons), []
    if output is not None:
        from rope_extend.plots.curves import plot_comparison

        trained = comparisons[0].first.trained_length
        if trained is None:
            raise RopeExtendError("these results do not have the trained window; evaluate again")
        pictures = {"comparison.png": partial(plot_comparison, comparisons, trained)}
        paths = _write(output, text, pictures, overwrite)
    return text, paths


def _retrieval(
    first: str | Path,
    second: str | Path,
    names: tuple[str, str],
    rows: Sequence[str],
    output: str | Path | None,
    overwrite: bool,
) -> tuple[str, list[Path]]:
    both = read_retrieval(first), read_retrieval(second)
    comparisons = [compare_retrieval(*pair) for pair in pairs(*both, names=names, rows=rows)]
    text, paths = retrieval_comparison_table(comparisons), []
    if output is not None:
        from rope_extend.plots.retrieval_maps import plot_accuracy

        tasks = list(dict.fromkeys(change.task for pair in comparisons for change in pair.changes))
        drawn = list({id(row): row for pair in comparisons for row in (pair.first, pair.second)}.values())
        pictures = {f"comparison_{task}.png": partial(plot_accuracy, drawn, task) for task in tasks}
        paths = _write(output, text, pictures, overwrite)
    return text, paths


def _write(
    output: str | Path, table: str, pictures: Mapping[str, Callable[[Path], Path]], overwrite: bool
) -> list[Path]:
    """Write the table and draw the pictures, by name; returns their paths."""
    directory = check_files(output, [TABLE, *pictures], overwrite=overwrite)
    with replacing_files(directory, last=TABLE) as files:
        write_text(files / TABLE, table)
        for name, draw in pictures.items():
            draw(files / name)
    return [directory / name for name in (TABLE, *pictures)]
