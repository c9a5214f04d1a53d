"""A cache for attention sinks that holds the first tokens and a window of the last ones, and no others.

Stock caches keep every token. Under `sinks`, a new token sees the first n tokens and the last W, so all
others can be dropped: memory does not grow with the text. Positions still count every token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rope_extend.attention.functions import HANDLER, attention_modules
from rope_extend.encodings import Encoding, Sinks
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.models.config_facts import CONFIG_RECORD
from rope_extend.models.decoders import unwrap

_MORE = 16
"""Tokens are dropped when at least this many can be, and at least a quarter of the window."""

_LAYER = "_rope_extend_layer"
"""The attribute of keys with the `SinkLayer` that they come from."""


class SinkLayer(DynamicLayer):  # type: ignore[misc]
    """The keys and values of one layer; those of `dropped` tokens after the first `head` are missing.

    Args:
        encoding: the numbers of first tokens and of last ones.
    """

    keys: Tensor | None
    values: Tensor | None
    is_croppable = False

    def __init__(self, encoding: Sinks) -> None:
        super().__init__()
        self.encoding = encoding
        self.dropped = self.head = 0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values; the keys that are returned say which layer they come from."""
        keys, values = super().update(*args, **kwargs)
        keys = keys.view_as(keys)
        setattr(keys, _LAYER, self)
        return keys, values

    @property
    def held(self) -> int:
        """The number of tokens whose keys and values are here."""
        return 0 if self.keys is None else int(self.keys.shape[-2])

    def get_seq_length(self) -> int:
        """The number of tokens so far, dropped ones included."""
        return int(super().get_seq_length()) + self.dropped

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are those of the whole text, see `of_columns`."""
        return self.get_seq_length() + query_length, 0

    def of_columns(self, whole: Tensor) -> Tensor:
        """The columns, of a tensor for the whole text, that belong to tokens that are held, or new."""
        return torch.cat([whole[..., : self.head], whole[..., self.head + self.dropped :]], dim=-1)

    def trim(self, positions: Tensor, shown: Tensor) -> None:
        """Drop the tokens that no later one sees, if they are many.

        `positions` `[1 or batch, held]` are those of the tokens that are held, and those `shown`, bool of the
        same shape, are no padding.
        """
        sinks, window = self.encoding.sinks, self.encoding.window
        more = max(_MORE, window // 4)
        if self.held < window - 1 + more or bool((shown.sum(dim=1) < sinks).any()):
            return  # few tokens, or a row whose first ones are still to come
        if not self.dropped:
            # Tokens are dropped after these. So they stay the same when a row with more padding is removed.
            first = (shown & (positions < sinks)).any(dim=0).nonzero()
            self.head = int(first[-1]) + 1 if len(first) else 0
        last = torch.where(shown, positions, -1).amax(dim=1, keepdim=True)
        seen = (shown & (positions > last - (window - 1))).any(dim=0)
        seen[: self.head] = False
        stop = int(seen.to(torch.int8).argmax()) if bool(seen.any()) else self.held
        if stop - self.head < more:
            return
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = (
            torch.cat([states[:, :, : self.head], states[:, :, stop:]], dim=2)
            for states in (self.keys, self.values)
        )
        self.dropped += stop - self.head

    def reset(self) -> None:
        """Empty the layer."""
        super().reset()
        self.dropped = self.head = 0


def held_layer(keys: Tensor) -> SinkLayer | None:
    """The layer of a `SinkCache` that keys come from; None if they come from another cache."""
    return getattr(keys, _LAYER, None)


class SinkCache(DynamicCache):  # type: ignore[misc]
    """The cache that `sink_cache` gives.

    It holds at most n + W tokens of each row, a quarter of W more before some are dropped, and padding on the
    left of the longest. Attention is exactly that over the whole text.

    Attributes:
        encoding: the numbers n and W.
    """

    layers: list[Any]

    def __init__(self, encoding: Sinks, config: Any) -> None:
        super().__init__(config=config)
        other = sorted({type(layer).__name__ for layer in self.layers if type(layer) is not DynamicLayer})
        if other:
            raise UnsupportedModelError(
                f"sink_cache: {config.model_type} has layers that are cached in another way "
                f"({', '.join(other)}); use an ordinary cache, such as DynamicCache(config=model.config)"
            )
        self.layers = [SinkLayer(encoding) for _ in self.layers]
        self.encoding = encoding

    @property
    def held(self) -> int:
        """The number of tokens whose keys and values are here."""
        return int(self.layers[0].held)

    @property
    def dropped(self) -> int:
        """The number of tokens that were dropped."""
        return int(self.layers[0].dropped)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Raises:
            PatchError: tokens were dropped that would be needed again.
        """
        room = self.held - self.layers[0].head - (self.encoding.window - 1)
        if self.dropped and -tokens_to_remove > room:
            raise PatchError(
                f"this SinkCache dropped {self.dropped} tokens, so it cannot be cropped by "
                f"{-tokens_to_remove} (speculative and prompt lookup decoding do that); use a DynamicCache"
            )
        super().crop(tokens_to_remove)


def sink_cache(model: nn.Module) -> SinkCache:
    """A cache of bounded size for a model with attention sinks, to generate without end.

    It holds the first n tokens and the last W, and drops all others. Logits are those of an unbounded cache.
    Use it as any other cache, once for each text or batch:
    `model.generate(**inputs, past_key_values=rope_extend.sink_cache(model))`.

    Args:
        model: a transformers model that is patched with `sinks`.

    Raises:
        PatchError: the model is not patched with `sinks`.
        UnsupportedModelError: the model has layers that are cached in another way, or layers in which the
            patch does not act, such as layers without RoPE.
    """
    base = unwrap(model)
    record = getattr(base.config, CONFIG_RECORD, None)
    encoding = Encoding.from_dict(record["encoding"]) if record else None
    if not isinstance(encoding, Sinks):
        raise PatchError(
            f"sink_cache: the model is not patched with sinks, but with {encoding or 'nothing'}; call "
            f"rope_extend.extend(model, target_length, 'sinks') first"
        )
    cache = SinkCache(encoding, base.config.get_text_config(decoder=True))
    modules = attention_modules(base.base_model)
    handled = {module.layer_idx for module in modules if getattr(module, HANDLER, None) is not None}
    others = [str(index) for index in range(len(cache.layers)) if index not in handled]
    if others:
        raise UnsupportedModelError(
            f"sink_cache: {base.config.model_type} has layers that need all their keys, such as layers "
            f"without RoPE or with keys of images (layers {', '.join(others)} of {len(cache.layers)}); use "
            f"an ordinary cache, such as DynamicCache(config=model.config)"
        )
    return cache
