"""Finished cells as rows: what was measured of each row, on the documents and prompts that rows share."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rope_extend.evaluation import statistics
from rope_extend.evaluation.results import Cell as RetrievalCell
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult
from rope_extend.study.cells import PERPLEXITY, RETRIEVAL, row_of_cell

Values = Mapping[str, Any]
"""The values of a finished cell."""


@dataclass(frozen=True)
class Collected:
    """What a study has measured so far.

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
    rows = [
        replace(merged([measured[label][data] for data in shared]), retrieval=by_label.get(label))
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
    nll = {length: [sum_of(result, length) for result in results] for length in first.ppl}
    terms = {length: [result.tokens[length] for result in results] for length in first.ppl}
    positions = np.mean([result.nll_by_position for result in results], axis=0)
    return replace(
        rows[0],
        result=PerplexityResult(
            ppl={length: statistics.ppl(sum(nll[length]) / sum(terms[length])) for length in first.ppl},
            tokens={length: sum(terms[length]) for length in first.ppl},
            nll_by_position=positions,
            protocol=first.protocol,
            window=first.window,
            documents=len(results),
            dropped_documents=0,
            data=joined_fingerprint(result.data for result in results),
            passes=first.passes,
            forward_tokens=sum(result.forward_tokens for result in results),
            seconds=sum(result.seconds for result in results),
            peak_memory_bytes=max(result.peak_memory_bytes for result in results),
            document_nll=nll,
            document_terms=terms,
        ),
    )


def sum_of(result: PerplexityResult, length: int) -> float:
    """The sum of the losses of a result on one document, in nats."""
    assert result.document_nll is not None
    return result.document_nll[length][0]


def joined_fingerprint(fingerprints: Iterable[str]) -> str:
    """Sixteen hex digits for several fingerprints in this order; a single one stays as it is."""
    several = list(fingerprints)
    return several[0] if len(several) == 1 else hashlib.sha256("".join(several).encode()).hexdigest()[:16]


def retrieved(cells: Sequence[Values], labels: Sequence[str]) -> list[RetrievalResult]:
    """The retrieval of each row, from cells of one prompt each.

    A trial of a row counts if the row has it at every depth, so that no depth counts more than another.

    Args:
        cells: the values of finished cells.
        labels: the labels of the rows, in order.
    """
    depths: dict[tuple[str, int], set[float | None]] = {}
    found: dict[tuple[str, str, int, int], dict[float | None, RetrievalResult]] = {}
    for values in cells:
        result = RetrievalResult.from_dict(dict(values))
        (cell,) = result.cells
        depths.setdefault((cell.task, cell.length), set()).add(cell.depth)
        found.setdefault((result.label, cell.task, cell.length, values["trial"]), {})[cell.depth] = result
    by_row: dict[str, list[RetrievalResult]] = {label: [] for label in labels}
    for (label, task, length, _), by_depth in sorted(found.items(), key=lambda item: item[0][3]):
        if label in by_row and by_depth.keys() == depths[task, length]:
            by_row[label] += by_depth.values()
    return [_one_result(results) for results in by_row.values() if results]


def _one_result(results: Sequence[RetrievalResult]) -> RetrievalResult:
    groups: dict[tuple[str, int, float | None], list[RetrievalCell]] = {}
    for cell in (cell for result in results for cell in result.cells):
        groups.setdefault((cell.task, cell.length, cell.depth), []).append(cell)
    cells = tuple(
        RetrievalCell(
            *key,
            min((cell.distance for cell in group if cell.distance is not None), default=None),
            tuple(score for cell in group for score in cell.scores),
            joined_fingerprint(cell.data or "" for cell in group),
        )
        for key, group in groups.items()
    )
    return replace(
        results[0],
        cells=cells,
        seconds=sum(result.seconds for result in results),
        forward_tokens=sum(result.forward_tokens for result in results),
        peak_memory_bytes=max(result.peak_memory_bytes for result in results),
    )
