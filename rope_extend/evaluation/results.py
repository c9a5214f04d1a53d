"""Results of measurements: plain records that are written to files, read back, compared and plotted."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, NamedTuple, Self, get_args, get_origin, get_type_hints

import numpy as np

from rope_extend.evaluation import statistics
from rope_extend.evaluation.protocols import WEAK_CONTROL, control_targets, protocol_named
from rope_extend.evaluation.statistics import (
    Counts,
    Difference,
    Floats,
    Rate,
    RateDifference,
    paired,
    paired_rates,
    plain,
)
from rope_extend.units import counted, format_length

SAME_WEIGHTS = "none, same weights"
"""Label of plain RoPE with the weights of a checkpoint that was saved with another encoding."""

Losses = np.ndarray[Any, np.dtype[np.float32]]


def block_starts(lengths: Collection[int]) -> Counts:
    """First position of each block of losses: multiples of a power of two, at most 256, and each length."""
    longest = max(lengths)
    return np.union1d(np.arange(0, longest, 1 << max(0, (longest - 1).bit_length() - 8)), [*lengths])[:-1]


def control_edges(lengths: Collection[int], blocks: int, window: int | None = None) -> list[int]:
    """Ends of the targets of controls that are not among `block_starts`, ascending.

    They are kept apart, so that a result can be compared with a control on its targets alone. The window of
    a control can be any of the lengths, or `window`; the control scores `blocks` blocks of targets beyond it.
    """
    longest = max(lengths)
    windows = {*lengths, window or longest}
    targets = [(each, *ends) for each in windows for ends in control_targets(each, longest, blocks)]
    return sorted({end for ends in targets for end in ends} - {*block_starts(lengths).tolist(), longest})


class _FromPlain:
    """A dataclass that is made of plain values, as `json.loads` gives them, by the types of its fields."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; other keys, such as versions, are ignored. None is the default, if any.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, OverflowError: the values are no such record.
        """
        hints, found = get_type_hints(cls), {}
        for item in fields(cls):  # type: ignore[arg-type]
            value = values.get(item.name)
            if value is not None or (item.default is MISSING and item.default_factory is MISSING):
                found[item.name] = _value(hints[item.name], value)
        made = cls(**found)
        if not made._is_consistent():
            raise ValueError("the numbers contradict each other")
        return made

    def _is_consistent(self) -> bool:
        return True


class CommonTargets(NamedTuple):
    """The losses of a control and of another result on the targets of the control, in common blocks.

    Attributes:
        starts: int64 `[blocks]`, the first position of each block.
        control, result: float64 `[documents, blocks]`, the sums of losses in nats.
        terms: int64 `[documents, blocks]`, the number of losses in each sum.
    """

    starts: Counts
    control: Floats
    result: Floats
    terms: Counts


@dataclass(frozen=True, eq=False)
class PerplexityResult(_FromPlain):
    """Perplexity of one model on one set of documents, at several lengths; false if nothing was measured.

    Attributes:
        ppl: perplexity by length N in tokens: exp(sum of the losses / number of scored tokens). The protocol
            `prefix` scores the targets at positions 1 … N−1 of each document, because position 0 has no
            context. Protocols that average windows give exp(mean of their mean losses). A control whose
            blocks are not all targets beyond the window gives an estimate of that: they stand for the others.
        tokens: number of scored tokens by length, (N − 1) × `documents` for `prefix`.
        block_nll: float64 `[documents, blocks]`, the sum of each document's losses in nats in blocks of
            positions, see `block_edges`, from the pass over the longest length, to five decimals.
            Positions count from the start of the document for `prefix` and `cropped`, else of the window.
        block_terms: int64, the number of losses in each of these sums.
        protocol: its name, as in `rope_extend.evaluation.protocols`.
        window: tokens of context, if the context was cropped; else None.
        documents: number of documents that were long enough. All of them were scored in full.
        data: fingerprint of the scored token sequences. Results can be compared only if it is equal.
        passes: forwards per document: one for each group of lengths with equal position tables.
        forward_tokens: total number of tokens that the model processed.
        seconds: wall time of all documents.
        peak_memory_bytes: peak allocation on CUDA; elsewhere the peak resident size of the process so far.
        stride, last: settings of the protocol in tokens, if it has them.
        blocks: number of blocks of targets beyond the window, for `cropped`.
        edges: positions at which blocks begin in addition to `block_starts`, see `control_edges`.
        document_nll: by length, the sum of each document's losses in nats (of the mean losses of its
            windows, for protocols that average windows; as estimated, for `cropped`). Intervals and paired
            comparisons need it.
        document_terms: number of losses (or windows) in each of these sums.
        losses: by the longest length of each pass, the losses of each document's targets in nats, float32,
            window by window; None unless requested. Never part of `to_dict`.
    """

    ppl: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    block_nll: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    block_terms: Counts = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    protocol: str = "prefix"
    window: int | None = None
    documents: int = 0
    data: str = ""
    passes: int = 0
    forward_tokens: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    stride: int | None = None
    last: int | None = None
    blocks: int | None = None
    edges: list[int] = field(default_factory=list)
    document_nll: dict[int, list[float]] = field(default_factory=dict)
    document_terms: dict[int, list[int]] = field(default_factory=dict)
    losses: dict[int, list[Losses]] | None = None

    def __bool__(self) -> bool:
        return bool(self.ppl)

    def __repr__(self) -> str:
        found = ", ".join(f"{ppl:.2f} at {format_length(length)}" for length, ppl in self.ppl.items())
        documents = counted(self.documents, "document")
        return f"PerplexityResult({found or 'nothing'}; {documents}, protocol {self.protocol})"

    @property
    def max_length(self) -> int:
        """The longest length, in tokens."""
        return max(self.ppl)

    @property
    def block_edges(self) -> Counts:
        """First position of each block, and the end of the last; the measured lengths are among them."""
        return np.append(np.union1d(block_starts(self.ppl), np.array(self.edges, np.int64)), self.max_length)

    @property
    def levels(self) -> dict[int, float]:
        """`ppl` at the lengths up to which every target was scored.

        A control may score some of the targets beyond its window. They may be easier or harder than all, so
        their perplexity is only compared on the same targets, by `against`.
        """
        if self.protocol != "cropped":
            return dict(self.ppl)
        all_of = {length: self.documents * (length - 1) for length in self.ppl}
        return {n: value for n, value in self.ppl.items() if self.tokens.get(n, 0) >= all_of[n]}

    def between(self, start: int, stop: int) -> tuple[Floats, Counts]:
        """The sum of each document's losses at positions `start … stop−1` in nats, and their number.

        They are from the pass over the longest length. Ends that are no measured length are those of the next
        block.
        """
        part = slice(*np.searchsorted(self.block_edges, (start, stop)))
        return self.block_nll[:, part].sum(1), self.block_terms[:, part].sum(1)

    def same_targets(self, other: PerplexityResult) -> bool:
        """Whether both scored the same targets of the same texts: a control is one of `prefix`."""
        one, two = (
            ("prefix" if each.cropped else each.protocol, each.stride, each.last, each.data)
            for each in (self, other)
        )
        return bool(self) and one == two

    def on_targets_of(self, control: PerplexityResult) -> CommonTargets | None:
        """The losses of a control and of this result on the targets of the control, in common blocks.

        None if that is no control, if the texts or protocols differ, if the control scored a part of a block
        of which this result has one sum, or if it has no targets beyond its window.
        """
        same = self.same_targets(control) and self.block_nll.shape[0] == control.block_nll.shape[0] > 0
        if not (control.cropped and same):
            return None
        edges = np.intersect1d(self.block_edges, control.block_edges)[:-1]

        def sums(result: PerplexityResult, values: Any) -> Any:
            return np.add.reduceat(values, np.searchsorted(result.block_edges, edges), axis=1)

        scored, terms = sums(control, control.block_terms), sums(self, self.block_terms)
        if ((scored > 0) & (scored != terms)).any():
            return None
        own = np.where(scored > 0, sums(self, self.block_nll), 0.0)
        if not scored[:, np.searchsorted(edges, control.window or 0) :].any(1).all():
            return None
        return CommonTargets(edges, sums(control, control.block_nll), own, scored)

    def against(self, control: PerplexityResult) -> list[Difference]:
        """How the losses differ from those of a control, the protocol `cropped`, on the control's targets.

        At each length these are the targets from the control's window to that length, in the pass over the
        longest one. Within the window both are predicted from the same tokens, which would only hide the
        difference. Empty if the two cannot be compared: on other documents, or with other lengths, one of
        which must be that window.
        """
        common, found = self.on_targets_of(control), list[Difference]()
        if common is None:
            return found
        for length in sorted(self.ppl):
            part = slice(*np.searchsorted(common.starts, (control.window or 0, length)))
            sums = [each[:, part].sum(1) for each in common[1:]]
            if sums[-1].all():  # of every document
                found.append(paired(length, *(each.tolist() for each in sums)))
        return found

    @property
    def cropped(self) -> bool:
        """Whether the context was cropped. Then this is a control, not a result."""
        return self.window is not None

    @property
    def is_weak(self) -> bool:
        """Whether this is the control of earlier versions: a gain over it may be due to its short context."""
        return self.protocol == WEAK_CONTROL

    @property
    def settings(self) -> dict[str, int]:
        """The settings of the protocol: `window`, `stride` and `last` in tokens, and `blocks`."""
        values = {"window": self.window, "blocks": self.blocks, "stride": self.stride, "last": self.last}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def measured_by(self) -> str:
        """The protocol with its settings, such as `sliding stride=256`."""
        return " ".join([self.protocol, *(f"{name}={value}" for name, value in self.settings.items())])

    def interval(self, length: int) -> tuple[float, float] | None:
        """95 % interval of the perplexity at a length, over documents; None for fewer than three."""
        ends = statistics.mean_interval(
            self.document_nll.get(length, ()), self.document_terms.get(length, ())
        )
        return None if ends is None else (statistics.ppl(ends[0]), statistics.ppl(ends[1]))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts. NaN and infinity become None, because JSON has neither."""
        return {item.name: plain(getattr(self, item.name)) for item in fields(self) if item.name != "losses"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """As for every record. A control of an earlier version has the name of today."""
        if values.get("protocol") == "cropped" and values.get("blocks") is None:
            values = {**values, "protocol": WEAK_CONTROL}  # its name before there was another
        return super().from_dict(values)

    def _is_consistent(self) -> bool:
        protocol_named(self.protocol)
        shapes, sums = {self.block_nll.shape, self.block_terms.shape}, self.document_nll
        return (
            bool(self.ppl) and self.ppl.keys() == self.tokens.keys() and all(self.tokens.values())
            and self.documents > 0 and shapes in ({(0, 0)}, {(self.documents, len(self.block_edges) - 1)})
            and sums.keys() == self.document_terms.keys() <= self.ppl.keys()
            and all(len(terms) == len(sums[n]) and sum(terms) for n, terms in self.document_terms.items())
        )  # fmt: skip


@dataclass(frozen=True)
class Scores(_FromPlain):
    """The scores of all trials of one task at one length and depth.

    Attributes:
        length: tokens of prompt and answer.
        depth: 0 … 1; None for tasks without a depth.
        data: fingerprint of the prompts. Scores can be compared only if it is equal.
    """

    task: str
    length: int
    depth: float | None
    scores: tuple[float, ...]
    data: str | None = None

    @property
    def rate(self) -> Rate:
        """Mean score and its interval."""
        return Rate.of(self.scores)

    def _is_consistent(self) -> bool:
        return self.length > 0 and bool(self.scores) and all(0 <= score <= 1 for score in self.scores)


@dataclass(frozen=True)
class RetrievalResult(_FromPlain):
    """Retrieval by one model with one encoding; false if nothing was measured.

    Attributes:
        cells: one for each task, length and depth.
        crop: number of a prompt's last tokens that the model saw; None for all of them.
        seconds, forward_tokens, peak_memory_bytes: as in `PerplexityResult`, of the prompts.
    """

    cells: tuple[Scores, ...] = ()
    crop: int | None = None
    seconds: float = field(default=0.0, compare=False)
    forward_tokens: int = field(default=0, compare=False)
    peak_memory_bytes: int = field(default=0, compare=False)

    def __bool__(self) -> bool:
        return bool(self.cells)

    def __repr__(self) -> str:
        rates = [(task, n, self.rate(task, n)) for task in self.tasks for n in self.lengths(task)]
        found = (f"{task} {rate.mean:.0%} at {format_length(n)}" for task, n, rate in rates if rate)
        return f"RetrievalResult({', '.join(found) or 'nothing'})"

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

    def solves(self, task: str) -> bool:
        """Whether any prompt of a task was solved, also in part."""
        return any(any(cell.scores) for cell in self.cells if cell.task == task)

    def rate(self, task: str, length: int, depth: float | None = None) -> Rate | None:
        """Mean score at a length, over all depths or at one; None if nothing was measured."""
        scores = [
            score for cell in self.at(task, length) if depth in (None, cell.depth) for score in cell.scores
        ]
        return Rate.of(scores) if scores else None

    def at(self, task: str, length: int) -> list[Scores]:
        """The cells of a task at a length, by depth."""
        cells = [cell for cell in self.cells if cell.task == task and cell.length == length]
        return sorted(cells, key=lambda cell: cell.depth or 0)

    def against(self, first: RetrievalResult, task: str, length: int) -> RateDifference | None:
        """How the scores differ from those of `first` on the same prompts; None if the prompts differ."""
        before, after = first.at(task, length), self.at(task, length)
        prompts = [cell.data for cell in before]
        if not before or None in prompts or prompts != [cell.data for cell in after]:
            return None
        return paired_rates(
            *([score for cell in cells for score in cell.scores] for cells in (before, after))
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; includes the rates for other readers."""
        cells = [{**asdict(cell), "rate": asdict(cell.rate)} for cell in self.cells]
        found: dict[str, Any] = plain({**vars(self), "cells": cells})
        return found


@dataclass(frozen=True, eq=False)
class EvaluationRow(_FromPlain):
    """One row of a comparison: a model, its perplexity, and its retrieval.

    Attributes:
        label: name of the row in tables and legends.
        encoding: the position encoding's `to_dict()`; None for the checkpoint's own.
        model: name or path of the model.
        adapter: name or path of the adapter; None without fine-tuning.
        result: the perplexity; empty, and so false, if it was not measured.
        trained_length: the pretrained window in tokens, if known.
        rope_parameters: the `rope_parameters` of the checkpoint's config, if its own encoding is used.
        retrieval: retrieval at each length; empty, and so false, if it was not measured.
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
    def of_same_weights(self) -> bool:
        """Whether this is plain RoPE with weights of another encoding: not the model before its extension."""
        return self.label.startswith(SAME_WEIGHTS)

    def control_in(self, rows: Sequence[EvaluationRow]) -> EvaluationRow | None:
        """The row that this one is compared with beyond the trained window; None if it was not measured.

        It is plain RoPE with its context cropped, on the same text. For a row with an adapter it is the
        control with this adapter, else the best control that has one: training helps without a longer context
        too.
        """

        def rank(control: EvaluationRow) -> tuple[bool, bool, bool, float]:
            ppl = control.result.ppl[control.result.max_length]
            return not math.isfinite(ppl), control.adapter != self.adapter, control.adapter is None, ppl

        controls = [row for row in rows if row.cropped and row.method == "none"]
        if self.adapter is None:
            controls = [row for row in controls if row.adapter is None]
        return min((row for row in controls if self.result.on_targets_of(row.result)), key=rank, default=None)

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
        """The encoding as text, such as `yarn(factor=8.0)`; of the checkpoint's own, as in its config."""
        if self.encoding is None:
            return f"as in the checkpoint: {self.rope_parameters}"
        values = (f"{key}={value}" for key, value in self.encoding.items() if key != "name")
        return f"{self.method}({', '.join(values)})"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {
            **vars(self),
            "result": self.result.to_dict() if self.result else None,
            "retrieval": self.retrieval.to_dict() if self.retrieval else None,
        }

    def _is_consistent(self) -> bool:
        named = self.encoding is None or isinstance(self.encoding["name"], str)
        return named and self.trained_length != 0 and bool(self.result or self.retrieval)


def _value(kind: Any, value: Any) -> Any:
    """A plain value as a type that a field has; NaN for None, as `plain` writes it."""
    origin, inner = get_origin(kind), get_args(kind)
    if type(None) in inner:
        return None if value is None else _value(inner[0], value)
    if hasattr(kind, "from_dict"):
        return kind.from_dict(value)
    if origin is np.ndarray:
        rows = [[_value(float if kind == Floats else int, each) for each in row] for row in value]
        return np.array(rows, get_args(inner[1])[0]).reshape(len(rows), -1 if rows else 0)
    if origin in (list, tuple):
        return origin(_value(inner[0], each) for each in value)
    if origin is dict and inner[0] is int:
        return {_value(int, int(length)): _value(inner[1], each) for length, each in value.items()}
    if kind is float and value is None:
        return math.nan
    allowed = (int, float) if kind is float else (origin or kind,)
    if type(value) not in allowed or (kind is int and not 0 <= value < 2**62):
        raise ValueError(f"{(origin or kind).__name__} is needed, not {value!r:.40}")
    return float(value) if kind is float else value
