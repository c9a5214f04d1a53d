"""Retrieval to files: one JSON line for each row, tables with the controls, the pictures, and a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rope_extend import plots
from rope_extend.data import format_length
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.html import Picture, page
from rope_extend.evaluation.results import RetrievalResult
from rope_extend.evaluation.tables import Line, Section, interval
from rope_extend.evaluation.variants import AS_IS, PLAIN
from rope_extend.evaluation.versions import versions

RESULTS, TABLE, PAGE = "results.jsonl", "table.md", "report.html"
PICTURES = ("heat_map_*.png", "accuracy_*.png")
"""Names of the pictures that :func:`write_retrieval` draws, as patterns."""


def read_retrieval(path: str | Path) -> list[RetrievalResult]:
    """Read the rows of a ``results.jsonl`` of retrieval, or of the directory that holds one.

    Raises:
        RopeExtendError: there is no such file, or it holds something else.
    """
    file = Path(path) / RESULTS if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise RopeExtendError(f"no results at {str(file)!r}; retrieve writes {RESULTS} into its directory")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [RetrievalResult.from_dict(json.loads(line)) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise RopeExtendError(f"{str(file)!r} does not hold results of retrieval: {error!r}") from error


def holds_retrieval(path: str | Path) -> bool:
    """Whether a run's results are of retrieval, and not of perplexity; False where they cannot be read."""
    file = Path(path) / RESULTS if Path(path).is_dir() else Path(path)
    try:
        with file.open(encoding="utf-8") as stream:
            return "cells" in json.loads(stream.readline())
    except (OSError, ValueError, TypeError):
        return False


def read_retrievals(paths: Sequence[str | Path]) -> list[RetrievalResult]:
    """Rows of several runs, with the run's name where two have one label; see :func:`read_retrieval`."""
    found = [(Path(path), one) for path in paths for one in read_retrieval(path)]
    labels = Counter(one.label for _, one in found)
    return [
        replace(one, label=f"{one.label} ({(path.parent if path.is_file() else path).name})")
        if labels[one.label] > 1
        else one
        for path, one in found
    ]


def write_retrieval(results: Sequence[RetrievalResult], directory: str | Path) -> list[Path]:
    """Write ``results.jsonl``, ``table.md``, the pictures and ``report.html``; return their paths.

    Raises:
        RopeExtendError: there are no results.
    """
    if not results:
        raise RopeExtendError("no results to report")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / RESULTS, directory / TABLE, directory / PAGE]
    rows = [json.dumps({**result.to_dict(), "versions": versions()}) + "\n" for result in results]
    paths[0].write_text("".join(rows), encoding="utf-8")
    paths[1].write_text(retrieval_table(results), encoding="utf-8")
    pictures = []
    for task in _tasks(results):
        path = plots.plot_accuracy(results, task, directory / f"accuracy_{task}.png")
        pictures.append(Picture(path, f"{task}: trials solved against length"))
        for result in results:
            if result.depths(task):
                name = "".join(c if c.isalnum() else "_" for c in f"heat_map_{task}_{result.label}")
                path = plots.plot_heat_map(result, task, directory / f"{name}.png")
                pictures.append(Picture(path, f"{task}, {result.label}: trials solved by depth and length"))
    paths[2].write_text(_page(results, pictures), encoding="utf-8")
    return paths + [picture.path for picture in pictures]


def retrieval_table(results: Sequence[RetrievalResult]) -> str:
    """Markdown: for each task, accuracy by row and length; then what became of the trained window."""
    sections = [*retrieval_sections(results), *_window(results)]
    return "\n\n".join(section.markdown() for section in sections) + "\n"


def retrieval_sections(results: Sequence[RetrievalResult]) -> list[Section]:
    """For each task a table of accuracy by row and length; none without results."""
    sections = []
    for task in _tasks(results):
        some = [result for result in results if task in result.tasks]
        lengths = sorted({length for result in some for length in result.lengths(task)})
        longest = lengths[-1]
        lines: list[Line] = [["", *map(format_length, lengths)]]
        with_k = task == "passkey" and any(result.k_max(longest) is not None for result in some)
        if with_k:
            lines = [[*lines[0], f"k_max at {format_length(longest)}"]]
        for result in some:
            rates = [result.rate(task, length) for length in lengths]
            k_max = [result.k_max(longest)] if with_k else []
            lines.append(
                [
                    result.label,
                    *("–" if rate is None else str(rate) for rate in rates),
                    *("–" if k is None else f"{k:,}" for k in k_max),
                ]
            )
        notes = ["Share of trials solved, mean over depths, with the 95 % Wilson interval in per cent."]
        cells = [cell for result in some for cell in result.cells if cell.task == task]
        counts = sorted({len(cell.scores) for cell in cells if cell.depth is not None})
        if counts:
            notes.append(f"Trials at each depth and length: {', '.join(map(str, counts))}.")
        if with_k:
            notes.append(
                "k_max: the largest distance in tokens, key to end, up to which 20 % of the trials succeed."
            )
        notes += [
            f"{result.label}: the model saw a prompt's last {result.crop} tokens only."
            for result in some
            if result.crop
        ]
        sections.append(Section(f"Retrieval, {task}", lines, notes))
    return sections


def _window(results: Sequence[RetrievalResult]) -> list[Section]:
    """How each row reads at the trained window, against the model that was not changed."""
    trained = results[0].trained_length
    base = next((one for one in results if one.label in (PLAIN, AS_IS) and one.crop is None), None)
    if base is None or trained is None:
        return []
    lines: list[Line] = [["", "task", "before", "after", "difference", "95 % interval"]]
    for one in results:
        for task in one.tasks if one is not base and one.crop is None else []:
            change = one.against(base, task, trained)
            if change is not None:
                points = f"{100 * change.change:+.0f} points"
                ends = interval(100 * change.low, 100 * change.high, "+.0f")
                lines.append([one.label, task, str(change.first), str(change.second), points, ends])
    if len(lines) == 1:
        return []
    note = f"Before is {base.label}. The interval is Newcombe's, over the same prompts."
    return [Section(f"Within the trained window, {trained} tokens, before and after", lines, [note])]


def _page(results: Sequence[RetrievalResult], pictures: Sequence[Picture]) -> str:
    cost: list[Line] = [["", "tokens read", "tokens/s", "peak memory, MiB"]]
    cost += [
        [
            one.label,
            f"{one.forward_tokens:,}",
            f"{one.tokens_per_second:,.0f}" if one.forward_tokens else "–",
            f"{one.peak_memory_bytes / 2**20:,.0f}",
        ]
        for one in results
    ]
    read: list[Line] = [["", "encoding", "adapter"]]
    read += [[one.label, one.encoding_text, one.adapter or "–"] for one in results]
    return page(
        "Retrieval by depth and length",
        ["Model: " + ", ".join(sorted({one.model for one in results}))],
        [
            *retrieval_sections(results),
            *_window(results),
            *pictures,
            Section("What it cost", cost, ["Of this run: what an earlier one had done is not in it."]),
            Section("What was read", read),
        ],
        versions(),
    )


def _tasks(results: Sequence[RetrievalResult]) -> list[str]:
    return list(dict.fromkeys(task for result in results for task in result.tasks))
