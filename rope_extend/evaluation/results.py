"""Results of measurements: plain records that are written to files, read back, compared and plotted."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import statistics
from rope_extend.evaluation.statistics import Rate, RateDifference, paired_rates
from rope_extend.files import replacing

Floats = np.ndarray[Any, np.dtype[np.float64]]
Losses = np.ndarray[Any, np.dtype[np.float32]]

SUCCESS = 0.2
"""Share of trials that must succeed at a distance, in the definition of `k_max` (2306.15595)."""


@dataclass(frozen=True, eq=False)
class PerplexityResult:
    """Perplexity of one model on one set of documents, at several lengths.

    Attributes:
        ppl: perplexity by length N in tokens: exp(sum of the losses / number of scored tokens). The protocol
            `prefix` scores the targets at positions 1 … N−1 of each document, because position 0 has no
            context. Protocols that average windows give exp(mean of their mean losses).
        tokens: number of scored tokens by length, (N − 1) × `documents` for `prefix`.
        nll_by_position: float64 `[max_length − 1]`, nats; entry p is the mean loss of the target at position
            p + 1, from the pass over the longest length. Positions count from the start of the document for
            `prefix` and `cropped`, else from the start of the window. NaN if nothing was scored.
        protocol: its name, as in `rope_extend.evaluation.protocols`.
        window: tokens of context, if the context was cropped; else None.
        documents: number of documents that were long enough. All of them were scored in full.
        dropped_documents: number of documents that were too short.
        data: fingerprint of the scored token sequences. Results can be compared only if it is equal.
        passes: forwards per document: one for each group of lengths with equal position tables.
        forward_tokens: total number of tokens that the model processed.
        seconds: wall time of all documents, including those of an interrupted measurement. With several
            processes, the time of the slowest.
        peak_memory_bytes: peak allocation during the run on CUDA; elsewhere the peak resident size of the
            process so far.
        stride: the protocol's setting, in tokens, if it has one.
        last: the protocol's setting, in tokens, if it has one.
        scored_by_position: int64, the number of losses in each entry of `nll_by_position`; None if each entry
            has one loss of every document.
        document_nll: by length, the sum of each document's losses in nats (of the mean losses of its
            windows, for protocols that average windows). Intervals and paired comparisons need it.
        document_terms: number of losses (or windows) in each of these sums.
        losses: by the longest length of each pass, the losses of each document's targets in nats, float32,
            window by window; None unless requested. Never part of `to_dict`.
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
        """Cost of the measurement: a little over 1 for one pass, about 2 for the protocol `cropped`."""
        return self.forward_tokens / self.tokens[self.max_length]

    @property
    def cropped(self) -> bool:
        """Whether the context was cropped. Then this is a control, not a result."""
        return self.window is not None

    @property
    def tokens_per_second(self) -> float:
        """Processed tokens per second."""
        return self.forward_tokens / self.seconds if self.seconds else math.inf

    def within(self, window: int) -> float:
        """Perplexity over the targets at positions below `window`."""
        return self._mean(slice(0, max(window, 1) - 1), f"below {window}")

    def beyond(self, window: int) -> float:
        """Perplexity over the targets at positions `window` and above, which were never seen in training."""
        return self._mean(slice(max(window, 1) - 1, None), f"from {window} on")

    def _mean(self, positions: slice, description: str) -> float:
        mean, scored = statistics.mean_over(self.nll_by_position, self.scored_by_position, positions)
        if scored == 0:
            raise RopeExtendError(
                f"no scored position {description}: this result covers positions 1 to "
                f"{len(self.nll_by_position)}"
            )
        return statistics.ppl(mean)

    def interval(self, length: int) -> tuple[float, float] | None:
        """95 % interval of the perplexity at a length, over documents.

        None for fewer than three documents, and for results without sums by document.
        """
        if self.document_nll is None or self.document_terms is None:
            return None
        ends = statistics.mean_interval(self.document_nll[length], self.document_terms[length])
        return None if ends is None else (statistics.ppl(ends[0]), statistics.ppl(ends[1]))

    def repeated(self, length: int, lengths: Sequence[int]) -> Self:
        """The control with cropped context: the result at `length`, repeated at all longer `lengths`.

        It is valid for protocols that score the same targets at every length.
        """

        def spread(values: dict[int, Any]) -> dict[int, Any]:
            return {n: values[length] for n in lengths if n >= length}

        return replace(
            self,
            window=length,
            ppl=spread(self.ppl),
            tokens=spread(self.tokens),
            document_nll=spread(self.document_nll) if self.document_nll else None,
            document_terms=spread(self.document_terms) if self.document_terms else None,
        )

    def buckets(self) -> list[statistics.Bucket]:
        """Perplexity by position, in ranges that double up to the longest length."""
        scored = self.scored_by_position
        if scored is None:
            scored = np.full(len(self.nll_by_position), self.documents)
        return statistics.buckets(self.nll_by_position, scored)

    def write_losses(self, path: str | Path) -> Path:
        """Write the losses of all tokens as `.npz`, float32.

        For the longest length N of each pass: `losses_N` `[scored tokens]` in nats, document by document and
        window by window, and `offsets_N` int64 `[documents + 1]`, the start of each document.

        Raises:
            RopeExtendError: the losses were not kept; `perplexity(..., save_losses=True)` keeps them.
        """
        if self.losses is None:
            raise RopeExtendError("this result has no losses by token; measure again with save_losses=True")
        arrays: dict[str, Any] = {}
        for length, losses in self.losses.items():
            arrays[f"losses_{length}"] = np.concatenate(losses)
            arrays[f"offsets_{length}"] = np.cumsum([0, *map(len, losses)])
        return write_arrays(Path(path), arrays)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts. NaN and infinity become None, because JSON has neither."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "losses"}
        values["ppl"] = {str(length): or_none(value) for length, value in self.ppl.items()}
        values["tokens"] = {str(length): count for length, count in self.tokens.items()}
        values["nll_by_position"] = [or_none(value) for value in self.nll_by_position.tolist()]
        if self.scored_by_position is not None:
            values["scored_by_position"] = self.scored_by_position.tolist()
        if self.document_nll is not None:
            values["document_nll"] = {
                str(length): [or_none(value) for value in sums] for length, sums in self.document_nll.items()
            }
        if self.document_terms is not None:
            values["document_terms"] = {str(length): terms for length, terms in self.document_terms.items()}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_dict`."""
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


@dataclass(frozen=True)
class Subject:
    """The model that a row was measured on, and the row's label.

    Attributes:
        label: name of the row in tables and legends.
        encoding: the position encoding's `to_dict()`; None for the checkpoint's own.
        model: name or path of the model.
        adapter: name or path of the adapter; None without fine-tuning.
        trained_length: the pretrained window in tokens, if known.
        rope_parameters: the `rope_parameters` of the checkpoint's config, if its own encoding is used.
    """

    label: str
    encoding: dict[str, Any] | None = None
    model: str = ""
    adapter: str | None = None
    trained_length: int | None = None
    rope_parameters: dict[str, Any] | None = None


class _Encoded:
    """What a row says of its position encoding."""

    encoding: dict[str, Any] | None
    rope_parameters: dict[str, Any] | None

    @property
    def method(self) -> str:
        """Name of the encoding; `none` for the checkpoint's own."""
        return "none" if self.encoding is None else str(self.encoding["name"])

    @property
    def is_extended(self) -> bool:
        """Whether positions are encoded otherwise than by plain RoPE, also by the checkpoint's own config."""
        if self.encoding is not None:
            return self.method != "none"
        own = self.rope_parameters or {}
        layers = [own, *(inner for inner in own.values() if isinstance(inner, dict))]
        return any(
            each.get("rope_type", "default") not in ("default", "proportional") or each.get("factor", 1) != 1
            for each in layers
        )

    @property
    def encoding_text(self) -> str:
        """The encoding as text, such as `yarn(factor=8.0)`.

        For the checkpoint's own encoding, the values of its config, if known.
        """
        values = dict(self.encoding or self.rope_parameters or {})
        if not values:
            return "as in the checkpoint"
        name = values.pop("name" if self.encoding else "rope_type", None)
        text = f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})"
        return text if self.encoding else f"as in the checkpoint: {text}"


class Sample(NamedTuple):
    """How a model continues a document: the most likely tokens.

    Attributes:
        document: name of the document.
        tokens: number of the document's tokens that the model saw.
        before: the end of what it saw.
        written: how the document goes on.
        generated: how the model goes on.
    """

    document: str
    tokens: int
    before: str
    written: str
    generated: str


@dataclass(frozen=True, eq=False)
class EvaluationRow(_Encoded):
    """One row of a comparison: a model, its perplexity, its retrieval, and how it continues documents.

    Attributes:
        label: name of the row in tables and legends.
        encoding: the position encoding's `to_dict()`; None for the checkpoint's own.
        model: name or path of the model.
        adapter: name or path of the adapter; None without fine-tuning.
        result: the perplexity.
        trained_length: the pretrained window in tokens, if known.
        rope_parameters: the `rope_parameters` of the checkpoint's config, if its own encoding is used.
        retrieval: retrieval within the trained window, and at further lengths, if measured.
        samples: continuations of documents, if asked for.
        target_length: the window that the adapter was trained for, in tokens; None if untrained or unknown.
    """

    label: str
    encoding: dict[str, Any] | None
    model: str
    adapter: str | None
    result: PerplexityResult
    trained_length: int | None = None
    rope_parameters: dict[str, Any] | None = None
    retrieval: RetrievalResult | None = None
    samples: tuple[Sample, ...] = ()
    target_length: int | None = None

    @classmethod
    def of(cls, subject: Subject, result: PerplexityResult, retrieval: RetrievalResult | None = None) -> Self:
        """The row of a model that was measured."""
        return cls(**vars(subject), result=result, retrieval=retrieval)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        retrieval = self.retrieval.to_dict() if self.retrieval else None
        values = {**vars(self), "result": self.result.to_dict(), "retrieval": retrieval}
        samples = [sample._asdict() for sample in self.samples]
        for name, value in (("samples", samples), ("target_length", self.target_length)):
            del values[name]
            values |= {name: value} if value else {}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_dict`; other keys, such as versions, are ignored."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        known["result"] = PerplexityResult.from_dict(values["result"])
        if known.get("retrieval"):
            known["retrieval"] = RetrievalResult.from_dict(values["retrieval"])
        known["samples"] = tuple(Sample(**sample) for sample in values.get("samples", ()))
        return cls(**known)


@dataclass(frozen=True)
class Cell:
    """All trials of one task at one length and depth.

    Attributes:
        task: the task's name.
        length: tokens of prompt and answer.
        depth: 0 … 1; None for tasks without a depth.
        distance: tokens from the needle to the end of the prompt, the minimum of the trials; None for tasks
            without a needle.
        scores: scores of the trials, in order.
        data: fingerprint of the prompts. Scores can be compared only if it is equal.
    """

    task: str
    length: int
    depth: float | None
    distance: int | None
    scores: tuple[float, ...]
    data: str | None = None

    @property
    def rate(self) -> Rate:
        """Mean score and its interval."""
        return Rate.of(self.scores)


@dataclass(frozen=True)
class RetrievalResult(_Encoded):
    """Retrieval by one model with one encoding.

    Attributes:
        label: name of the row in tables and legends.
        cells: one for each task, length and depth.
        encoding: the position encoding's `to_dict()`; None for the checkpoint's own.
        model: name or path of the model.
        adapter: name or path of the adapter; None without fine-tuning.
        trained_length: the pretrained window in tokens, if known.
        crop: number of a prompt's last tokens that the model saw; None for all of them.
        rope_parameters: the `rope_parameters` of the checkpoint's config, if its own encoding is used.
        seconds: wall time, without the part that an earlier run had finished.
        forward_tokens: prompt tokens processed, without the part that an earlier run had finished.
        peak_memory_bytes: peak allocation during the run on CUDA; elsewhere the peak resident size of the
            process so far.
    """

    label: str
    cells: tuple[Cell, ...]
    encoding: dict[str, Any] | None = None
    model: str = ""
    adapter: str | None = None
    trained_length: int | None = None
    crop: int | None = None
    rope_parameters: dict[str, Any] | None = None
    seconds: float = field(default=0.0, compare=False)
    forward_tokens: int = field(default=0, compare=False)
    peak_memory_bytes: int = field(default=0, compare=False)

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens per second."""
        return self.forward_tokens / self.seconds if self.seconds else math.inf

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return list(dict.fromkeys(cell.task for cell in self.cells))

    def lengths(self, task: str) -> list[int]:
        """Lengths at which a task was measured, ascending."""
        return sorted({cell.length for cell in self.cells if cell.task == task})

    def depths(self, task: str) -> list[float]:
        """Depths at which a task was measured, ascending; empty if it has none."""
        return sorted({cell.depth for cell in self.cells if cell.task == task and cell.depth is not None})

    def rate(self, task: str, length: int, depth: float | None = None) -> Rate | None:
        """Mean score at a length, over all depths or at one; None if nothing was measured."""
        scores = [
            score for cell in self.at(task, length) if depth in (None, cell.depth) for score in cell.scores
        ]
        return Rate.of(scores) if scores else None

    def at(self, task: str, length: int) -> list[Cell]:
        """The cells of a task at a length, by depth."""
        cells = [cell for cell in self.cells if cell.task == task and cell.length == length]
        return sorted(cells, key=lambda cell: cell.depth or 0)

    def against(self, first: RetrievalResult, task: str, length: int) -> RateDifference | None:
        """How the scores differ from those of `first` on the same prompts; None if the prompts differ."""
        before, after = first.at(task, length), self.at(task, length)
        if not before or [cell.data for cell in before] != [cell.data for cell in after]:
            return None
        if any(cell.data is None for cell in before):
            return None
        return paired_rates(
            *([score for cell in cells for score in cell.scores] for cells in (before, after))
        )

    def k_max(self, length: int | None = None, task: str = "passkey") -> int | None:
        """The effective window of 2306.15595, in tokens; None if the task was not measured.

        The largest distance k between the key and the end of the prompt such that at every k' ≤ k at least
        20 % of the trials succeed. It is measured in prompts of `length`, by default the longest. 0 if the
        nearest distance fails.
        """
        if length is None:
            length = max(self.lengths(task), default=None)
        reached = 0
        cells = self.at(task, length) if length is not None else []
        if not cells or any(cell.distance is None for cell in cells):
            return None
        for cell in sorted(cells, key=lambda cell: cell.distance or 0):
            if cell.rate.mean < SUCCESS:
                break
            reached = cell.distance or 0
        return reached

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; includes the rates and `k_max` for other readers."""
        cells = [
            {**asdict(cell), "scores": list(cell.scores), "rate": asdict(cell.rate)} for cell in self.cells
        ]
        k_max = {str(length): self.k_max(length) for length in self.lengths("passkey")}
        speed = or_none(self.tokens_per_second)
        return {**vars(self), "cells": cells, "k_max": k_max, "tokens_per_second": speed}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        cells = tuple(
            Cell(
                **{
                    **{name: cell[name] for name in Cell.__dataclass_fields__ if name in cell},
                    "scores": tuple(cell["scores"]),
                }
            )
            for cell in values["cells"]
        )
        return cls(**{**known, "cells": cells})


def file_name(label: str) -> str:
    """A file name from a row's label; different labels give different names."""
    digest = hashlib.sha256(label.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', label).strip('-')}-{digest}"


def write_arrays(path: Path, arrays: dict[str, Any]) -> Path:
    """Write an `.npz` file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)
    return path


def or_none(value: float) -> float | None:
    """The number, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
