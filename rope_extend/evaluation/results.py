"""What measurements give: plain records that are written to files, read back, compared and drawn."""

from __future__ import annotations

import hashlib
import math
import os
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import statistics
from rope_extend.evaluation.statistics import Rate

Floats = np.ndarray[Any, np.dtype[np.float64]]
Losses = np.ndarray[Any, np.dtype[np.float32]]

SUCCESS = 0.2
"""The share of trials that has to succeed at a distance, in the definition of ``k_max`` (2306.15595)."""


# ------------------------------------------------------------------------------------------- perplexity


@dataclass(frozen=True, eq=False)
class PerplexityResult:
    """Perplexity of one model on one set of documents, at several lengths.

    Attributes:
        ppl: perplexity by length N in tokens: exp(sum of the losses / number of scored tokens), under
            ``prefix`` over the targets at positions 1 … N−1 of each document. Position 0 has nothing before
            it. Under protocols that average windows, exp(mean of their mean losses).
        tokens: number of scored tokens by length, (N − 1) × ``documents`` under ``prefix``.
        nll_by_position: float64 ``[max_length − 1]``, nats; entry p is the mean loss of the target at
            position p + 1, from the pass over the longest length. Positions are those in the document under
            ``prefix`` and ``cropped``, else those in the window. NaN where nothing was scored.
        protocol: its name, as in :mod:`rope_extend.evaluation.protocols`.
        window: tokens the model saw at a time under ``"cropped"``; None otherwise.
        documents: number of documents that were long enough, all of them scored in full.
        dropped_documents: number of documents that were not.
        data: fingerprint of the scored token sequences; results compare only where it is equal.
        passes: forwards per document: one for each group of lengths with equal position tables.
        forward_tokens: tokens that went through the model in all.
        seconds: wall time of the documents, those of an interrupted measurement included.
        peak_memory_bytes: highest allocation during the run on CUDA; elsewhere the highest resident size of
            the process so far.
        stride: the protocol's setting, in tokens, where it has one.
        last: the same.
        scored_by_position: int64, how many losses are in each entry of ``nll_by_position``; None where all
            have one of each document.
        document_nll: by length, for each document the sum of its losses in nats (of its windows' mean
            losses, under protocols that average windows): what intervals and paired comparisons need.
        document_terms: how many losses (or windows) are in each of these sums.
        losses: by the longest length of each pass, the losses of each document's targets in nats, float32,
            window by window; only where they were asked for. Never part of :meth:`to_dict`.
    """

    ppl: dict[int, float]
    tokens: dict[int, int]
    nll_by_position: Floats
    protocol: str
    window: int | None
    documents: int
    dropped_documents: int
    data: str
    passes: int
    forward_tokens: int
    seconds: float
    peak_memory_bytes: int
    stride: int | None = None
    last: int | None = None
    scored_by_position: np.ndarray[Any, np.dtype[np.int64]] | None = None
    document_nll: dict[int, list[float]] | None = None
    document_terms: dict[int, list[int]] | None = None
    losses: dict[int, list[Losses]] | None = None

    @property
    def max_length(self) -> int:
        """The longest length, in tokens."""
        return max(self.ppl)

    @property
    def forward_tokens_per_scored_token(self) -> float:
        """What the measurement cost: a little over 1 for one pass, about 2 under ``"cropped"``."""
        return self.forward_tokens / self.tokens[self.max_length]

    @property
    def tokens_per_second(self) -> float:
        """Forward tokens per second."""
        return self.forward_tokens / self.seconds if self.seconds else math.inf

    def within(self, window: int) -> float:
        """Perplexity over the targets at positions below ``window``."""
        return self._mean(slice(0, max(window, 1) - 1), f"below {window}")

    def beyond(self, window: int) -> float:
        """Perplexity over the targets at positions ``window`` and above: those never seen in training."""
        return self._mean(slice(max(window, 1) - 1, None), f"from {window} on")

    def _mean(self, where: slice, words: str) -> float:
        mean, scored = statistics.mean_over(self.nll_by_position, self.scored_by_position, where)
        if scored == 0:
            raise RopeExtendError(
                f"no scored position {words}: this result covers the positions 1 to "
                f"{len(self.nll_by_position)}"
            )
        return statistics.ppl(mean)

    def interval(self, length: int) -> tuple[float, float] | None:
        """95 % interval of the perplexity at a length, by bootstrap over documents with a fixed seed.

        None with fewer than two documents, and for results that keep no sums by document.
        """
        if self.document_nll is None or self.document_terms is None:
            return None
        found = statistics.bootstrap(self.document_nll[length], self.document_terms[length])
        return None if found is None else (statistics.ppl(found[0]), statistics.ppl(found[1]))

    def buckets(self) -> list[statistics.Bucket]:
        """Perplexity by position, in ranges that double up to the longest length."""
        scored = self.scored_by_position
        if scored is None:
            scored = np.full(len(self.nll_by_position), self.documents)
        return statistics.buckets(self.nll_by_position, scored)

    def write_losses(self, path: str | Path) -> Path:
        """Write the losses of all tokens as ``.npz``, float32.

        For the longest length N of each pass: ``losses_N`` ``[scored tokens]`` in nats, document after
        document and window after window, and ``offsets_N`` int64 ``[documents + 1]``, where each starts.

        Raises:
            RopeExtendError: they were not kept; ``perplexity(..., save_losses=True)`` keeps them.
        """
        if self.losses is None:
            raise RopeExtendError("this result has no losses by token; measure with save_losses=True")
        arrays: dict[str, Any] = {}
        for length, losses in self.losses.items():
            arrays[f"losses_{length}"] = np.concatenate(losses)
            arrays[f"offsets_{length}"] = np.cumsum([0, *map(len, losses)])
        return write_arrays(Path(path), arrays)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; what is not finite becomes None, as JSON has no NaN."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "losses"}
        values["ppl"] = {str(length): _or_none(value) for length, value in self.ppl.items()}
        values["tokens"] = {str(length): count for length, count in self.tokens.items()}
        values["nll_by_position"] = [_or_none(value) for value in self.nll_by_position.tolist()]
        if self.scored_by_position is not None:
            values["scored_by_position"] = self.scored_by_position.tolist()
        if self.document_nll is not None:
            values["document_nll"] = {
                str(length): [_or_none(value) for value in sums] for length, sums in self.document_nll.items()
            }
        if self.document_terms is not None:
            values["document_terms"] = {str(length): terms for length, terms in self.document_terms.items()}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`."""
        values = dict(values)
        values["ppl"] = {int(k): math.nan if v is None else v for k, v in values["ppl"].items()}
        values["tokens"] = {int(k): v for k, v in values["tokens"].items()}
        values["nll_by_position"] = np.array(values["nll_by_position"], dtype=np.float64)  # None is NaN
        if values.get("scored_by_position") is not None:
            values["scored_by_position"] = np.array(values["scored_by_position"], dtype=np.int64)
        if values.get("document_nll") is not None:
            values["document_nll"] = {
                int(k): [math.nan if value is None else value for value in sums]
                for k, sums in values["document_nll"].items()
            }
        if values.get("document_terms") is not None:
            values["document_terms"] = {int(k): terms for k, terms in values["document_terms"].items()}
        return cls(**values)


@dataclass(frozen=True, eq=False)
class EvaluationRow:
    """One line of a comparison: what was measured, and what came out.

    Attributes:
        label: how tables and legends call it.
        encoding: the position encoding's ``to_dict()``; None for the model as it is.
        model: name or path of the model.
        adapter: name or path of the adapter; None if the model was not fine-tuned.
        result: the measurement.
        trained_length: the window the model was pretrained with, in tokens, where known.
    """

    label: str
    encoding: dict[str, Any] | None
    model: str
    adapter: str | None
    result: PerplexityResult
    trained_length: int | None = None

    @property
    def method(self) -> str:
        """Registry name of the encoding, ``"none"`` for the model as it is."""
        return "none" if self.encoding is None else str(self.encoding["name"])

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {**vars(self), "result": self.result.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`; what it does not know, such as versions, is left aside."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**{**known, "result": PerplexityResult.from_dict(values["result"])})


# -------------------------------------------------------------------------------------------- retrieval


@dataclass(frozen=True)
class Cell:
    """All trials of one task at one length and depth.

    Attributes:
        task: the task's name.
        length: tokens of prompt and answer.
        depth: 0 … 1; None for tasks without a depth.
        distance: tokens from the needle to the end of the prompt, the least of the trials; None without one.
        scores: of the trials, in order.
    """

    task: str
    length: int
    depth: float | None
    distance: int | None
    scores: tuple[float, ...]

    @property
    def rate(self) -> Rate:
        """Mean score and its interval."""
        return Rate.of(self.scores)


@dataclass(frozen=True)
class RetrievalResult:
    """What one model, read in one way, retrieved.

    Attributes:
        label: how tables and legends call it.
        cells: one for each task, length and depth.
        encoding: the position encoding's ``to_dict()``; None for the model as it is.
        model: name or path of the model.
        adapter: name or path of the adapter; None if the model was not fine-tuned.
        trained_length: the window the model was pretrained with, in tokens, where known.
        crop: how many of a prompt's last tokens the model saw; None for all of them.
        seconds: wall time, less what an earlier run had done.
    """

    label: str
    cells: tuple[Cell, ...]
    encoding: dict[str, Any] | None = None
    model: str = ""
    adapter: str | None = None
    trained_length: int | None = None
    crop: int | None = None
    seconds: float = field(default=0.0, compare=False)

    @property
    def method(self) -> str:
        """Registry name of the encoding, ``"none"`` for the model as it is."""
        return "none" if self.encoding is None else str(self.encoding["name"])

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return list(dict.fromkeys(cell.task for cell in self.cells))

    def lengths(self, task: str) -> list[int]:
        """Lengths at which a task was tried, ascending."""
        return sorted({cell.length for cell in self.cells if cell.task == task})

    def depths(self, task: str) -> list[float]:
        """Depths at which a task was tried, ascending; empty if it has none."""
        return sorted({cell.depth for cell in self.cells if cell.task == task and cell.depth is not None})

    def rate(self, task: str, length: int, depth: float | None = None) -> Rate | None:
        """Mean score at a length, over all depths or at one; None where nothing was measured."""
        scores = [
            score
            for cell in self.cells
            if cell.task == task and cell.length == length and depth in (None, cell.depth)
            for score in cell.scores
        ]
        return Rate.of(scores) if scores else None

    def k_max(self, length: int | None = None, task: str = "passkey") -> int | None:
        """The effective window of 2306.15595, in tokens; None if the task was not measured.

        The largest distance k between the key and the end of the prompt such that at every k' ≤ k at least
        20 % of the trials succeed; in prompts of ``length``, by default the longest. 0 if the nearest fails.
        """
        lengths = self.lengths(task)
        wanted = length if length is not None else max(lengths, default=None)
        reached = 0
        cells = [cell for cell in self.cells if cell.task == task and cell.length == wanted]
        if not cells or any(cell.distance is None for cell in cells):
            return None
        for cell in sorted(cells, key=lambda cell: cell.distance or 0):
            if cell.rate.mean < SUCCESS:
                break
            reached = cell.distance or 0
        return reached

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; the rates and ``k_max`` are in it to be read."""
        cells = [
            {**asdict(cell), "scores": list(cell.scores), "rate": asdict(cell.rate)} for cell in self.cells
        ]
        k_max = {str(length): self.k_max(length) for length in self.lengths("passkey")}
        return {**vars(self), "cells": cells, "k_max": k_max}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        cells = tuple(
            Cell(
                **{
                    **{name: cell[name] for name in Cell.__dataclass_fields__},
                    "scores": tuple(cell["scores"]),
                }
            )
            for cell in values["cells"]
        )
        return cls(**{**known, "cells": cells})


# ------------------------------------------------------------------------------------------------ files


def file_name(label: str) -> str:
    """A row's label as the name of a file, different for different labels."""
    digest = hashlib.sha256(label.encode()).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', label).strip('-')}-{digest}"


def write_arrays(path: Path, arrays: dict[str, Any]) -> Path:
    """Write an ``.npz`` so that it is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(path.name + ".tmp")
    with whole.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(whole, path)
    return path


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
