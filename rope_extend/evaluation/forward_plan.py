"""Estimates of the memory and time of an evaluation, before any weights are loaded.

The evaluator itself runs on the meta device, and the bytes that it would allocate are counted. Time is the
operations of such a run divided by rates that are measured on the device in a fraction of a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from rope_extend.attention.split_window import Processes, SplitWindow
from rope_extend.checkpoint.peft_models import remove_adapter
from rope_extend.encodings import Encoding, RopeEncoding
from rope_extend.evaluation.chunked_forward import ChunkedForward, PreallocatedLayer, Strategy
from rope_extend.evaluation.flops import measured_rates, operations_of
from rope_extend.evaluation.loss_computer import LossComputer, RunOptions, default_batch_tokens
from rope_extend.evaluation.protocols import window_lengths
from rope_extend.loss import causal_lm, default_chunk_bytes
from rope_extend.memory.budget import weight_bytes
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.memory.meta_device import META, dry_run, of_all_layers, quiet_patching, try_estimate
from rope_extend.memory.plan import Budget, MemoryEstimate, counter_of, longest, table
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.processes import is_main_process, process_count
from rope_extend.patching import patch_model
from rope_extend.progress import progress_bar
from rope_extend.units import format_length

SMALLEST_CHUNK = 256
"""Smallest chunk size, in tokens, that a plan proposes."""
IN_ONE_PASS = "in one pass"

Setup = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which the model has an encoding or an adapter."""


@dataclass(frozen=True, kw_only=True)
class WindowEstimate(MemoryEstimate):
    """How a window is processed, and the memory and time that it needs.

    Attributes:
        chunk_size: tokens that are processed at a time.
        strategy: "in one pass", "layer by layer" or "with a cache".
    """

    length: int
    chunk_size: int
    strategy: str

    @property
    def description(self) -> str:
        """How the window is processed, as text."""
        whole = self.chunk_size >= self.length
        return self.strategy if whole else f"{self.strategy}, in chunks of {self.chunk_size:,}"


@dataclass(frozen=True)
class ForwardPlan:
    """The memory and time of an evaluation, by length.

    Attributes:
        lengths: one window for each length, ascending.
        budget: the memory of the device.
        longest_fit: the longest window that fits, in tokens; None if all lengths fit.
    """

    lengths: tuple[WindowEstimate, ...]
    budget: Budget
    longest_fit: int | None

    @property
    def longest(self) -> WindowEstimate:
        """The longest window."""
        return self.lengths[-1]

    def check(self) -> None:
        """Refuse a length that does not fit, and name the longest that does."""
        advice = "A smaller dtype, quantization or a device_map need less memory"
        for window in self.lengths:
            subject, how = f"{window.length:,} tokens need", window.description
            self.budget.check(window, subject=subject, how=how, longest=self.longest_fit, advice=advice)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: bytes, tokens, seconds and texts."""
        return {
            "lengths": [self.budget.as_dict(window) for window in self.lengths],
            "available": self.budget.available,
            "device": str(self.budget.device),
            "longest_fit": self.longest_fit,
        }

    def __str__(self) -> str:
        rows = [(format_length(window.length), window, window.description) for window in self.lengths]
        return table("windows of one document, in tokens", rows, self.budget)


def plan_forward(
    model: str,
    lengths: Sequence[int],
    *,
    load_options: LoadOptions,
    empty: nn.Module | None = None,
    encodings: Sequence[Encoding | tuple[Path, Encoding] | None] = (None,),
    trained_length: int | None = None,
    chunk: int | None = None,
    batched: bool = False,
    progress: bool = False,
) -> ForwardPlan | None:
    """Estimate the memory and time of windows of these lengths.

    Args:
        empty: the model on the meta device, if it exists already; of a checkpoint only the config is read.
        encodings: the encodings that will be used; the one that needs most memory counts. None stands for the
            checkpoint's own, and that of an adapter comes with its directory.
        chunk: tokens that are processed at a time; by default as many as there is memory for.
        batched: whether short windows are batched.
        progress: count dry runs on the main process; long windows that do not fit take minutes of them.

    Returns:
        The plan; None, with a log line, for a family that does not run on the meta device.
    """
    sizes = window_lengths(lengths)
    lm: Any = load_options.empty(model) if empty is None else empty
    weights = weight_bytes(model, lm, load_options)
    changes: list[tuple[Encoding | None, Any]] = []
    for each in encodings:
        if isinstance(each, tuple):
            from peft import PeftConfig

            changes.append((each[1], PeftConfig.from_pretrained(str(each[0]))))
        else:
            changes.append((each, None))
    setups = {  # one of each kind: others need the same memory
        (*_memory_class(encoding), repr(config)): partial(
            _changed, lm, encoding, config, trained_length, load_options.split_window
        )
        for encoding, config in changes
    }
    batch_tokens = default_batch_tokens(load_options.torch_device) if batched else 1

    def estimate() -> ForwardPlan:
        budget = Budget.of(load_options, max(load_options.split_window, process_count()))
        shown = progress and is_main_process()
        with progress_bar(shown=shown, unit=" dry runs", desc="estimating memory", leave=False) as bar:
            estimator = ForwardEstimator(
                lm, budget, weights=weights, batch_tokens=batch_tokens, setups=[*setups.values()],
                done=bar.update,
            )  # fmt: skip
            return _plan(estimator, sizes, chunk, load_options.split_window)

    return try_estimate(estimate, lm, "a forward")


def _memory_class(encoding: Encoding | None) -> tuple[Any, ...]:
    """Equal for encodings that need the same memory."""
    if isinstance(encoding, RopeEncoding) and not encoding.remaps:
        return (encoding.rotates_in_attention,)
    return type(encoding), getattr(encoding, "depends_on_length", False)


@contextmanager
def _changed(
    empty: Any, encoding: Encoding | None, adapter: Any, trained_length: int | None, processes: int
) -> Iterator[None]:
    """Put an encoding, and the layers of an adapter's config, into a model without weights."""
    with ExitStack() as stack:
        stack.enter_context(quiet_patching())
        if encoding is not None:
            stack.enter_context(patch_model(empty, encoding, trained_length=trained_length))
        if adapter is not None:
            from peft import get_peft_model

            tuned = get_peft_model(empty, adapter, autocast_adapter_dtype=False)  # see `cast_adapter`
            stack.callback(remove_adapter, tuned)
        stack.enter_context(planned_split(empty, processes))
        yield


def planned_split(model: nn.Module, processes: int) -> AbstractContextManager[Any]:
    """A context in which a model without weights is that of one of the processes that share each window."""
    return SplitWindow(causal_lm(model), Processes(None, processes)) if processes > 1 else nullcontext()


def _plan(
    estimator: ForwardEstimator, lengths: Sequence[int], chunk: int | None, processes: int
) -> ForwardPlan:
    operations = operations_of(estimator.model)
    rates = measured_rates(estimator.model, estimator.budget.device)
    windows = []
    for tokens in lengths:
        seconds = operations.linear * tokens / rates.linear + operations.attention(tokens) / rates.attention
        windows.append(replace(estimator.estimate(tokens, chunk), seconds=seconds / processes))
    longest_fit = None
    if not estimator.budget.fits(windows[-1]):
        longest_fit = estimator.longest_fit(lengths[-1], chunk or SMALLEST_CHUNK)
    return ForwardPlan(tuple(windows), estimator.budget, longest_fit)


class ForwardEstimator:
    """Runs the evaluator on a model without weights, and counts bytes.

    Args:
        model: a model on the meta device, with or without adapter layers.
        budget: the memory of the device on which the model will run.
        weights: bytes of the weights, which are allocated all the time.
        trained: bytes of what is trained and of the optimizer's moments, as well.
        batch_tokens: tokens in a batch of short windows; 1 for no batches.
        setups: contexts that change the model, such as patches. The one that needs most memory counts,
            including the weights that it adds.
        done: called after each dry run.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: Budget,
        *,
        weights: int,
        trained: int = 0,
        batch_tokens: int = 1,
        setups: Sequence[Setup] = (nullcontext,),
        done: Callable[[], object] = lambda: None,
    ) -> None:
        self.model, self.budget, self.weights, self.trained = model, budget, weights, trained
        self.batch_tokens, self.setups, self._done = batch_tokens, setups, done
        with self.setups[0]():
            self.chunked = ChunkedForward(model, budget.device)  # for its default chunk sizes
        self.model_bytes = counter_of(model).live
        self._strategies: dict[int, Strategy | None] = {}
        """How chunks are processed with each setup that was tried. The trial takes most of the time."""

    def estimate(self, tokens: int, chunk: int | None = None) -> WindowEstimate:
        """The window in the default chunk size, or if that does not fit, in the largest that does."""
        size = min(chunk or self.chunked.default_chunk(tokens), tokens)
        window = self.window(tokens, size)
        while not self.budget.fits(window) and chunk is None and size > SMALLEST_CHUNK:
            size = max(SMALLEST_CHUNK, size // 2)
            smaller = self.window(tokens, size)
            if smaller.strategy == IN_ONE_PASS:  # the model cannot process chunks
                break
            window = smaller
        return window

    def longest_fit(self, tokens: int, size: int = SMALLEST_CHUNK) -> int:
        """The longest window that fits, shorter than `tokens`, which does not."""
        return longest(lambda length: self.budget.fits(self.window(length, size)), tokens, SMALLEST_CHUNK)

    def window(self, tokens: int, size: int) -> WindowEstimate:
        """A window in chunks of `size`, with the setup that needs most memory."""
        peak, strategy = max(self._peak(tokens, size, number) for number in range(len(self.setups)))
        return WindowEstimate(
            weights=self.weights, trained=self.trained, peak=peak, length=tokens,
            chunk_size=tokens if strategy == IN_ONE_PASS else size, strategy=strategy,
        )  # fmt: skip

    def _peak(self, tokens: int, size: int, number: int) -> tuple[int, str]:
        """Peak bytes and strategy for a setup, by number. Short windows are batched as by the evaluator."""
        if size < tokens:  # by few layers already
            return self._run(tokens, size, number)
        (peak,) = of_all_layers(self.model, lambda: self._run(tokens, size, number)[:1], least=3)
        return peak, IN_ONE_PASS

    def _run(self, tokens: int, size: int, number: int) -> tuple[int, str]:
        device = self.budget.device
        with dry_run(self.model, device, maskless=self.chunked.maskless), self.setups[number]():
            shortened = _ShortenedForward(self.model, META)
            if number in self._strategies:
                shortened.strategy = self._strategies[number]
            computer = LossComputer(self.model, META, RunOptions(size), shortened)
            computer.chunk_bytes = default_chunk_bytes(device)
            with LiveBytes(), torch.no_grad():
                chunks = size < tokens and computer.can_chunk(tokens, size)
                strategy = shortened.strategy if chunks else IN_ONE_PASS
            if size < tokens:
                self._strategies[number] = shortened.strategy
            ids = torch.zeros(max(1, self.batch_tokens // tokens), tokens, dtype=torch.int64, device=META)
            counter = counter_of(self.model)
            with counter, torch.no_grad():
                # The first logits are computed while most other tensors are still allocated. The later ones
                # need the same memory.
                piece = size if chunks else tokens
                scored = min(tokens - 1, piece, 2 * computer.chunk_bytes // (4 * computer.vocabulary) + 1)
                computer.losses(ids, ids[:, 1 : scored + 1], 1, scored + 1)
        self._done()
        losses = 8 * ids.numel()  # of all tokens: one by one, and joined
        return counter.peak - self.model_bytes + losses, strategy or IN_ONE_PASS


class _ShortenedForward(ChunkedForward):
    """Runs the first and the last of many chunks, and two layers of each kind.

    The chunks between need the same memory. They only advance the cache.
    """

    def active_layers(self, count: int) -> Sequence[int]:
        """Two layers of each kind, and the last layer, whose states are returned.

        The second is run with what the layers of other kinds have computed for the whole forward.
        """
        caches = DynamicCache(config=self.config).layers
        kinds: dict[Any, list[int]] = defaultdict(list)
        for number, layer in enumerate(self._layers()):
            kind = (type(layer), type(caches[number]), getattr(layer, "attention_type", None))
            kinds[kind].append(number)
        return sorted({number for numbers in kinds.values() for number in numbers[:2]} | {count - 1})

    def in_chunks(self, inputs: Tensor, size: int) -> Iterator[Tensor]:
        """States of the first chunk, of all chunks between, and of the last."""
        tokens = inputs.shape[1]
        if tokens <= 3 * size:
            return super().in_chunks(inputs, size)
        chunks = torch.split(inputs, [size, tokens - 2 * size, size], dim=1)
        width = self.config.get_text_config(decoder=True).hidden_size
        own = -(-chunks[1].shape[1] // self.processes)
        self._between = inputs.new_empty((len(inputs), own, width), dtype=self.lm.dtype)
        return self.by_layer(chunks) if self.strategy == "layer by layer" else self.with_cache(chunks)

    def _decode(self, chunk: Tensor, cache: DynamicCache) -> Tensor:
        states: Tensor | None = getattr(self, "_between", None)
        if states is None or -(-chunk.shape[1] // self.processes) != states.shape[1]:
            return super()._decode(chunk, cache)
        for layer in {id(layer): layer for layer in cache.layers}.values():
            if isinstance(layer, PreallocatedLayer) and layer.is_initialized:
                stop = layer.keys.shape[-2] + chunk.shape[1]
                layer.keys, layer.values = (buffer[..., :stop, :] for buffer in layer.buffers)
            elif isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
                layer.cumulative_length += chunk.shape[1]
                kept = min(layer.cumulative_length, layer.sliding_window - 1)
                layer.keys, layer.values = (
                    each.new_empty(*each.shape[:-2], kept, each.shape[-1])
                    for each in (layer.keys, layer.values)
                )
        return states
