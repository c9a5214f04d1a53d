"""Finished cells as rows: what was measured of each row, on the documents and prompts that rows share."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from rope_extend.evaluation import statistics
from rope_extend.evaluation.cells import PERPLEXITY, RETRIEVAL
from rope_extend.evaluation.prompts import joined_fingerprint
from rope_extend.evaluation.results import Cell as RetrievalCell
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult

Values = Mapping[str, Any]
"""The values of a finished cell: those of its row, and what was measured."""


def perplexity_values(result: PerplexityResult, document: str) -> dict[str, Any]:
    """The values of a cell of perplexity for JSON: arrays as base64, exact, and half as long as their digits.

    Args:
        result: the perplexity on one document.
        document: name of the document.
    """
    positions = {
        name: None if array is None else _packed(array)
        for name in ("nll_by_position", "scored_by_position")
        for array in [getattr(result, name)]
    }
    return {"document": document, "result": {**result.to_dict(), **positions}}


def _packed(array: np.ndarray[Any, Any]) -> str:
    """The bytes of an array, little-endian, as base64, which `PerplexityResult.from_dict` reads."""
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def collect(cells: Iterable[Values], labels: Sequence[str]) -> tuple[list[EvaluationRow], list[str]]:
    """Put finished cells together: the rows, and the names of the documents that they are compared on.

    Rows are compared on the same documents, which are known by their tokens: two files of one name in two
    folders are two documents. Those that most rows have come first, and their number is the one that fills
    most of the table: documents times the rows that have all of them. Rows that lack one of these are left
    out. If no row has a document, those that answered prompts are the rows.

    Args:
        cells: the values of finished cells.
        labels: the labels of the rows, in order.
    """
    cells = list(cells)
    of_kind = {
        kind: [values for values in cells if values["kind"] == kind] for kind in (PERPLEXITY, RETRIEVAL)
    }
    measured: dict[str, dict[str, PerplexityResult]] = {label: {} for label in labels}
    names: dict[str, str] = {}
    for values in of_kind[PERPLEXITY]:
        result = PerplexityResult.from_dict(values["result"])
        measured[values["label"]][result.data] = result
        names.setdefault(result.data, values["document"])
    rows_of = Counter(data for results in measured.values() for data in results)
    documents = sorted(names, key=lambda data: -rows_of[data])  # stable: else in the order of cells
    complete = {
        count: [label for label in labels if measured[label].keys() >= {*documents[:count]}]
        for count in range(1, len(documents) + 1)
    }
    count = max(complete, key=lambda each: (each * len(complete[each]), each), default=0)
    shared = documents[:count]
    answered = retrieved(of_kind[RETRIEVAL], labels)
    about = {values["label"]: values for values in cells}
    rows = [
        EvaluationRow(
            **{item.name: about[label][item.name] for item in fields(EvaluationRow) if item.name in _SUBJECT},
            result=merged([measured[label][data] for data in shared]),
            retrieval=answered.get(label, RetrievalResult()),
        )
        for label in complete.get(count, answered)
    ]
    return rows, [names[data] for data in shared]


_SUBJECT = ("label", "encoding", "model", "adapter", "trained_length", "rope_parameters", "target_length")
"""Fields of a row that each of its cells has."""


def merged(results: Sequence[PerplexityResult]) -> PerplexityResult:
    """One result from results on one document each, of the same model and lengths.

    Sums are over documents in order, as in a measurement of all of them together.
    """
    if len(results) < 2:
        return results[0] if results else PerplexityResult()
    first = results[0]
    nll = {length: [result.document_nll[length][0] for result in results] for length in first.ppl}
    terms = {length: [result.document_terms[length][0] for result in results] for length in first.ppl}
    means, scored = _by_position(results)
    return replace(
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
    )


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


def retrieved(cells: Sequence[Values], labels: Sequence[str]) -> dict[str, RetrievalResult]:
    """The retrieval of each row that answered a prompt, from cells of a few prompts each.

    A trial of a row counts if the row has it at every depth, so that no depth counts more than another.

    Args:
        cells: the values of finished cells.
        labels: the labels of the rows, in order.
    """
    depths: dict[tuple[str, int], dict[float | None, None]] = {}
    found: dict[str, dict[tuple[str, int], dict[int, dict[float | None, Values]]]] = {
        label: {} for label in labels
    }
    for values in cells:
        for trial in values["trials"]:
            key, depth = (trial["task"], trial["length"]), trial["depth"]
            depths.setdefault(key, {})[depth] = None
            found[values["label"]].setdefault(key, {}).setdefault(trial["trial"], {})[depth] = trial
    results = {}
    for label, tasks in found.items():
        own, groups = [cell for cell in cells if cell["label"] == label], []
        for key, all_depths in depths.items():
            trials = [
                each for _, each in sorted(tasks.get(key, {}).items()) if each.keys() == all_depths.keys()
            ]
            groups += [_one_cell([each[depth] for each in trials]) for depth in all_depths if trials]
        if groups:
            results[label] = RetrievalResult(
                tuple(groups),
                crop=own[0]["crop"],
                seconds=sum(cell["seconds"] for cell in own),
                forward_tokens=sum(cell["forward_tokens"] for cell in own),
                peak_memory_bytes=max(cell["peak_memory_bytes"] for cell in own),
            )
    return results


def _one_cell(trials: Sequence[Values]) -> RetrievalCell:
    """The scores of some trials of one task, length and depth."""
    first = trials[0]
    return RetrievalCell(
        first["task"], first["length"], first["depth"],
        tuple(trial["score"] for trial in trials),
        joined_fingerprint(trial["prompt"] for trial in trials),
    )  # fmt: skip
