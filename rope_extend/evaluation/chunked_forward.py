"""The forward of a decoder over a long window, whole or in chunks, so that activations stay small.

In chunks, the decoder runs layer by layer: the first layer processes the whole window chunk by chunk, then
the second layer does. So only the hidden states between two layers and the keys and values of one layer
exist. For an 8B model of Llama's shape that is 12 KiB per token; a cache of all layers is 128 KiB. If the
layers of a family share more than hidden states, each chunk goes through all layers, with a cache of all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rope_extend.attention.causal_suffix import causal_suffix_attention
from rope_extend.attention.split_window import current_split
from rope_extend.loss import causal_lm, decoder_name, hidden_states
from rope_extend.memory.budget import is_out_of_memory
from rope_extend.models.config_facts import layer_config
from rope_extend.models.decoders import CACHE, decoder_layers

logger = logging.getLogger(__name__)

Strategy = Literal["layer by layer", "with a cache"]
"""How a window is processed in chunks."""

MAX_WHOLE = 131_072
"""Windows of up to this many tokens are processed whole, if attention needs no mask for them."""
MAX_CHUNK = 16_384
"""Maximum number of tokens of a chunk."""
MAX_PAIRS = 2**28
"""Maximum number of query-key pairs in a mask, or in the scores of all heads for eager attention."""

TRIAL_CHUNKS = [5, 5, 2]
"""Chunks of the short text on which the strategy for a family is found."""
MAX_ROUNDING = 0.05
"""Relative difference that rounding may cause between shapes. Lost state causes a larger one."""


class ChunkedForward:
    """Computes the last hidden states of a causal language model, whole or in chunks."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.split = current_split(model)
        self.lm = causal_lm(model)
        self.config = self.lm.config
        self.decoder = self.lm._modules[decoder_name(self.lm)]
        # Here the flash kernel is available. Elsewhere a mask costs no more than the attention itself.
        self.maskless = device.type == "cuda" and self._dtype() in (torch.float16, torch.bfloat16)

    @property
    def processes(self) -> int:
        """Number of processes that share a window."""
        return 1 if self.split is None else self.split.processes.size

    def _dtype(self) -> torch.dtype:
        """The dtype of products with weights; norms and embeddings may be trained in float32."""
        weights = (module.weight for module in self.decoder.modules() if isinstance(module, nn.Linear))
        first = next(weights, None)
        dtype: torch.dtype = self.lm.dtype if first is None or not first.is_floating_point() else first.dtype
        return dtype

    def whole(self, inputs: Tensor) -> Tensor:
        """States `[B, T, D]` of tokens `[B, T]`, in one forward."""
        return hidden_states(self.model, inputs)

    def default_chunk(self, tokens: int) -> int:
        """Default number of tokens to process at a time, for a window of `tokens`."""
        text = self.config.get_text_config(decoder=True)
        attention = text._attn_implementation
        pairs, masked = MAX_PAIRS, False
        if attention == "eager":
            pairs, masked = MAX_PAIRS // layer_config(self.config).num_attention_heads, True
        elif attention == "sdpa":
            masked = any(DynamicCache(config=text).is_sliding)
        processes = self.processes
        if tokens <= MAX_WHOLE * processes and (not masked or tokens**2 <= pairs):
            return tokens
        if attention not in ("eager", "sdpa") or (self.maskless and not masked):
            return min(MAX_CHUNK * processes, tokens)
        return max(1, min(MAX_CHUNK * processes, pairs // tokens))

    def in_chunks(self, inputs: Tensor, size: int) -> Iterator[Tensor]:
        """The same states, `[B, t, D]` for each chunk of `size` tokens, by the strategy of this model."""
        chunks = torch.split(inputs, size, dim=1)
        return self.by_layer(chunks) if self.strategy == "layer by layer" else self.with_cache(chunks)

    @cached_property
    def strategy(self) -> Strategy | None:
        """How this model can process chunks; None if it cannot.

        Found by a trial on a few tokens. It fails for families whose layers pass on more than hidden states
        (shared keys, residual streams), and for those that lose state between chunks (Bamba's state-space
        layers).
        """
        rows = self.lm.get_input_embeddings().weight.shape[0]
        tokens = torch.arange(sum(TRIAL_CHUNKS), device=self.device)[None] % rows
        later = slice(TRIAL_CHUNKS[0], None)  # all but the first chunk
        whole = self.whole(tokens)[0, later].float()
        trials: list[Tensor | None] = []
        for forward in (self.with_cache, self.by_layer):
            try:
                states = torch.cat(list(forward(torch.split(tokens, TRIAL_CHUNKS, dim=1))), dim=1)
                trials.append(states[0, later].float())
            except Exception as error:  # anything that a family lacks here, but not in one forward
                if is_out_of_memory(error):
                    raise
                logger.debug("%s: no %s", self.config.model_type, forward.__name__, exc_info=error)
                trials.append(None)
        cached, layered = trials

        def equal(states: Tensor, expected: Tensor, tolerance: float) -> bool:
            # A median, because rounding may send single tokens to another expert. On the meta device, where
            # tensors have no values, a forward that runs counts as right.
            gaps = (states - expected).norm(dim=-1) / expected.norm(dim=-1)
            return gaps.is_meta or bool(gaps.median() <= tolerance)

        if cached is None or not equal(cached, whole, MAX_ROUNDING):
            return None
        # The same kernels on the same shapes: bit for bit equal, unless a kernel is not deterministic.
        layer_by_layer = layered is not None and equal(layered, cached, MAX_ROUNDING / 5)
        return "layer by layer" if layer_by_layer else "with a cache"

    def cache_of(self, tokens: int) -> DynamicCache:
        """An empty cache with room for the keys and values of `tokens` tokens in all layers."""
        cache = DynamicCache(config=self.config)
        cache.layers = _preallocated(cache.layers, tokens)
        return self._shared(cache)

    def _shared(self, cache: DynamicCache) -> DynamicCache:
        """The cache, with the heads of this process if several share a window."""
        return cache if self.split is None else self.split.share_cache(cache)

    def with_cache(self, chunks: Sequence[Tensor], cache: DynamicCache | None = None) -> Iterator[Tensor]:
        """Process each chunk by all layers, and keep keys and values of all layers, in `cache` if given."""
        if cache is None:
            cache = self.cache_of(sum(chunk.shape[1] for chunk in chunks))
        for chunk in chunks:
            yield self._decode(chunk, cache)

    def by_layer(self, chunks: Sequence[Tensor]) -> Iterator[Tensor]:
        """Process all chunks by one layer after the other, and keep the keys and values of one layer."""
        tokens = sum(chunk.shape[1] for chunk in chunks)
        layers = self._layers()
        between: list[Tensor | None] = [None] * len(chunks)
        for index in self.active_layers(len(layers)):
            cache = self._shared(_OneLayerCache(self.config, index, tokens))
            for number, chunk in enumerate(chunks):
                active = _Replaced(layers[index], True, between[number])
                between[number] = None  # freed as soon as the layer has used it
                with _only_active(layers, index, active):
                    last = self._decode(chunk, cache)
                cache.seen += chunk.shape[1]
                if index == len(layers) - 1:
                    active.states = None
                    yield last
                else:
                    between[number] = active.states

    def active_layers(self, count: int) -> Sequence[int]:
        """Indices of the layers that run, in order."""
        return range(count)

    def _layers(self) -> nn.ModuleList:
        """The list of the decoder's layers; LookupError if they are not in one list."""
        layers = decoder_layers(self.lm)
        if layers is None or not layers.complete:
            raise LookupError(f"the layers of {type(self.lm).__name__} are not in one list")
        return layers.layers

    def _decode(self, chunk: Tensor, cache: DynamicCache) -> Tensor:
        with causal_suffix_attention(self.decoder) if self.maskless else nullcontext():
            output = self.decoder(input_ids=chunk, use_cache=True, **{CACHE: cache})
        states: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
        return states


class _Replaced(nn.Module):
    """Replaces a layer for a call of the decoder: runs it on the states of the layer before it, or skips it.

    The first layer runs on the embeddings, which the decoder passes. A skipped layer returns its input.
    """

    def __init__(self, layer: nn.Module, runs: bool, states: Tensor | None = None) -> None:
        super().__init__()
        self.__dict__["layer"], self.runs, self.states = layer, runs, states

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.runs:
            return args[0] if args else kwargs["hidden_states"]
        if self.states is not None:
            if args:
                args = (self.states, *args[1:])
            else:
                kwargs["hidden_states"] = self.states
            self.states = None
        output = self.layer(*args, **kwargs)
        self.states = output[0] if isinstance(output, tuple) else output
        return output

    def __getattr__(self, name: str) -> Any:  # decoders read attributes of their layers
        return getattr(self.__dict__["layer"], name)


@contextmanager
def _only_active(layers: nn.ModuleList, index: int, active: _Replaced) -> Iterator[None]:
    """Run one layer and skip the others, for a call of the decoder."""
    originals = dict(layers._modules)
    for number, (name, layer) in enumerate(originals.items()):
        assert layer is not None
        layers._modules[name] = active if number == index else _Replaced(layer, False)
    try:
        yield
    finally:
        layers._modules.update(originals)


class _OneLayerCache(DynamicCache):  # type: ignore[misc]
    """Keys and values of one layer. Their length gives the masks and positions of all layers."""

    def __init__(self, config: Any, index: int, tokens: int) -> None:
        super().__init__(config=config)
        layers = _preallocated(self.layers, tokens)
        self.layers: list[Any] = [
            layers[index] if type(layer) is type(layers[index]) else layer for layer in layers
        ]
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens that the layer has processed."""
        return self.seen


def _preallocated(layers: Sequence[Any], tokens: int) -> list[Any]:
    """The layers of a cache; those that keep all keys get their memory for `tokens` tokens at once."""
    return [PreallocatedLayer(tokens) if type(layer) is DynamicLayer else layer for layer in layers]


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
    """Cache layer that allocates its memory at once. A stock layer copies all keys again for each chunk."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the memory, `[batch, heads, tokens, head_dim]` for keys and for values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.buffers = [
            states.new_empty(*states.shape[:-2], self.tokens, states.shape[-1])
            for states in (key_states, value_states)
        ]
        self.keys, self.values = (buffer[..., :0, :] for buffer in self.buffers)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values `[batch, heads, t, head_dim]`; return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[..., start:stop, :] = states
        self.keys, self.values = (buffer[..., :stop, :] for buffer in self.buffers)
        return self.keys, self.values
