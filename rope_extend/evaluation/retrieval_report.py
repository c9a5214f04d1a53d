"""Reports of retrieval: results as JSON lines, tables with the controls, pictures, and an HTML page."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import AS_IS, PLAIN
from rope_extend.evaluation.labels import distinct_labels, distinct_names
from rope_extend.evaluation.output_directory import RESULTS
from rope_extend.evaluation.results import RetrievalResult, file_name
from rope_extend.files import replacing_files, write_text
from rope_extend.report.page import Part, Picture, page, picture
from rope_extend.report.tables import Code, Line, Section, interval, public_name, writable
from rope_extend.report.versions import versions
from rope_extend.units import format_length

logger = logging.getLogger(__name__)

TABLE, PAGE = "report.md", "report.html"
PICTURES = ("heat_map_*.png", "accuracy_*.png")
"""Name patterns of the pictures of a report, see `write_retrieval`."""


def read_retrieval(path: str | Path) -> list[RetrievalResult]:
    """Read the rows of a `results.jsonl` of retrieval, or of the directory that holds one.

    Raises:
        RopeExtendError: there is no such file, or it holds something else.
    """
    file = Path(path) / RESULTS if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise RopeExtendError(
            f"no results at {str(file)!r}; give the directory of a retrieval run, which has {RESULTS}"
        )
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [RetrievalResult.from_dict(json.loads(line)) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise RopeExtendError(
            f"{str(file)!r} does not hold results of retrieval: {type(error).__name__}: {error}"
        ) from error


def holds_retrieval(path: str | Path) -> bool:
    """Whether a run's results are of retrieval, not of perplexity; False if they cannot be read."""
    file = Path(path) / RESULTS if Path(path).is_dir() else Path(path)
    try:
        with file.open(encoding="utf-8") as stream:
            return "cells" in json.loads(stream.readline())
    except (OSError, ValueError, TypeError):
        return False


def read_retrievals(paths: Sequence[str | Path]) -> list[RetrievalResult]:
    """The rows of several runs in one list. Equal labels get the name of their run."""
    results = [
        (name, result)
        for name, path in zip(distinct_names(paths), paths, strict=True)
        for result in read_retrieval(path)
    ]
    prompts: dict[tuple[str, int, float | None], set[str | None]] = {}
    for cell in (cell for _, result in results for cell in result.cells):
        prompts.setdefault((cell.task, cell.length, cell.depth), set()).add(cell.data)
    if any(len(fingerprints) > 1 for fingerprints in prompts.values()):
        logger.warning("these rows answered different prompts, so they cannot be compared")
    labels = distinct_labels([result.label for _, result in results], [name for name, _ in results])
    return [replace(result, label=label) for (_, result), label in zip(results, labels, strict=True)]


def write_retrieval(
    results: Sequence[RetrievalResult], directory: str | Path, *, made_by: Sequence[Code] = ()
) -> list[Path]:
    """Write `results.jsonl`, `report.md`, the pictures and `report.html`; return their paths.

    Args:
        results: the rows, in the order of the table.
        directory: directory of the report.
        made_by: the commands that made the report, with which the table and the page end.

    Raises:
        RopeExtendError: there are no results.
    """
    if not results:
        raise RopeExtendError("no results to report")
    from rope_extend.plots.retrieval_maps import plot_accuracy, plot_heat_map

    directory = Path(directory)
    earlier, pictures = _earlier_pictures(directory), _pictures(results)
    with replacing_files(directory, last=RESULTS) as partial:
        for name, (task, result) in pictures.items():
            if result is None:
                plot_accuracy(_shown(results), task, partial / name)
            else:
                plot_heat_map(_shown([result])[0], task, partial / name)
        rows = [json.dumps({**result.to_dict(), "versions": versions()}) + "\n" for result in results]
        write_text(partial / RESULTS, "".join(rows))
        commands = "".join(f"\n{part.markdown()}\n" for part in made_by)
        write_text(partial / TABLE, writable(retrieval_table(results) + commands))
        write_text(partial / PAGE, _page(results, made_by))
    for name in earlier - pictures.keys():
        (directory / name).unlink(missing_ok=True)
    return [directory / name for name in (RESULTS, TABLE, PAGE, *pictures)]


def _pictures(results: Sequence[RetrievalResult]) -> dict[str, tuple[str, RetrievalResult | None]]:
    """The pictures of a report by file name: a task's accuracy, and its heat map for each row with depths."""
    pictures: dict[str, tuple[str, RetrievalResult | None]] = {}
    for task in _tasks(results):
        pictures[f"accuracy_{task}.png"] = task, None
        for result in results:
            if result.depths(task):
                name = "".join(c if c.isalnum() else "_" for c in f"heat_map_{task}_{result.label}")
                if f"{name}.png" in pictures:  # labels can differ in other characters
                    name = f"{name}_{file_name(result.label).rpartition('-')[2]}"
                pictures[f"{name}.png"] = task, result
    return pictures


def _earlier_pictures(directory: Path) -> set[str]:
    """Names of the pictures that belong to the report of retrieval in a directory, if there is one."""
    try:
        results = read_retrieval(directory)
    except RopeExtendError:
        return set()
    return {name for name in _pictures(results) if Path(name).name == name}


def retrieval_table(results: Sequence[RetrievalResult]) -> str:
    """Markdown: for each task, accuracy by row and length; then the trained window, before and after."""
    sections = [*retrieval_sections(results), *_window(results)]
    return "\n\n".join(section.markdown() for section in sections) + "\n"


def retrieval_sections(results: Sequence[RetrievalResult]) -> list[Section]:
    """For each task, a table of accuracy by row and length."""
    sections = []
    for task in _tasks(results):
        measured = [result for result in results if task in result.tasks]
        lengths = sorted({length for result in measured for length in result.lengths(task)})
        longest = lengths[-1]
        lines: list[Line] = [["", *map(format_length, lengths)]]
        with_k = task == "passkey" and any(result.k_max(longest) is not None for result in measured)
        if with_k:
            lines = [[*lines[0], f"k_max at {format_length(longest)}"]]
        for result in measured:
            rates = [result.rate(task, length) for length in lengths]
            k_max = [result.k_max(longest)] if with_k else []
            lines.append(
                [
                    result.label,
                    *("–" if rate is None else str(rate) for rate in rates),
                    *("–" if k is None else f"{k:,}" for k in k_max),
                ]
            )
        notes = ["Share of trials solved, mean over depths, with the 95 % interval in percent."]
        cells = [cell for result in measured for cell in result.cells if cell.task == task]
        counts = sorted({len(cell.scores) for cell in cells if cell.depth is not None})
        if counts:
            notes.append(f"Trials at each depth and length: {', '.join(map(str, counts))}.")
        if with_k:
            notes.append(
                "k_max: the largest distance from key to end, in tokens, with at least 20 % success up to it."
            )
        notes += [
            f"{result.label}: the model saw only the last {result.crop} tokens of a prompt."
            for result in measured
            if result.crop
        ]
        sections.append(Section(f"Retrieval, {task}", lines, notes, best="highest"))
    return sections


def _window(results: Sequence[RetrievalResult]) -> list[Section]:
    """Each row at the trained window, compared with the unchanged model."""
    trained = results[0].trained_length
    base = next((row for row in results if row.label in (PLAIN, AS_IS) and row.crop is None), None)
    if base is None or trained is None:
        return []
    lines: list[Line] = [["", "task", "before", "after", "difference", "95 % interval"]]
    for row in results:
        for task in row.tasks if row is not base and row.crop is None else []:
            change = row.against(base, task, trained)
            if change is not None:
                points = f"{100 * change.change:+.0f} points"
                ends = interval(100 * change.low, 100 * change.high, "+.0f")
                lines.append([row.label, task, str(change.first), str(change.second), points, ends])
    if len(lines) == 1:
        return []
    note = f"Before is {base.label}. The interval is Newcombe's, over the same prompts."
    return [Section(f"Within the trained window, {trained} tokens, before and after", lines, [note])]


def heat_maps(results: Sequence[RetrievalResult]) -> list[Picture]:
    """A heat map for each task and each row that has trials of the task with a depth."""
    from rope_extend.plots.retrieval_maps import plot_heat_map

    return [
        picture(f"{task}, {result.label}: trials solved by depth and length", plot_heat_map, result, task)
        for task in _tasks(results)
        for result in _shown(results)
        if result.depths(task)
    ]


def _shown(results: Sequence[RetrievalResult]) -> list[RetrievalResult]:
    """The rows with labels that can be drawn."""
    return [replace(each, label=writable(each.label)) for each in results]


def _page(results: Sequence[RetrievalResult], made_by: Sequence[Code]) -> str:
    from rope_extend.plots.retrieval_maps import plot_accuracy

    results = _shown(results)
    charts: list[Part] = [
        picture(f"{task}: trials solved", plot_accuracy, results, task) for task in _tasks(results)
    ]
    cost: list[Line] = [["", "prompt tokens", "tokens/s", "peak memory, MiB"]]
    cost += [
        [
            row.label,
            f"{row.forward_tokens:,}",
            f"{row.tokens_per_second:,.0f}" if row.forward_tokens else "–",
            f"{row.peak_memory_bytes / 2**20:,.0f}",
        ]
        for row in results
    ]
    models: list[Line] = [["", "encoding", "adapter"]]
    models += [[row.label, row.encoding_text, public_name(row.adapter or "–")] for row in results]
    return page(
        "Retrieval by depth and length",
        ["Model: " + ", ".join(sorted({public_name(row.model) for row in results}))],
        [
            *charts,
            *retrieval_sections(results),
            *_window(results),
            *heat_maps(results),
            Section("Cost", cost, ["This run only, without trials that an earlier run had finished."]),
            Section("Models", models),
            *made_by,
        ],
        versions(),
    )


def _tasks(results: Sequence[RetrievalResult]) -> list[str]:
    return list(dict.fromkeys(task for result in results for task in result.tasks))
