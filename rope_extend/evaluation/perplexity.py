"""Perplexity at every length from one forward per document, or by any other named protocol.

The loss of a causal model at position p does not depend on later tokens. So one forward over the longest
length gives the perplexity at every shorter one too, exactly, from the first of its losses.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from numbers import Integral
from operator import mul
from typing import Any, TypeAlias, Unpack

import numpy as np
import torch

from rope_extend.data.documents import Document, check_vocabulary, fingerprint, once
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import statistics
from rope_extend.evaluation.loss_computer import LossComputer, RunOptions, evaluation_mode, peak_memory_bytes
from rope_extend.evaluation.protocols import (
    Protocol,
    Settings,
    Window,
    WindowSettings,
    protocol_named,
    window_lengths,
)
from rope_extend.evaluation.results import Losses, PerplexityResult, block_starts, control_edges
from rope_extend.evaluation.statistics import Counts, Floats
from rope_extend.loss import causal_lm
from rope_extend.models.rotary_tables import length_groups
from rope_extend.progress import progress_bar
from rope_extend.units import format_length

logger = logging.getLogger(__name__)


DocumentLike: TypeAlias = "Document | torch.Tensor | Sequence[int] | str"
"""A document, its token ids as a 1-D tensor or a list, or its text."""


def perplexity(
    model: torch.nn.Module,
    documents: DocumentLike | Iterable[DocumentLike],
    lengths: int | str | Sequence[int | str],
    *,
    tokenizer: Any | None = None,
    protocol: str = "prefix",
    save_losses: bool = False,
    progress: bool = True,
    options: RunOptions | None = None,
    **settings: Unpack[WindowSettings],
) -> PerplexityResult:
    """Measure perplexity at each of `lengths`, with sums in float64.

    Every length is measured on the same documents: those with at least `max(lengths)` tokens. If shorter
    documents counted at some of the lengths, the curve would compare different texts.

    `prefix` measures the first N tokens of a document, for each length N, in one forward; an encoding whose
    tables depend on the length gets one forward for each group of lengths with equal tables. `cropped` is its
    control: targets of the same documents, of which each is predicted from `window` tokens, or at most a
    sixteenth fewer. Beyond the window it scores some targets, so its `ppl` there is an estimate of all:
    `PerplexityResult.levels` leaves it out, and `against` compares both. `cropped-half` was the control of
    earlier versions. The others are those of published programs: `sliding`, `sliding-window-mean`, `last-k`,
    `disjoint` and `disjoint-second-half`, on the page docs/measuring.md.

    Args:
        model: a causal language model, patched or not, with or without PEFT; it is unchanged afterwards.
        documents: a `Document`, a 1-D tensor or list of token ids, a string (with `tokenizer`), or several of
            these.
        lengths: numbers of tokens, at least 2 each, such as 4096 or `"32k"`; one of them, or several.
        tokenizer: the model's tokenizer, if documents are strings.
        protocol: name of the protocol, see above.
        save_losses: keep the loss of every token in `result.losses`.
        progress: show a progress bar, on terminals only.
        options: how the measurement runs.
        settings: `window=`, for `cropped`: tokens of context, and `blocks=`: how many blocks of targets it
            scores beyond that window. `stride=`, for protocols that have one: tokens between the starts of
            windows. `last=`, for `last-k`: number of targets.

    Raises:
        RopeExtendError: an argument out of range or of the wrong type, no document that is long enough, too
            little memory for the smallest chunks.
    """
    if not isinstance(model, torch.nn.Module):
        raise RopeExtendError(
            f"perplexity takes a model, got {type(model).__name__}; load it first, such as by "
            "AutoModelForCausalLM.from_pretrained"
        )
    options = options or RunOptions()
    sizes = window_lengths(lengths)
    rule = protocol_named(protocol)
    tokens = rule.check_settings(settings, sizes)
    candidates = _documents(documents, tokenizer)
    texts = _texts(rule, candidates, sizes[-1])
    lm = causal_lm(model)
    check_vocabulary(texts, lm.get_input_embeddings().weight.shape[0])
    if not rule.nested:
        groups = [[length] for length in sizes]
    elif rule.settings:  # every forward has the length of the cropped windows, and so the same tables
        groups = [sizes]
    else:
        groups = length_groups(model, sizes)
    passes = [[_windows(rule, text, group[-1], tokens) for group in groups] for text in texts]
    starts = [window_starts(rule, model, text) for text in texts]
    per_text = [sum(window.tokens for window in chain(*windows)) for windows in passes]
    forward_tokens = sum(map(mul, per_text, map(len, starts)))

    window, blocks = tokens.get("window"), tokens.get("blocks", options.control_blocks)
    edges = control_edges(sizes, blocks, window) if rule.nested else []
    tallies = [_Tally(rule, group, np.union1d(block_starts(sizes), edges), window) for group in groups]
    kept: dict[int, list[Losses]] = {group[-1]: [] for group in groups}
    with ExitStack() as stack:
        if options.bar is None:
            bar = progress_bar(
                shown=progress, total=forward_tokens, unit="tok", unit_scale=True, desc="perplexity"
            )
            options = replace(options, bar=stack.enter_context(bar))
        device = stack.enter_context(evaluation_mode(model))
        # Not inference_mode: tensors that a model caches in it cannot be used in training later.
        stack.enter_context(torch.no_grad())
        computer = LossComputer(model, device, options)
        started = time.perf_counter()
        for text, windows, tried in zip(texts, passes, starts, strict=True):
            ways = [computer.document(text.name, text.input_ids, windows, first) for first in tried]
            losses = min(ways, key=_sum)
            for tally, of_pass, values in zip(tallies, windows, losses, strict=True):
                tally.add(of_pass, values)
                if save_losses:
                    kept[tally.lengths[-1]].append(values)
        seconds, peak = time.perf_counter() - started, peak_memory_bytes(device)

    longest = tallies[-1] if not rule.nested else max(tallies, key=lambda tally: tally.lengths[-1])
    by_length = {length: tally for tally in tallies for length in tally.lengths}
    return PerplexityResult(
        ppl={length: by_length[length].ppl(length) for length in sizes},
        tokens={length: by_length[length].tokens[length] for length in sizes},
        block_nll=np.stack(longest.block_nll),
        block_terms=np.stack(longest.block_terms),
        protocol=protocol,
        window=window,
        blocks=tokens.get("blocks"),
        edges=edges,
        documents=len(texts),
        data=fingerprint(texts),
        passes=len(groups),
        forward_tokens=forward_tokens,
        seconds=seconds,
        peak_memory_bytes=peak,
        stride=tokens.get("stride"),
        last=tokens.get("last"),
        document_nll={length: by_length[length].nll[length] for length in sizes},
        document_terms={length: by_length[length].terms[length] for length in sizes},
        losses=kept if save_losses else None,
    )


def _windows(rule: Protocol, text: Document, length: int, settings: Settings) -> list[Window]:
    """The windows of a text in a pass."""
    windows = rule.layout(len(text), length, settings)
    if not windows:
        raise RopeExtendError(
            f"protocol {rule.name!r} has no window of {length:,} tokens in {len(text):,}; use more text or "
            "shorter lengths"
        )
    return windows


def _sum(losses: Sequence[Losses]) -> float:
    """The sum over all passes; infinite if a loss is not a finite number."""
    total = sum(float(values.sum(dtype=np.float64)) for values in losses)
    return total if math.isfinite(total) else math.inf


def window_starts(rule: Protocol, model: torch.nn.Module, text: Document) -> list[int | None]:
    """What replaces the first token of each window of a text, for each time that it is measured.

    None is the token that is there.
    """
    lm = causal_lm(model)
    # The config of a decoder may have the default of its family, and another one the token of this model.
    configs = (lm.config.get_text_config(decoder=True), lm.config, getattr(lm, "generation_config", None))
    first = int(text.input_ids[0])
    if not rule.bos or first not in [getattr(each, "bos_token_id", None) for each in configs]:
        return [None]
    return [first, None] if rule.bos == "either" else [first]


class _Tally:
    """Sums over documents, in float64, for the lengths of one pass."""

    def __init__(self, rule: Protocol, lengths: Sequence[int], starts: Counts, window: int | None) -> None:
        self.rule, self.lengths, self.starts, self.window = rule, lengths, starts, window
        self.block_nll: list[Floats] = []
        self.block_terms: list[Counts] = []
        self.tokens = dict.fromkeys(lengths, 0)
        self.nll: dict[int, list[float]] = {length: [] for length in lengths}
        self.terms: dict[int, list[int]] = {length: [] for length in lengths}

    def add(self, windows: Sequence[Window], losses: Losses) -> None:
        """Add a document's losses, float32 `[targets of all windows]`."""
        values = losses.astype(np.float64)
        starts = [0 if self.rule.nested else window.start for window in windows]
        positions = np.concatenate(
            [np.arange(w.first - start, w.end - start) for w, start in zip(windows, starts, strict=True)]
        )
        if (bad := positions[~np.isfinite(values)]).size:
            logger.warning("the loss is not a finite number from position %d on", bad[0])
        blocks = np.searchsorted(self.starts, positions, side="right") - 1
        self.block_nll.append(np.round(np.bincount(blocks, values, len(self.starts)), 5))  # small files
        self.block_terms.append(np.bincount(blocks, minlength=len(self.starts)))
        for length in self.lengths:
            selected = values[positions < length] if self.rule.nested else values
            self.tokens[length] += len(selected)
            if self.rule.average == "window":
                ends = np.cumsum([window.targets for window in windows])[:-1]
                selected = np.array([part.mean() for part in np.split(selected, ends)])
            nll, terms = float(selected.sum()), len(selected)
            if self.window is not None and 0 < (beyond := terms + 1 - self.window) < length - self.window:
                # The scored targets beyond the window stand for all others there.
                nll += float(selected[-beyond:].sum()) * ((length - self.window) / beyond - 1)
                terms = length - 1
            self.nll[length].append(nll)
            self.terms[length].append(terms)

    def ppl(self, length: int) -> float:
        """Perplexity at a length."""
        return statistics.ppl(sum(self.nll[length]) / sum(self.terms[length]))


def _texts(rule: Protocol, documents: Sequence[Document], length: int) -> list[Document]:
    """The texts of a protocol: the documents that are long enough, cut to the length for nested protocols."""
    if not documents:
        raise RopeExtendError("no documents to measure perplexity on; give at least one")
    least = length + rule.extra_tokens
    texts = [document for document in documents if len(document) >= least]
    if not texts:
        longest = max(documents, key=len)
        raise RopeExtendError(
            f"none of {len(documents)} documents has {least:,} tokens: the longest, {longest.name!r}, has "
            f"{len(longest):,}. Use lengths up to {len(longest):,}, or longer texts"
        )
    if len(texts) < len(documents):
        logger.info(
            "%d of %d documents are shorter than %s tokens and are left out at every length",
            len(documents) - len(texts), len(documents), format_length(least),
        )  # fmt: skip
    return [Document(text.name, text.input_ids[:length]) for text in texts] if rule.nested else texts


def _documents(
    documents: DocumentLike | Iterable[DocumentLike], tokenizer: Any | None = None
) -> list[Document]:
    """Documents from one value or from several, such as a batch `[B, T]`."""
    several: Any = documents
    if isinstance(documents, torch.Tensor | np.ndarray):
        several = documents if documents.ndim == 2 else [documents]  # a batch, or one
    elif isinstance(documents, Document | Mapping | str) or not isinstance(documents, Iterable):
        several = [documents]
    elif isinstance(documents, Sequence) and documents:
        several = [documents] if all(isinstance(item, Integral) for item in documents) else documents
    return [_document(each, number, tokenizer) for number, each in enumerate(several)]


def _document(value: Any, number: int, tokenizer: Any | None) -> Document:
    name = f"document {number}"
    if isinstance(value, Document):
        return value
    if isinstance(value, str):
        if tokenizer is None:
            raise RopeExtendError(
                f"{name} is a string, and no tokenizer is given; pass tokenizer=, the tokenizer of the model"
            )
        value = once(tokenizer(value, verbose=False)["input_ids"], value, tokenizer)
    try:
        ids = torch.as_tensor(value)
        wrong = ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool
        if ids.numel() and (ids.ndim != 1 or wrong):
            raise TypeError(f"got {ids.dtype} of shape {tuple(ids.shape)}")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise RopeExtendError(
            f"{name} must be a Document, a 1-D tensor or list of token ids, or a string with tokenizer=; "
            f"{error}"
        ) from error
    return Document(name, ids.detach().to("cpu", torch.int64))
