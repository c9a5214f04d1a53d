"""Finished cells as rows: what was measured of each row, on the documents and prompts that rows share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import statistics
from rope_extend.evaluation.cells import PERPLEXITY, RETRIEVAL
from rope_extend.evaluation.prompts import joined_fingerprint
from rope_extend.evaluation.results import Cell as RetrievalCell
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult

Values = Mapping[str, Any]
"""The values of a finished cell: those of its row, and what was measured."""


def collect(cells: Iterable[Values], labels: Sequence[str]) -> list[EvaluationRow]:
    """Put finished cells together as rows, on the documents that all of them have.

    Documents are known by their tokens: two files of one name in two folders are two documents. A row is left
    out if the others would share less than half of their documents with it. If no row has a document, those
    that answered prompts are the rows.

    Args:
        cells: the values of finished cells.
        labels: the labels of the rows, in order.
    """
    cells = list(cells)
    measured: dict[str, dict[str, PerplexityResult]] = {}
    for values in cells:
        if values["kind"] == PERPLEXITY:
            result = PerplexityResult.from_dict(values["result"])
            result = replace(result, document_names=[values["document"]])
            measured.setdefault(values["label"], {})[result.data] = result
    ranked = [label for label in labels if label in measured]
    ranked.sort(key=lambda label: len(measured[label]), reverse=True)
    begun, shared = list[str](), list[str]()
    for n in range(len(ranked), 0, -1):
        rows = [measured[label] for label in ranked[:n]]
        shared = [data for data in rows[0] if all(data in row for row in rows)]
        if 2 * len(shared) >= len(rows[0]):
            begun = [label for label in labels if label in ranked[:n]]
            break
    answered = retrieved([values for values in cells if values["kind"] == RETRIEVAL], labels)
    about = {values["label"]: values for values in cells}
    return [
        EvaluationRow(
            **{item.name: about[label][item.name] for item in fields(EvaluationRow) if item.name in _SUBJECT},
            result=merged([measured[label][data] for data in shared]) if begun else PerplexityResult(),
            retrieval=answered.get(label, RetrievalResult()),
        )
        for label in begun or answered
    ]


_SUBJECT = ("label", "encoding", "model", "adapter", "trained_length", "rope_parameters", "target_length")
"""Fields of a row that each of its cells has."""


def merged(results: Sequence[PerplexityResult]) -> PerplexityResult:
    """One result from results on one document each, of the same model and lengths.

    Sums are over documents in order, as in a measurement of all of them together.
    """
    if len(results) < 2:
        return results[0] if results else PerplexityResult()
    first = results[0]
    if other := next((each for each in results if each.measured_by != first.measured_by), None):
        raise RopeExtendError(
            f"a row was measured by two protocols, {first.measured_by} and {other.measured_by}, as by two "
            "versions of rope_extend; delete the finished cells of one of them"
        )
    nll = {length: [result.document_nll[length][0] for result in results] for length in first.ppl}
    terms = {length: [result.document_terms[length][0] for result in results] for length in first.ppl}
    return replace(
        first,
        ppl={length: statistics.ppl(sum(nll[length]) / sum(terms[length])) for length in first.ppl},
        tokens={length: sum(result.tokens[length] for result in results) for length in first.ppl},
        block_nll=np.concatenate([result.block_nll for result in results]),
        block_terms=np.concatenate([result.block_terms for result in results]),
        documents=len(results),
        data=joined_fingerprint(result.data for result in results),
        forward_tokens=sum(result.forward_tokens for result in results),
        seconds=sum(result.seconds for result in results),
        peak_memory_bytes=max(result.peak_memory_bytes for result in results),
        document_nll=nll,
        document_terms=terms,
        document_names=[name for result in results for name in result.document_names],
    )


def retrieved(cells: Sequence[Values], labels: Sequence[str]) -> dict[str, RetrievalResult]:
    """The retrieval of each row that answered a prompt, from cells of a few prompts each."""
    results = {}
    for label in labels:
        own = [cell for cell in cells if cell["label"] == label]
        groups: dict[tuple[str, int, float | None], list[Values]] = {}
        for trial in sorted((trial for cell in own for trial in cell["trials"]), key=lambda it: it["trial"]):
            groups.setdefault((trial["task"], trial["length"], trial["depth"]), []).append(trial)
        if groups:
            results[label] = RetrievalResult(
                tuple(_one_cell(trials) for trials in groups.values()),
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
