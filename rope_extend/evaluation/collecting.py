"""Finished cells as rows: what was measured of each row, on the documents and prompts that rows share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import statistics
from rope_extend.evaluation.prompts import joined_fingerprint
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult, Scores

PERPLEXITY, RETRIEVAL = "perplexity", "retrieval"
"""Kinds of cells, in the order in which those of a row are measured."""

Values = Mapping[str, Any]
"""The values of a finished cell: those of its row, and what was measured."""


def row_of(cell: Values) -> EvaluationRow:
    """A finished cell as a row: of one document, or of some prompts.

    Raises:
        RopeExtendError: the values are those of no finished cell.
        KeyError, TypeError, AttributeError: likewise.
    """
    if cell["kind"] == PERPLEXITY:
        return EvaluationRow.from_dict(cell)
    trials = sorted(cell["trials"], key=lambda trial: trial["trial"])
    scores = [{**trial, "scores": [trial["score"]], "data": trial["prompt"]} for trial in trials]
    return EvaluationRow.from_dict({**cell, "retrieval": {**cell, "cells": scores}})


def collect(cells: Iterable[Values], labels: Sequence[str]) -> list[EvaluationRow]:
    """Put finished cells together as rows, on the documents that all of them have.

    Documents are known by their tokens: two files of one name in two folders are two documents. A row is left
    out if the others would share less than half of their documents with it. If no row has a document, those
    that answered prompts are the rows.

    Args:
        cells: the values of finished cells.
        labels: the labels of the rows, in order.
    """
    scored: dict[str, dict[str, PerplexityResult]] = {}
    answered: dict[str, list[RetrievalResult]] = {}
    about: dict[str, EvaluationRow] = {}
    for cell in sorted(cells, key=_trial):
        row = about[cell["label"]] = row_of(cell)
        if row.result:
            scored.setdefault(row.label, {})[row.result.data] = row.result
        else:
            answered.setdefault(row.label, []).append(row.retrieval)
    ranked = [label for label in labels if label in scored]
    ranked.sort(key=lambda label: len(scored[label]), reverse=True)
    begun, shared = list[str](), list[str]()
    for n in range(len(ranked), 0, -1):
        rows = [scored[label] for label in ranked[:n]]
        shared = [data for data in rows[0] if all(data in row for row in rows)]
        if 2 * len(shared) >= len(rows[0]):
            begun = [label for label in labels if label in ranked[:n]]
            break
    return [
        replace(
            about[label],
            result=merged([scored[label][data] for data in shared]) if begun else PerplexityResult(),
            retrieval=_merged_answers(answered.get(label, [])),
        )
        for label in begun or [label for label in labels if label in answered]
    ]


def _trial(cell: Values) -> int:
    """The number of the first trial of a cell; cells of documents stay in their order."""
    return min((trial["trial"] for trial in cell.get("trials", ())), default=0)


def merged(results: Sequence[PerplexityResult]) -> PerplexityResult:
    """One result from results on one document each, of the same model and lengths.

    Sums are over documents in order, as in a measurement of all of them together.
    """
    if len(results) < 2:
        return results[0] if results else PerplexityResult()
    first = results[0]
    layouts = [(each.measured_by, each.ppl.keys(), each.block_edges.tolist()) for each in results]
    if any(layout != layouts[0] for layout in layouts):
        raise RopeExtendError(
            "a row was measured by two protocols, or in different blocks of tokens, as by two versions of "
            "rope_extend; delete the finished cells of one of them"
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
        document_nll=nll,
        document_terms=terms,
        **_cost(results),
    )


def _merged_answers(parts: Sequence[RetrievalResult]) -> RetrievalResult:
    """One result from the answers to a few prompts each, in order."""
    if not parts:
        return RetrievalResult()
    groups: dict[tuple[str, int, float | None], list[Scores]] = {}
    for part in parts:
        for each in part.cells:
            groups.setdefault((each.task, each.length, each.depth), []).append(each)
    cells = tuple(
        replace(
            group[0],
            scores=tuple(score for each in group for score in each.scores),
            data=joined_fingerprint(str(each.data) for each in group),
        )
        for group in groups.values()
    )
    return RetrievalResult(cells, parts[0].crop, **_cost(parts))


def _cost(parts: Sequence[PerplexityResult] | Sequence[RetrievalResult]) -> dict[str, Any]:
    """The cost of several parts together."""
    return {
        "forward_tokens": sum(part.forward_tokens for part in parts),
        "seconds": sum(part.seconds for part in parts),
        "peak_memory_bytes": max(part.peak_memory_bytes for part in parts),
    }
