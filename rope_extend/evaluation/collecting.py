"""Finished cells as rows: what was measured of each row, on the documents and prompts that rows share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rope_extend.evaluation import statistics
from rope_extend.evaluation.cells import PERPLEXITY, RETRIEVAL, SAMPLE, row_of_cell
from rope_extend.evaluation.prompts import joined_fingerprint
from rope_extend.evaluation.results import Cell as RetrievalCell
from rope_extend.evaluation.results import EvaluationRow, Losses, PerplexityResult, RetrievalResult, Sample

Values = Mapping[str, Any]
"""The values of a finished cell."""


@dataclass(frozen=True)
class Collected:
    """What was measured so far.

    Attributes:
        rows: the perplexity of each row that is finished on all of `documents`, and its retrieval.
        retrieval: the retrieval of each row that answered a prompt.
        documents: names of the documents that the rows are compared on.
        texts: fingerprints of the tokens of these documents.
        partial: by label, the number of documents of rows that are left out of `rows`.
    """

    rows: list[EvaluationRow]
    retrieval: list[RetrievalResult]
    documents: list[str]
    texts: list[str]
    partial: dict[str, int]


def collect(cells: Iterable[Values], labels: Sequence[str]) -> Collected:
    """Put finished cells together.

    Rows are compared on the same documents, which are known by their tokens: two files of one name in two
    folders are two documents. Those that most rows have come first, and their number is the one that fills
    most of the table: documents times the rows that have all of them.

    Args:
        cells: the values of finished cells.
        labels: the labels of the rows, in order.
    """
    cells = list(cells)
    measured: dict[str, dict[str, EvaluationRow]] = {}
    names: dict[str, str] = {}
    for values in cells:
        if values["kind"] == PERPLEXITY:
            row = row_of_cell(dict(values))
            measured.setdefault(row.label, {})[row.result.data] = row
            names.setdefault(row.result.data, values["document"])
    rows_of = Counter(data for label in labels for data in measured.get(label, {}))
    documents = sorted(
        names, key=lambda data: -rows_of[data]
    )  # stable: equal ones stay in the order of cells
    answered = retrieved([values for values in cells if values["kind"] == RETRIEVAL], labels)
    complete = {
        count: [label for label in labels if measured.get(label, {}).keys() >= {*documents[:count]}]
        for count in range(1, len(documents) + 1)
    }
    count = max(complete, key=lambda each: (each * len(complete[each]), each), default=0)
    shared, used = documents[:count], complete.get(count, [])
    by_label = {result.label: result for result in answered}
    samples: dict[str, list[Sample]] = {}
    for values in cells:
        if values["kind"] == SAMPLE:
            samples.setdefault(values["label"], []).append(Sample(**values["sample"]))
    rows = [
        replace(
            merged([measured[label][data] for data in shared]),
            retrieval=by_label.get(label),
            samples=tuple(samples.get(label, ())),
        )
        for label in used
    ]
    partial = {label: len(measured.get(label, {})) for label in labels if label not in used}
    return Collected(rows, answered, [names[data] for data in shared], shared, partial)


def merged(rows: Sequence[EvaluationRow]) -> EvaluationRow:
    """One row from rows on one document each, of the same model and lengths.

    Sums are over documents in order, as in a measurement of all of them together.
    """
    results = [row.result for row in rows]
    first = results[0]
    if len(results) == 1:
        return rows[0]
    nll = {length: [sum_of(result, length) for result in results] for length in first.ppl}
    terms = {length: [result.document_terms[length][0] for result in results] for length in first.ppl}  # type: ignore[index]
    means, scored = _by_position(results)
    result = replace(
        first,
        ppl={length: statistics.ppl(sum(nll[length]) / sum(terms[length])) for length in first.ppl},
        tokens={length: sum(result.tokens[length] for result in results) for length in first.ppl},
        nll_by_position=means,
        scored_by_position=scored,
        documents=len(results),
        data=joined_fingerprint(result.data for result in results),
        forward_tokens=sum(result.forward_tokens for result in results),
        seconds=sum(result.seconds for result in results),
        peak_memory_bytes=max(result.peak_memory_bytes for result in results),
        document_nll=nll,
        document_terms=terms,
        losses=_losses(results),
    )
    return replace(rows[0], result=result)


def _by_position(results: Sequence[PerplexityResult]) -> tuple[Any, Any]:
    """The mean loss at each position, and how many losses it has; None if it has one of each document."""
    size = max(len(result.nll_by_position) for result in results)
    sums, scored = np.zeros(size), np.zeros(size, dtype=np.int64)
    for result in results:
        means = result.nll_by_position
        counts = np.ones(len(means), dtype=np.int64)
        if result.scored_by_position is not None:
            counts = result.scored_by_position
        sums[: len(means)] += np.where(counts > 0, means * counts, 0)
        scored[: len(means)] += counts
    means = np.divide(sums, scored, out=np.full(size, np.nan), where=scored > 0)
    return means, None if results[0].scored_by_position is None else scored


def _losses(results: Sequence[PerplexityResult]) -> dict[int, list[Losses]] | None:
    """The losses of all documents, by the longest length of each pass; None if they were not kept."""
    if any(result.losses is None for result in results):
        return None
    return {
        length: [losses for result in results for losses in (result.losses or {})[length]]
        for length in results[0].losses or {}
    }


def sum_of(result: PerplexityResult, length: int) -> float:
    """The sum of the losses of a result on one document, in nats."""
    assert result.document_nll is not None
    return result.document_nll[length][0]


def retrieved(cells: Sequence[Values], labels: Sequence[str]) -> list[RetrievalResult]:
    """The retrieval of each row, from cells of a few prompts each.

    A trial of a row counts if the row has it at every depth, so that no depth counts more than another.

    Args:
        cells: the values of finished cells.
        labels: the labels of the rows, in order.
    """
    depths: dict[tuple[str, int], dict[float | None, None]] = {}
    found: dict[str, dict[tuple[str, int, int], dict[float | None, Values]]] = {label: {} for label in labels}
    for values in cells:
        for trial in values["trials"]:
            task, length, depth = trial["task"], trial["length"], trial["depth"]
            depths.setdefault((task, length), {})[depth] = None
            if values["label"] in found:
                of_row = found[values["label"]].setdefault((task, length, trial["trial"]), {})
                of_row[depth] = trial
    results = []
    for label, trials in found.items():
        whole = {
            key: by_depth for key, by_depth in trials.items() if by_depth.keys() == depths[key[:2]].keys()
        }
        if whole:
            groups = [
                _one_cell([whole[key][depth] for key in sorted(whole) if key[:2] == (task, length)])
                for task, length in depths
                if any(key[:2] == (task, length) for key in whole)
                for depth in depths[task, length]
            ]
            results.append(_one_result([cell for cell in cells if cell["label"] == label], groups))
    return results


def _one_cell(trials: Sequence[Values]) -> RetrievalCell:
    """The scores of some trials of one task, length and depth."""
    first = trials[0]
    distances = [trial["distance"] for trial in trials if trial["distance"] is not None]
    return RetrievalCell(
        first["task"], first["length"], first["depth"], min(distances, default=None),
        tuple(trial["score"] for trial in trials),
        joined_fingerprint(trial["prompt"] for trial in trials),
    )  # fmt: skip


def _one_result(cells: Sequence[Values], groups: Sequence[RetrievalCell]) -> RetrievalResult:
    """The result of a row from its finished cells of retrieval."""
    first = cells[0]
    return RetrievalResult(
        **{name: first[name] for name in ("label", "encoding", "model", "adapter", "trained_length")},
        crop=first["crop"],
        rope_parameters=first["rope_parameters"],
        cells=tuple(groups),
        seconds=sum(cell["seconds"] for cell in cells),
        forward_tokens=sum(cell["forward_tokens"] for cell in cells),
        peak_memory_bytes=max(cell["peak_memory_bytes"] for cell in cells),
    )
