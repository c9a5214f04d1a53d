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

from rope_extend.attention.functions import HANDLER
from rope_extend.attention.tracked_cache import RUNNING, tracked
from rope_extend.encodings import Sinks
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.models.view import unwrap

_MORE = 16
"""Tokens are dropped when at least this many can be, and at least a quarter of the window."""


class SinkLayer(DynamicLayer):  # type: ignore[misc]
    """The keys and values of one layer; those of `dropped` tokens after the first `head` are missing."""

    keys: Tensor | None
    values: Tensor | None
    is_croppable = False
    rope_extend_grows = True

    def __init__(self) -> None:
        super().__init__()
        self.dropped = 0

    def get_seq_length(self) -> int:
        """The number of tokens so far, dropped ones included."""
        return int(super().get_seq_length()) + self.dropped

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are those of the whole text, see `SinkCache.of_mask`."""
        return self.get_seq_length() + query_length, 0

    def drop(self, start: int, stop: int) -> None:
        """Drop the tokens in columns `start` to `stop`."""
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = (
            torch.cat([states[:, :, :start], states[:, :, stop:]], dim=2)
            for states in (self.keys, self.values)
        )
        self.dropped += stop - start

    def reset(self) -> None:
        """Empty the layer."""
        super().reset()
        self.dropped = 0


class SinkCache(DynamicCache):  # type: ignore[misc]
    """The cache that `sink_cache` gives.

    It holds at most n + W tokens of each row, a quarter of W more before some are dropped, and padding on the
    left of the longest. Attention is exactly that over the whole text.

    Attributes:
        encoding: the numbers n and W.
    """

    layers: list[Any]
    rope_extend_positions: Tensor
    rope_extend_grows = True

    def __init__(self, encoding: Sinks, config: Any) -> None:
        super().__init__(config=config)
        other = sorted({type(layer).__name__ for layer in self.layers if type(layer) is not DynamicLayer})
        if other:
            raise UnsupportedModelError(
                f"sink_cache: {config.model_type} has layers that are cached in another way "
                f"({', '.join(other)}); use an ordinary cache, such as DynamicCache(config=model.config)"
            )
        self.layers = [SinkLayer() for _ in self.layers]
        self.encoding = encoding
        self._head_then = 0

    @property
    def held(self) -> int:
        """The number of tokens whose keys and values are here."""
        keys = self.layers[0].keys
        return 0 if keys is None else int(keys.shape[-2])

    @property
    def dropped(self) -> int:
        """The number of tokens that were dropped."""
        return int(self.layers[0].dropped)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Add keys and values of a layer.

        Raises:
            PatchError: the model is not patched with the cache's encoding.
        """
        if RUNNING in vars(self):
            return super().update(*args, **kwargs)
        raise PatchError(
            f"this SinkCache works in a model that is patched with {self.encoding} only; make one with "
            f"rope_extend.sink_cache(model) after patching, or use a DynamicCache"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Raises:
            PatchError: tokens were dropped that would be needed again.
        """
        room = self.held - self._head() - (self.encoding.window - 1)
        if self.dropped and -tokens_to_remove > room:
            raise PatchError(
                f"this SinkCache dropped {self.dropped} tokens, so it cannot be cropped by "
                f"{-tokens_to_remove} (speculative and prompt lookup decoding do that); use a DynamicCache"
            )
        super().crop(tokens_to_remove)

    def check(self, queries: Tensor) -> None:
        """Refuse new tokens `[1 or batch, T]` at positions that may see dropped ones.

        Raises:
            PatchError: a position is not beyond the last one.
        """
        if not self.dropped:
            return
        last = self.rope_extend_positions[:, self.held - 1, None]
        wrong = queries <= last
        if bool(wrong.any()):
            position, before = (int(each.expand_as(wrong)[wrong][0]) for each in (queries, last))
            raise PatchError(
                f"this SinkCache dropped {self.dropped} tokens, and position {position} is not after "
                f"position {before}; start another text with another cache"
            )

    def of_mask(self, mask: Tensor) -> Tensor:
        """The columns of a mask of the whole text that belong to tokens that are held, or new."""
        if not self.dropped:
            return mask
        head = self._head()
        return torch.cat([mask[..., :head], mask[..., head + self.dropped :]], dim=-1)

    def trim(self) -> None:
        """After a forward: drop the tokens that no later one sees, if they are many."""
        window = self.encoding.window
        more = max(_MORE, window // 4)
        if self.held < window - 1 + more:
            return
        positions, head = self.rope_extend_positions, self._head()
        seen = (positions > positions[:, -1:] - (window - 1)).any(dim=0)
        seen[:head] = False
        stop = int(seen.to(torch.int8).argmax()) if bool(seen.any()) else self.held
        if stop - head < more:
            return
        for layer in self.layers:
            if layer.keys is not None:
                layer.drop(head, stop)
        self._head_then = head
        self.rope_extend_positions = torch.cat([positions[:, :head], positions[:, stop:]], dim=1)

    def _head(self) -> int:
        """The columns up to the last one that is among the first n tokens of a row.

        Tokens are dropped after these, so they stay the same when a row with more padding is removed.
        """
        if self.dropped:
            return self._head_then
        first = (self.rope_extend_positions < self.encoding.sinks).any(dim=0).nonzero()
        return int(first[-1]) + 1 if len(first) else 0


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
    handler: Any = getattr(base.base_model, HANDLER, None)
    encoding = getattr(handler, "encoding", None)
    if not isinstance(encoding, Sinks):
        raise PatchError(
            f"sink_cache: the model is not patched with sinks, but with {encoding or 'nothing'}; call "
            f"rope_extend.extend(model, target_length, 'sinks') first"
        )
    cache: Any = SinkCache(encoding, base.config.get_text_config(decoder=True))
    modules = [module for module in base.base_model.modules() if getattr(module, HANDLER, None) is handler]
    handled = {getattr(module, "layer_idx", None) for module in modules}
    others = [str(index) for index in range(len(cache.layers)) if index not in handled]
    if others:
        raise UnsupportedModelError(
            f"sink_cache: {base.config.model_type} has layers that need all their keys, such as layers "
            f"without RoPE or with keys of images (layers {', '.join(others)} of {len(cache.layers)}); use "
            f"an ordinary cache, such as DynamicCache(config=model.config)"
        )
    cache.rope_extend_encoding, cache.rope_extend_shape = handler.encoding, handler.shape
    cache.rope_extend_positions = torch.zeros(1, 0, dtype=torch.int64, device="cpu")
    cache.__class__ = tracked(SinkCache)
    found: SinkCache = cache
    return found
