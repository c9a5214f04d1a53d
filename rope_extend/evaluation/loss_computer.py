"""Losses of a model on documents, in few forwards and little memory."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rope_extend.errors import RopeExtendError, UnsupportedModelError
from rope_extend.evaluation.chunked_forward import ChunkedForward
from rope_extend.evaluation.protocols import CONTROL_BLOCKS, Window
from rope_extend.evaluation.results import Losses
from rope_extend.loss import IGNORED, causal_lm, default_chunk_bytes, output_head, token_losses
from rope_extend.memory.budget import is_out_of_memory
from rope_extend.models.load_options import input_device
from rope_extend.models.rotary_tables import length_groups
from rope_extend.units import parse_length

logger = logging.getLogger(__name__)

RETRIES = 12
"""How many times the batch or the chunk size is halved when memory runs out."""


def default_batch_tokens(device: torch.device) -> int:
    """Number of tokens in a batch of short windows."""
    return 4096 if device.type == "cpu" else 32_768


@dataclass(frozen=True)
class RunOptions:
    """How a measurement runs. The result does not depend on it, except for rounding.

    Attributes:
        chunk: tokens of a window that are processed at a time, such as 4096 or `"4k"`. Then activations do
            not grow with the window. Only hidden states and the keys and values of one layer do, or those of
            all layers for families whose layers cannot run one by one. Models and encodings that give other
            results in chunks process windows whole. Default: automatic above 131,072 tokens, if attention
            would need a mask of the whole window, or if memory runs out.
        bar: a tqdm bar that counts the processed tokens, instead of the measurement's own.
        control_blocks: `blocks` of the controls with which the result will be compared, see
            `PerplexityResult.against`.
    """

    chunk: int | str | None = None
    bar: Any = None
    control_blocks: int = CONTROL_BLOCKS


class LossComputer:
    """Runs a model on windows, in chunks that fit into memory.

    Args:
        model: a causal language model, with or without PEFT.
        device: where the token ids go.
        options: how it runs; `document` needs a bar.
        chunked: the forward of the decoder; by default a `ChunkedForward` of the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        options: RunOptions | None = None,
        chunked: ChunkedForward | None = None,
    ) -> None:
        options = options or RunOptions()
        self.model, self.device, self.bar = model, device, options.bar
        head = causal_lm(model).get_output_embeddings()
        self.vocabulary: int = getattr(head, "out_features", head.weight.shape[0])
        self.chunked = chunked or ChunkedForward(model, device)
        self.chunk = None if options.chunk is None else parse_length(options.chunk)
        self.chunk_bytes, self.batch_tokens = default_chunk_bytes(device), default_batch_tokens(device)
        self.retries = 0
        self._chunkable: dict[tuple[int, int], bool] = {}
        self._longest_so_far = [
            (module, name)
            for module in model.modules()
            for name in vars(module)
            if name.endswith("max_seq_len_cached")
        ]
        """Where stock `dynamic` keeps the length of the longest text so far, and its table with it."""

    def document(
        self, name: str, ids: torch.Tensor, passes: Sequence[Sequence[Window]], bos: int | None
    ) -> list[Losses]:
        """Losses of a document's targets, for the windows of each pass.

        If memory runs out, the document is repeated with a smaller batch or chunk size. `ids` are int64
        `[T]`, and `bos` replaces the first token of every window, if given.
        """
        while True:
            progress = self.bar.n
            try:
                return [self._windows(ids, windows, bos) for windows in passes]
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                message = str(error).splitlines()[0]
                if self.chunked.split is not None:  # the other processes wait, and cannot be told
                    raise RopeExtendError(
                        f"out of memory on {name!r}, which {self.chunked.processes} processes share "
                        f"({message}); use a smaller chunk, more processes, or shorter lengths"
                    ) from error
            # Outside the handler, because the traceback keeps tensors alive until here.
            self._halve(name, message, [window.tokens for windows in passes for window in windows])
            self.bar.n = progress
            self.bar.refresh()

    def _halve(self, name: str, message: str, sizes: Sequence[int]) -> None:
        """Halve the batch of windows, or the chunk size once a batch is one window."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        longest, batch = max(sizes), min(self.batch_tokens, sum(sizes))
        chunk = min(self.chunk or self.chunked.default_chunk(longest), longest)
        self.retries += 1
        if self.retries > RETRIES or chunk == 1:
            whole = "and the model cannot process it in chunks"
            limit = whole if False in self._chunkable.values() else f"even in chunks of {chunk} tokens"
            raise RopeExtendError(
                f"out of memory on {name!r}, {limit} ({message}); use shorter lengths, a smaller dtype or "
                "another device"
            )
        if batch >= 2 * longest:
            self.batch_tokens = batch // 2
            logger.warning("out of memory on %r: retrying with half as many windows per batch", name)
            return
        self.chunk_bytes, self.chunk = max(1, self.chunk_bytes // 2), chunk // 2
        logger.warning("out of memory on %r: retrying in chunks of %d tokens", name, self.chunk)

    def _windows(self, ids: torch.Tensor, windows: Sequence[Window], bos: int | None) -> Losses:
        """Losses of the targets of all windows, in order. Windows of equal shape are batched."""

        def shape(window: Window) -> tuple[int, int, int]:
            return window.tokens, window.first - window.start, window.end - window.start

        losses = []
        for (tokens, first, end), equal in itertools.groupby(windows, shape):
            group = list(equal)
            rows = max(1, self.batch_tokens // tokens)
            for low in range(0, len(group), rows):
                batch = group[low : low + rows]
                inputs = torch.stack([ids[w.start : w.stop] for w in batch]).to(self.device)
                if bos is not None:
                    inputs[:, 0] = bos
                targets = torch.stack([ids[w.first : w.end] for w in batch]).to(self.device)
                losses.append(self.losses(inputs, targets, first, end).flatten().float().cpu().numpy())
                self.bar.update(inputs.numel())
        return np.concatenate(losses)

    def losses(self, inputs: torch.Tensor, targets: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Losses `[B, end − first]` of the targets at `first … end−1` of windows `[B, T]`."""
        if self.chunked.split is not None:
            return self._shared_losses(inputs, targets, first, end)
        losses, head = [], output_head(self.model)
        start = 0
        for hidden in self.hidden(inputs):
            # The state at t predicts the token at t + 1.
            low, high = max(start, first - 1), min(start + hidden.shape[1], end - 1)
            if low < high:
                chunk = targets[:, low + 1 - first : high + 1 - first]
                states = hidden[:, low - start : high - start]
                losses.append(
                    token_losses(
                        states, head, chunk, chunk_bytes=self.chunk_bytes, vocabulary=self.vocabulary
                    )
                )
            start += hidden.shape[1]
        return torch.cat(losses, dim=1)

    def _shared_losses(
        self, inputs: torch.Tensor, targets: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        """As `losses`: each of the processes that share a window computes those of its tokens."""
        assert self.chunked.split is not None
        expected = torch.full_like(inputs, IGNORED)
        expected[:, first - 1 : end - 1] = targets
        size = self._chunk_size(inputs.shape[1])
        losses = []
        with self.chunked.split.own_share() as processes:
            for start, hidden in zip(itertools.count(0, size), self.hidden(inputs), strict=False):
                chunk = expected[:, start : start + size]
                if start >= end - 1 or start + size < first:
                    continue
                own = token_losses(
                    hidden, output_head(self.model), processes.own(chunk, fill=IGNORED),
                    chunk_bytes=self.chunk_bytes, vocabulary=self.vocabulary,
                )  # fmt: skip
                losses.append(processes.gathered(own)[:, : chunk.shape[1]])
        begin = (first - 1) % size
        return torch.cat(losses, dim=1)[:, begin : begin + end - first]

    def _chunk_size(self, tokens: int) -> int:
        """Tokens of a window that are processed at a time."""
        size = self.chunk or self.chunked.default_chunk(tokens)
        return size if size < tokens and self.can_chunk(tokens, size) else tokens

    def hidden(self, inputs: torch.Tensor) -> Iterator[torch.Tensor]:
        """The decoder's last states, `[B, t, D]` for each chunk."""
        for module, name in self._longest_so_far:
            setattr(module, name, 0)
        tokens = inputs.shape[1]
        size = self._chunk_size(tokens)
        if size >= tokens:
            yield self.chunked.whole(inputs)
        else:
            yield from self.chunked.in_chunks(inputs, size)

    def can_chunk(self, tokens: int, size: int) -> bool:
        """Whether chunks of `size` tokens with a cache give the same states as one forward."""
        key = tokens, size
        if key not in self._chunkable:
            self._chunkable[key] = self.chunked.strategy is not None and self._has_one_table(tokens, size)
            if not self._chunkable[key]:
                logger.info("windows of %d tokens are processed whole: chunks give other results", tokens)
        return self._chunkable[key]

    def _has_one_table(self, tokens: int, size: int) -> bool:
        try:
            # Tables that follow the length change once, or with every token: the first and the last tell.
            return len(length_groups(self.model, [size, tokens])) == 1
        except UnsupportedModelError:  # an unknown family, whose tables may depend on the length
            return False


@contextmanager
def evaluation_mode(model: Any) -> Iterator[torch.device]:
    """Put a model into evaluation mode, and yield its device; afterwards each module has its old mode.

    Also resets the peak of CUDA's memory statistics.
    """
    modes = {module: module.training for module in model.modules()}
    device = input_device(model)
    try:
        model.eval()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        yield device
    finally:
        for module, training in modes.items():
            module.training = training


def peak_memory_bytes(device: torch.device) -> int:
    """Peak allocation on CUDA since the last reset; elsewhere the peak resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
