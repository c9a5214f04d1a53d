"""How a decoder reads a long window: in one piece, or in pieces so that activations do not grow with it.

In pieces it reads layer by layer: the first layer reads the whole window, a piece at a time, then the second
does. Then the keys and values of only one layer exist, beside the hidden states between two layers. For an
8B model of Llama's shape that is 12 KiB per token, where a cache of all layers is 128 KiB. Families whose
layers share more than their hidden states are read a piece at a time through all layers, with such a cache.
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

from rope_extend.attention.functions import PREFIX
from rope_extend.evaluation.lower_right import lower_right
from rope_extend.inspection import layer_config
from rope_extend.loss import causal_lm, decoder_name, hidden_states

logger = logging.getLogger(__name__)

Way = Literal["layer by layer", "with a cache"]
"""How a window is read in pieces."""

WHOLE = 131_072
"""Windows of up to so many tokens are read in one piece, if attention needs no mask for it."""
CHUNK = 16_384
"""Most tokens of a piece."""
PAIRS = 2**28
"""Most pairs of a query and a key in a mask, or in all heads of the scores that eager attention holds."""

TRIAL = [5, 5, 2]
"""Pieces in which a short text is read, to see how a family can be read in pieces."""
NOISE = 0.05
"""Relative difference that rounding may make between shapes; what gets lost between pieces makes more."""


class LongReader:
    """Computes the last hidden states of a causal language model, whole or in pieces."""

    def __init__(self, model: nn.Module, place: torch.device) -> None:
        """`place` is where token ids go."""
        self.model, self.place = model, place
        self.lm = causal_lm(model)
        self.config = self.lm.config
        self.decoder = self.lm._modules[decoder_name(self.lm)]
        # There the flash kernel is to be had; elsewhere a mask costs no more than what it is for.
        self.maskless = place.type == "cuda" and self.lm.dtype in (torch.float16, torch.bfloat16)

    def whole(self, inputs: Tensor) -> Tensor:
        """States ``[B, T, D]`` of tokens ``[B, T]``, in one piece."""
        return hidden_states(self.model, inputs)

    def size(self, tokens: int) -> int:
        """How many tokens of so long a window are read at a time, where nobody asks for anything else."""
        text = self.config.get_text_config(decoder=True)
        attention = text._attn_implementation.removeprefix(PREFIX)
        pairs, masked = PAIRS, False
        if attention == "eager":
            pairs, masked = PAIRS // layer_config(self.config).num_attention_heads, True
        elif attention == "sdpa":
            masked = any(DynamicCache(config=text).is_sliding)
        if tokens <= WHOLE and (not masked or tokens**2 <= pairs):
            return tokens
        if attention not in ("eager", "sdpa") or (self.maskless and not masked):
            return min(CHUNK, tokens)
        return max(1, min(CHUNK, pairs // tokens))

    def in_pieces(self, inputs: Tensor, size: int) -> Iterator[Tensor]:
        """The same states, ``[B, t, D]`` for ``size`` tokens at a time, in the way that suits the model."""
        pieces = torch.split(inputs, size, dim=1)
        return self.by_layer(pieces) if self.way == "layer by layer" else self.with_cache(pieces)

    @cached_property
    def way(self) -> Way | None:
        """How this model can be read in pieces; None if not at all.

        Tried once, on a few tokens. Families whose layers hand each other more than hidden states (shared
        keys, residual streams) show it there, and so do those that forget what came before a piece (Bamba's
        state-space layers).
        """
        rows = self.lm.get_input_embeddings().weight.shape[0]
        tokens = torch.arange(sum(TRIAL), device=self.place)[None] % rows
        later = slice(TRIAL[0], None)  # where a piece has others before it
        whole = self.whole(tokens)[0, later].float()
        found: list[Tensor | None] = []
        for read in (self.with_cache, self.by_layer):
            try:
                states = torch.cat(list(read(torch.split(tokens, TRIAL, dim=1))), dim=1)
                found.append(states[0, later].float())
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a family misses here, in one piece it does not
                logger.debug("%s: no %s", self.config.model_type, read.__name__, exc_info=error)
                found.append(None)
        cached, layered = found

        def same(one: Tensor, other: Tensor, noise: float) -> bool:
            # A median, because in mixtures of experts rounding may send single tokens elsewhere. Without
            # values, on the meta device, what ran is taken to be right.
            gaps = (one - other).norm(dim=-1) / other.norm(dim=-1)
            return gaps.is_meta or bool(gaps.median() <= noise)

        if cached is None or not same(cached, whole, NOISE):
            return None
        # The same kernels on the same shapes: these agree bit for bit, unless a kernel varies.
        layer_by_layer = layered is not None and same(layered, cached, NOISE / 5)
        return "layer by layer" if layer_by_layer else "with a cache"

    def with_cache(self, pieces: Sequence[Tensor]) -> Iterator[Tensor]:
        """Each piece through all layers, with the keys and values of all layers kept."""
        cache = DynamicCache(config=self.config)
        cache.layers = _with_room(cache.layers, sum(piece.shape[1] for piece in pieces))
        for piece in pieces:
            yield self._decode(piece, cache)

    def by_layer(self, pieces: Sequence[Tensor]) -> Iterator[Tensor]:
        """All pieces through one layer after the other, with the keys and values of one layer kept."""
        tokens = sum(piece.shape[1] for piece in pieces)
        layers = self._layers()
        between: list[Tensor | None] = [None] * len(pieces)
        for turn in self.turns(len(layers)):
            cache = _OneLayer(self.config, turn, tokens)
            for number, piece in enumerate(pieces):
                acting = _Acting(layers[turn], between[number])
                between[number] = None  # freed as soon as the layer has read it
                with _in_turn(layers, turn, acting):
                    last = self._decode(piece, cache)
                cache.seen += piece.shape[1]
                if turn == len(layers) - 1:
                    acting.states = None
                    yield last
                else:
                    between[number] = acting.states

    def turns(self, layers: int) -> Sequence[int]:
        """Which layers act, in order: all of them."""
        return range(layers)

    def _layers(self) -> nn.ModuleList:
        """The list of the decoder's layers."""
        count = self.config.get_text_config(decoder=True).num_hidden_layers
        decoder = self.decoder.get_decoder()  # of a multimodal model, the one for text
        for child in decoder.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return child
        raise LookupError(f"{type(decoder).__name__} has no list of {count} layers")

    def _decode(self, piece: Tensor, cache: DynamicCache) -> Tensor:
        with lower_right(self.decoder) if self.maskless else nullcontext():
            output = self.decoder(input_ids=piece, past_key_values=cache, use_cache=True)
        states: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
        return states


class _Acting(nn.Module):
    """Stands where the layer stood whose turn it is, and gives it the states that were kept for it."""

    def __init__(self, layer: nn.Module, states: Tensor | None) -> None:
        super().__init__()
        self.__dict__["layer"], self.states = layer, states

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; for the first one, on what the decoder hands it: the embeddings."""
        if self.states is not None:
            if args:
                args = (self.states, *args[1:])
            else:
                kwargs["hidden_states"] = self.states
            self.states = None
        output = self.layer(*args, **kwargs)
        self.states = output[0] if isinstance(output, tuple) else output
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


class _Resting(nn.Module):
    """Stands where a layer stood whose turn it is not, and hands on what it is given."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]

    def __getattr__(self, name: str) -> Any:  # decoders ask a layer of which kind it is
        return getattr(self.__dict__["layer"], name)


@contextmanager
def _in_turn(layers: nn.ModuleList, turn: int, acting: _Acting) -> Iterator[None]:
    """Let one layer act, and the others rest, for a call of the decoder."""
    own = dict(layers._modules)
    for number, (name, layer) in enumerate(own.items()):
        assert layer is not None
        layers._modules[name] = acting if number == turn else _Resting(layer)
    try:
        yield
    finally:
        layers._modules.update(own)


class _OneLayer(DynamicCache):  # type: ignore[misc]
    """Keys and values of one layer, by whose length the masks and positions of all are made."""

    def __init__(self, config: Any, turn: int, tokens: int) -> None:
        super().__init__(config=config)
        layers = _with_room(self.layers, tokens)
        self.layers: list[Any] = [
            layers[turn] if type(layer) is type(layers[turn]) else layer for layer in layers
        ]
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens the layer has read."""
        return self.seen


def _with_room(layers: Sequence[Any], tokens: int) -> list[Any]:
    """The layers of a cache, those that keep all keys with memory for so many tokens taken at once."""
    return [Room(tokens) if type(layer) is DynamicLayer else layer for layer in layers]


class Room(DynamicLayer):  # type: ignore[misc]
    """Grows within memory that it takes at once: a stock layer copies all keys again with each piece."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the memory, `[batch, heads, tokens, head_dim]` each."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.rooms = [
            states.new_empty(*states.shape[:-2], self.tokens, states.shape[-1])
            for states in (key_states, value_states)
        ]
        self.keys, self.values = (room[..., :0, :] for room in self.rooms)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values `[batch, heads, t, head_dim]`; return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        for room, states in zip(self.rooms, (key_states, value_states), strict=True):
            room[..., start:stop, :] = states
        self.keys, self.values = (room[..., :stop, :] for room in self.rooms)
        return self.keys, self.values
