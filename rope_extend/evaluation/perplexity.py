"""Perplexity at every length, from one forward per document.

A causal model's loss at position p does not depend on what comes after p. So one forward over the longest
length gives, by truncating its losses, the perplexity at every shorter one, exactly.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from rope_extend.data import Document, fingerprint, format_length, parse_length
from rope_extend.errors import RopeExtendError
from rope_extend.inspection import length_groups
from rope_extend.loss import CHUNK_BYTES, causal_lm, hidden_states, output_head, token_losses

logger = logging.getLogger(__name__)

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class PerplexityResult:
    """Perplexity of one model on one set of documents, at several lengths.

    Attributes:
        ppl: perplexity by length N in tokens: exp(sum of the losses / number of scored tokens) over the
            targets at positions 1 … N−1 of each document. Position 0 has nothing before it.
        tokens: number of scored tokens by length, (N − 1) × ``documents``.
        nll_by_position: float64 ``[max_length − 1]``, nats; entry p is the mean loss of the target at
            position p + 1, from the pass over the longest length.
        protocol: ``"prefix"`` or ``"cropped"``; see :func:`perplexity`.
        window: tokens the model saw at a time under ``"cropped"``; None otherwise.
        documents: number of documents that were long enough, all of them scored in full.
        dropped_documents: number of documents that were not.
        data: fingerprint of the scored token sequences; results compare only where it is equal.
        passes: forwards per document: one for each group of lengths with equal position tables.
        forward_tokens: tokens that went through the model in all.
        seconds: wall time.
        peak_memory_bytes: highest allocation during the run on CUDA; elsewhere the highest resident size of
            the process so far.
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

    @property
    def max_length(self) -> int:
        """The longest length, in tokens."""
        return max(self.ppl)

    @property
    def forward_tokens_per_scored_token(self) -> float:
        """What the measurement cost: a little over 1 for one pass, about 2 under ``"cropped"``."""
        return self.forward_tokens / self.tokens[self.max_length]

    def within(self, window: int) -> float:
        """Perplexity over the targets at positions below ``window``."""
        return self._mean(self.nll_by_position[: max(window, 1) - 1], f"below {window}")

    def beyond(self, window: int) -> float:
        """Perplexity over the targets at positions ``window`` and above: those never seen in training."""
        return self._mean(self.nll_by_position[max(window, 1) - 1 :], f"from {window} on")

    def _mean(self, nll: Floats, where: str) -> float:
        if nll.size == 0:
            raise RopeExtendError(
                f"no scored position {where}: this result covers the positions 1 to {self.max_length - 1}"
            )
        return _exp(float(nll.mean()))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; what is not finite becomes None, as JSON has no NaN."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["ppl"] = {str(length): _or_none(value) for length, value in self.ppl.items()}
        values["tokens"] = {str(length): count for length, count in self.tokens.items()}
        values["nll_by_position"] = [_or_none(value) for value in self.nll_by_position.tolist()]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`."""
        values = dict(values)
        values["ppl"] = {int(k): math.nan if v is None else v for k, v in values["ppl"].items()}
        values["tokens"] = {int(k): v for k, v in values["tokens"].items()}
        values["nll_by_position"] = np.array(values["nll_by_position"], dtype=np.float64)  # None is NaN
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


def perplexity(
    model: torch.nn.Module,
    documents: Sequence[Document],
    lengths: Sequence[int | str],
    *,
    protocol: Literal["prefix", "cropped"] = "prefix",
    window: int | str | None = None,
    device: torch.device | str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    progress: bool = True,
) -> PerplexityResult:
    """Measure perplexity at each of ``lengths``, token-weighted, with sums in float64.

    Every length is measured on the same documents: those that have ``max(lengths)`` tokens. A shorter
    document would be counted at one length and not at another, and the curve would compare texts.

    Protocols:
        ``prefix``: a document's first N tokens, in one forward; equals truncating to N. An encoding whose
        tables depend on the length gets one forward for each group of lengths with equal tables.

        ``cropped``: the same targets, but the model sees ``window`` tokens at a time, in windows that start
        ``window // 2`` apart. Each target is scored once, in the first window that has it, so after the
        first window it has between ``window // 2`` and ``window − 1`` tokens of context. It is the control
        row "as long a text, but no longer a context".

    Args:
        model: a causal language model, patched or not, with or without PEFT; left as it was found.
        documents: what to read.
        lengths: numbers of tokens, at least 2 each; ``"32k"`` works too.
        protocol: see above.
        window: for ``cropped``, and only there: tokens seen at a time.
        device: where to run; the model is brought back afterwards. Where it is, if not given.
        chunk_bytes: how many bytes of float32 logits may exist at one time.
        progress: show a progress bar, if there is a terminal.

    Raises:
        RopeExtendError: if an argument makes no sense or no document is long enough.
    """
    wanted = sorted({parse_length(length) for length in lengths})
    if not wanted or wanted[0] < 2:
        raise RopeExtendError(f"lengths must be one or more numbers of tokens, 2 or above; got {lengths!r}")
    span = _checked_window(protocol, window)
    used = _long_enough(documents, wanted[-1])
    ids = torch.stack([document.input_ids[: wanted[-1]] for document in used])  # [documents, max_length]
    lm = causal_lm(model)
    _check_vocabulary(ids, lm)
    # In windows every forward has the same length, and so every target the same position tables.
    groups = length_groups(model, wanted) if span is None else [wanted]

    sums = [np.zeros(group[-1] - 1) for group in groups]  # of the losses, by position
    forward_tokens = len(ids) * sum(_windows(ids[0, : group[-1]], span).numel() for group in groups)
    quiet = None if progress else True  # None: quiet unless on a terminal
    bar = tqdm(total=forward_tokens, unit="tok", unit_scale=True, desc="perplexity", disable=quiet)
    started = time.perf_counter()
    # Not inference_mode: what a model caches while in it could not take part in training afterwards.
    with _evaluating(model, lm, device) as place, torch.no_grad(), bar:
        head = output_head(model)
        for group, sum_ in zip(groups, sums, strict=True):
            for document in ids[:, : group[-1]]:
                windows = _windows(document, span)
                losses = []
                # As many windows at a time as hold no more tokens than the document in one piece.
                for batch in torch.split(windows, max(1, len(document) // windows.shape[1])):
                    batch = batch.to(place)
                    hidden = hidden_states(model, batch)[:, :-1]
                    losses.append(token_losses(hidden, head, batch[:, 1:], chunk_bytes=chunk_bytes).cpu())
                    bar.update(batch.numel())
                sum_ += _joined(torch.cat(losses), len(document)).numpy()
        peak = _peak_memory_bytes(place)

    ppl = {
        length: _exp(float(sum_[: length - 1].sum()) / (len(ids) * (length - 1)))
        for group, sum_ in zip(groups, sums, strict=True)
        for length in group
    }
    nll_by_position = max(sums, key=len) / len(ids)
    if not np.isfinite(nll_by_position).all():
        first = int(np.flatnonzero(~np.isfinite(nll_by_position))[0]) + 1
        logger.warning("the loss is not a finite number from position %d on", first)
    return PerplexityResult(
        ppl={length: ppl[length] for length in wanted},
        tokens={length: len(ids) * (length - 1) for length in wanted},
        nll_by_position=nll_by_position,
        protocol=protocol,
        window=span,
        documents=len(ids),
        dropped_documents=len(documents) - len(ids),
        data=fingerprint(Document(one.name, row) for one, row in zip(used, ids, strict=True)),
        passes=len(groups),
        forward_tokens=forward_tokens,
        seconds=time.perf_counter() - started,
        peak_memory_bytes=peak,
    )


def _windows(document: torch.Tensor, span: int | None) -> torch.Tensor:
    """Cut ``[T]`` into windows ``[n, span]`` that start half a span apart; or leave it whole, ``[1, T]``."""
    if span is None or span >= len(document):
        return document[None]
    stride = span // 2
    more = math.ceil((len(document) - span) / stride)
    # What pads the last window comes after all that is scored in it, so a causal model does not see it.
    return F.pad(document, (0, span + more * stride - len(document))).unfold(0, span, stride)


def _joined(losses: torch.Tensor, tokens: int) -> torch.Tensor:
    """Losses by position, float64 ``[tokens − 1]``, from those of all windows, ``[n, span − 1]``."""
    stride = (losses.shape[1] + 1) // 2
    return torch.cat([losses[0], losses[1:, -stride:].flatten()])[: tokens - 1].double()


def _checked_window(protocol: str, window: int | str | None) -> int | None:
    if protocol not in ("prefix", "cropped"):
        raise RopeExtendError(f"no perplexity protocol {protocol!r}; there are 'prefix' and 'cropped'")
    if (protocol == "cropped") != (window is not None):
        raise RopeExtendError(
            "protocol 'cropped' needs a window, the number of tokens the model sees at a time"
            if window is None
            else f"protocol 'prefix' takes no window, got {window!r}; 'cropped' does"
        )
    if window is None:
        return None
    span = parse_length(window)
    if span < 2:
        raise RopeExtendError(f"a window needs 2 tokens or more, one to read and one to predict; got {span}")
    return span


def _long_enough(documents: Sequence[Document], length: int) -> list[Document]:
    used = [document for document in documents if len(document) >= length]
    if not used:
        if not documents:
            raise RopeExtendError("no documents to measure perplexity on")
        longest = max(documents, key=len)
        raise RopeExtendError(
            f"none of {len(documents)} documents has {length:,} tokens: the longest, {longest.name!r}, has "
            f"{len(longest):,}. Lengths up to {len(longest):,} work, or give longer texts"
        )
    if len(used) < len(documents):
        logger.info(
            "%d of %d documents are shorter than %s tokens and are left out at every length",
            len(documents) - len(used), len(documents), format_length(length),
        )  # fmt: skip
    return used


def _check_vocabulary(ids: torch.Tensor, lm: Any) -> None:
    rows = lm.get_input_embeddings().weight.shape[0]
    highest = int(ids.max())
    if highest >= rows:
        raise RopeExtendError(
            f"the documents contain token {highest}, but the model knows {rows} tokens: they were tokenised "
            "for another model; load them with this model's tokenizer"
        )


@contextmanager
def _evaluating(model: torch.nn.Module, lm: Any, device: torch.device | str | None) -> Iterator[torch.device]:
    """Put a model into evaluation mode on a device, and back module by module, whatever happens."""
    modes = {module: module.training for module in model.modules()}
    home: torch.device = lm.get_input_embeddings().weight.device
    place = home if device is None else torch.device(device)
    try:
        model.eval()
        if place != home:
            model.to(place)
        if place.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place)
        yield place
    finally:
        for module, training in modes.items():
            module.training = training
        if place != home:
            model.to(home)


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _exp(nll: float) -> float:
    return math.exp(nll) if not nll > 700 else math.inf  # math.exp raises where it overflows


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
