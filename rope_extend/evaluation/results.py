"""Results of measurements: plain records that are written to files, read back, compared and plotted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import statistics
from rope_extend.evaluation.protocols import protocol_named
from rope_extend.evaluation.statistics import Rate, RateDifference, paired_rates, plain

Floats = np.ndarray[Any, np.dtype[np.float64]]
Losses = np.ndarray[Any, np.dtype[np.float32]]

SUCCESS = 0.2
"""Share of trials that must succeed at a distance, in the definition of `k_max` (2306.15595)."""


@dataclass(frozen=True, eq=False)
class PerplexityResult:
    """Perplexity of one model on one set of documents, at several lengths; false if nothing was measured.

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

    ppl: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    nll_by_position: Floats = field(default_factory=lambda: np.zeros(0))
    protocol: str = "prefix"
    window: int | None = None
    documents: int = 0
    dropped_documents: int = 0
    data: str = ""
    passes: int = 0
    forward_tokens: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    stride: int | None = None
    last: int | None = None
    scored_by_position: np.ndarray[Any, np.dtype[np.int64]] | None = None
    document_nll: dict[int, list[float]] = field(default_factory=dict)
    document_terms: dict[int, list[int]] = field(default_factory=dict)
    losses: dict[int, list[Losses]] | None = None

    def __bool__(self) -> bool:
        return bool(self.ppl)

    @property
    def max_length(self) -> int:
        """The longest length, in tokens."""
        return max(self.ppl)

    @property
    def cropped(self) -> bool:
        """Whether the context was cropped. Then this is a control, not a result."""
        return self.window is not None

    @property
    def tokens_per_second(self) -> float:
        """Processed tokens per second."""
        return self.forward_tokens / self.seconds if self.seconds else math.inf

    @property
    def settings(self) -> dict[str, int]:
        """The settings of the protocol: `window`, `stride` or `last`, in tokens."""
        values = {"window": self.window, "stride": self.stride, "last": self.last}
        return {name: value for name, value in values.items() if value is not None}

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
        """95 % interval of the perplexity at a length, over documents; None for fewer than three."""
        ends = statistics.mean_interval(
            self.document_nll.get(length, ()), self.document_terms.get(length, ())
        )
        return None if ends is None else (statistics.ppl(ends[0]), statistics.ppl(ends[1]))

    def repeated(self, length: int, lengths: Sequence[int]) -> Self:
        """The control with cropped context: the result at `length`, repeated at all longer `lengths`.

        It is valid for protocols that score the same targets at every length.
        """
        spread: dict[str, Any] = {
            name: {n: values[length] for n in lengths if n >= length}
            for name in ("ppl", "tokens", "document_nll", "document_terms")
            if (values := getattr(self, name))
        }
        return replace(self, window=length, **spread)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts. NaN and infinity become None, because JSON has neither."""
        return {item.name: plain(getattr(self, item.name)) for item in fields(self) if item.name != "losses"}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_dict`; raises ValueError, TypeError or KeyError for anything else."""
        made = cls(**_read(_PERPLEXITY, values))
        protocol_named(made.protocol)
        positions = made.nll_by_position if made.scored_by_position is None else made.scored_by_position
        _require(bool(made.ppl) and made.ppl.keys() == made.tokens.keys() and all(made.tokens.values()))
        _require(made.documents > 0 and made.document_nll.keys() == made.document_terms.keys())
        _require(len(positions) == len(made.nll_by_position))
        for length, counts in made.document_terms.items():
            _require(length in made.ppl and len(counts) == len(made.document_nll[length]) and sum(counts) > 0)
        return made


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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From plain values; raises ValueError, TypeError or KeyError for others."""
        made = cls(**_read(_CELL, values))
        _require(bool(made.scores) and all(0 <= score <= 1 for score in made.scores))
        return made


@dataclass(frozen=True)
class RetrievalResult:
    """Retrieval by one model with one encoding; false if nothing was measured.

    Attributes:
        cells: one for each task, length and depth.
        crop: number of a prompt's last tokens that the model saw; None for all of them.
        seconds: wall time, including that of an interrupted measurement.
        forward_tokens: prompt tokens processed.
        peak_memory_bytes: peak allocation during the run on CUDA; elsewhere the peak resident size of the
            process so far.
    """

    cells: tuple[Cell, ...] = ()
    crop: int | None = None
    seconds: float = field(default=0.0, compare=False)
    forward_tokens: int = field(default=0, compare=False)
    peak_memory_bytes: int = field(default=0, compare=False)

    def __bool__(self) -> bool:
        return bool(self.cells)

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
        cells = [{**asdict(cell), "rate": asdict(cell.rate)} for cell in self.cells]
        k_max = {length: self.k_max(length) for length in self.lengths("passkey")}
        found: dict[str, Any] = plain(
            {**vars(self), "cells": cells, "k_max": k_max, "tokens_per_second": self.tokens_per_second}
        )
        return found

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_dict`; raises ValueError, TypeError or KeyError for anything else."""
        return cls(**_read(_RETRIEVAL, values))


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
class EvaluationRow:
    """One row of a comparison: a model, its perplexity, its retrieval, and how it continues documents.

    Attributes:
        label: name of the row in tables and legends.
        encoding: the position encoding's `to_dict()`; None for the checkpoint's own.
        model: name or path of the model.
        adapter: name or path of the adapter; None without fine-tuning.
        result: the perplexity; empty, and so false, if it was not measured.
        trained_length: the pretrained window in tokens, if known.
        rope_parameters: the `rope_parameters` of the checkpoint's config, if its own encoding is used.
        retrieval: retrieval at each length; empty, and so false, if it was not measured.
        samples: continuations of documents, if asked for.
        target_length: the window that the adapter was trained for, in tokens; None if untrained or unknown.
    """

    label: str
    encoding: dict[str, Any] | None = None
    model: str = ""
    adapter: str | None = None
    result: PerplexityResult = field(default_factory=PerplexityResult)
    trained_length: int | None = None
    rope_parameters: dict[str, Any] | None = None
    retrieval: RetrievalResult = RetrievalResult()
    samples: tuple[Sample, ...] = ()
    target_length: int | None = None

    @property
    def method(self) -> str:
        """Name of the encoding; `none` for the checkpoint's own."""
        return "none" if self.encoding is None else str(self.encoding["name"])

    @property
    def cropped(self) -> bool:
        """Whether the context was cropped. Then this is a control, not a result."""
        return self.result.cropped or self.retrieval.crop is not None

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

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {
            **vars(self),
            "result": self.result.to_dict() if self.result else None,
            "retrieval": self.retrieval.to_dict() if self.retrieval else None,
            "samples": [sample._asdict() for sample in self.samples],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_dict`; other keys, such as versions, are ignored.

        Raises:
            RopeExtendError: the values are not those of a row.
        """
        try:
            made = cls(**_read(_ROW, values))
            _require(made.encoding is None or isinstance(made.encoding["name"], str))
            return made
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise RopeExtendError(f"not a row of results: {type(error).__name__}: {error}") from error


Reader = Callable[[Any], Any]
"""Makes a value of a plain one, and raises ValueError, TypeError or KeyError for a damaged one."""


def _read(readers: Mapping[str, Reader], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: reader(values.get(name)) for name, reader in readers.items()}


def _require(ok: bool) -> None:
    if not ok:
        raise ValueError("the numbers contradict each other")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text is needed, not {value!r:.40}")
    return value


def _number(value: Any) -> float:
    """A number; NaN for None, as `or_none` writes it."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise TypeError(f"a number is needed, not {value!r:.40}")
    return math.nan if value is None else float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise TypeError(f"a whole number is needed, not {value!r:.40}")
    return value


def _length(value: Any) -> int:
    if not 0 < _count(value) < 2**40:
        raise ValueError(f"{value} is not a number of tokens")
    return int(value)


def _optional(reader: Reader, default: Any = None) -> Reader:
    return lambda value: default if value is None else reader(value)


def _list(reader: Reader) -> Reader:
    return lambda values: [*map(reader, values)]


def _by_length(reader: Reader) -> Reader:
    def read(values: Mapping[str, Any]) -> dict[int, Any]:
        if any(len(length) > 15 for length in values):
            raise ValueError("not numbers of tokens")
        return {_length(int(length)): reader(value) for length, value in values.items()}

    return read


_PERPLEXITY: Mapping[str, Reader] = {
    "ppl": _by_length(_number),
    "tokens": _by_length(_count),
    "nll_by_position": lambda values: np.array(_list(_number)(values), dtype=np.float64),
    "scored_by_position": _optional(lambda values: np.array(_list(_count)(values), dtype=np.int64)),
    "document_nll": _by_length(_list(_number)),
    "document_terms": _by_length(_list(_count)),
    "seconds": _number,
    **dict.fromkeys(("protocol", "data"), _text),
    **dict.fromkeys(("documents", "dropped_documents", "passes", "forward_tokens"), _count),
    "peak_memory_bytes": _count,
    **dict.fromkeys(("window", "stride", "last"), _optional(_count)),
}
_CELL: Mapping[str, Reader] = {
    "task": _text,
    "length": _length,
    "depth": _optional(_number),
    "distance": _optional(_count),
    "scores": lambda values: tuple(map(_number, values)),
    "data": _optional(_text),
}
_RETRIEVAL: Mapping[str, Reader] = {
    "cells": lambda values: tuple(map(Cell.from_dict, values)),
    "crop": _optional(_count),
    "seconds": _number,
    "forward_tokens": _count,
    "peak_memory_bytes": _count,
}
_ROW: Mapping[str, Reader] = {
    "label": _text,
    "encoding": _optional(dict),
    "model": _text,
    "adapter": _optional(_text),
    "result": _optional(PerplexityResult.from_dict, PerplexityResult()),
    "trained_length": _optional(_length),
    "rope_parameters": _optional(dict),
    "retrieval": _optional(RetrievalResult.from_dict, RetrievalResult()),
    "samples": lambda values: tuple(Sample(**sample) for sample in values or ()),
    "target_length": _optional(_length),
}
"""The fields of each record in a file."""
