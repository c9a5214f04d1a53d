"""A cache whose keys have positions: what a patch adds to the class of a cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from rope_extend.attention.growing import ROOM, append, updates_as_stock
from rope_extend.attention.rotated_keys import CHOICE, KEPT, follow, released
from rope_extend.attention.two_rows import PLACES, TwoRows, settle
from rope_extend.encodings import Encoding, ModelShape, RopeShape
from rope_extend.errors import PatchError

RUNNING = "rope_extend_running"
"""Attribute of a cache while a decoder uses it that is patched with its encoding: True, or `TwoRows`."""

_OWN = (KEPT, ROOM, PLACES, RUNNING)
"""Attributes that copies of a cache do not have."""


class TrackedCache:
    """Mixed into a cache's class: the positions of its keys `[1 or batch, seen]`, reordered with its rows."""

    rope_extend_positions: Tensor
    rope_extend_encoding: Encoding
    rope_extend_shape: RopeShape | ModelShape
    """The sizes of the model, with its trained window, that the encoding was patched for."""

    def __reduce__(self) -> tuple[Any, ...]:
        _, cls, *_ = type(self).__mro__[1:]
        state = {name: value for name, value in vars(self).items() if name not in _OWN}
        return _new_tracked, (cls,), state  # the class itself cannot be found by its name

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Add keys and values of a layer.

        Raises:
            PatchError: the cache holds tokens, and the model is not patched with the encoding of their keys;
                or cos and sin of two rows did not give two keys.
        """
        running = vars(self).get(RUNNING)
        if type(running) is TwoRows:
            if key_states.shape[2] != 2 or value_states.shape[2] != 1:
                raise PatchError(
                    f"{self.rope_extend_encoding}: cos and sin had two rows for one token, but layer "
                    f"{layer_idx} caches {key_states.shape[2]} keys and {value_states.shape[2]} values; a "
                    f"hook or another rotation changed them. Set {CHOICE} = False on an empty cache, for "
                    f"cos and sin of one row"
                )
            if args or kwargs:
                return self.add_states(key_states[:, :, :1], value_states, layer_idx, *args, **kwargs)
            add = running.add_uncompiled if torch.compiler.is_compiling() else running.add
            return add(key_states, value_states, layer_idx)
        if running is not None:
            return self.add_states(key_states, value_states, layer_idx, *args, **kwargs)
        cache: Any = self
        if seen := cached_tokens(cache):
            raise PatchError(
                f"this {type(self).__name__} was filled under {self.rope_extend_encoding}, but the model is "
                f"no longer patched with it, so attention over the {seen} cached tokens would be wrong; "
                f"start from an empty cache, or patch the model with {self.rope_extend_encoding} again"
            )
        # It was emptied: its next keys are those of another encoding, or of none.
        _forget(self)
        for name in ("rope_extend_positions", "rope_extend_encoding", "rope_extend_shape"):
            vars(self).pop(name, None)
        _, cache.__class__, *_ = type(self).__mro__[1:]
        return cache.update(key_states, value_states, layer_idx, *args, **kwargs)

    def add_states(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer with new ones; rotated keys that are kept follow it."""
        cache: Any = self
        settle(cache, layer_idx)
        _, cls, *_ = type(self).__mro__[1:]
        layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
        rotated = released(cache, layer_idx, getattr(layer, "keys", None))
        known, added = layer is not None and updates_as_stock(cls, layer), None
        if known and not args and not kwargs:
            running = vars(self).get(RUNNING)
            number = running.number_of_values(layer_idx) if type(running) is TwoRows else None
            added = append(cache, key_states, value_states, layer_idx, number)
        if added is None:
            added = super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[misc]
        # A user's own update may have changed earlier keys.
        if known and rotated is not None and vars(self).get(CHOICE, True):
            follow(cache, layer_idx, rotated, added[0])
        return added

    def reset(self) -> None:
        """Empty the cache."""
        _forget(self)
        super().reset()  # type: ignore[misc]
        self.rope_extend_positions = self.rope_extend_positions[:, :0]

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Remove the last tokens; a cache that no forward may use stays refused."""
        cache: Any = self
        known, before = self.rope_extend_positions.shape[1], held_tokens(cache)
        super().crop(*args, **kwargs)  # type: ignore[misc]
        left = held_tokens(cache)
        if known < before and not is_even(cache):  # only some layers got the tokens of the last forward
            left = 0
        # Where keys were removed in another way, it is not known whose positions to remove.
        self.rope_extend_positions = self.rope_extend_positions[:, : left + max(0, known - before)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows for beam search."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        _forget(self)
        if self.rope_extend_positions.shape[0] > 1:
            self.rope_extend_positions = self.rope_extend_positions.repeat_interleave(repeats, dim=0)

    def _select_rows(self, rows: Any) -> None:
        """Select the positions of rows, by any index that tensors take."""
        _forget(self)
        positions = self.rope_extend_positions
        if positions.shape[0] > 1:
            rows = rows.to(positions.device) if isinstance(rows, Tensor) else rows
            self.rope_extend_positions = positions[rows]


def _forget(past: Any) -> None:
    """Forget all rotated keys of a cache, and free memory for further tokens."""
    for name in (KEPT, ROOM, PLACES):
        vars(past).pop(name, None)


@cache
def tracked(cls: Any) -> type:
    """A cache's class, for caches whose keys have positions of their own."""
    return type(cls.__name__, (TrackedCache, cls), {"__module__": cls.__module__})


def _new_tracked(cls: Any) -> Any:
    """An empty object of a cache's class with positions, for pickle."""
    new: Any = tracked(cls)
    return new.__new__(new)


def cached_tokens(past: Cache | None) -> int:
    """The number of tokens in a cache; 0 without one."""
    return 0 if past is None else int(past.get_seq_length())


def is_even(past: Cache | None) -> bool:
    """Whether all layers of a cache hold keys and values of the same number of tokens.

    They do not after an error or an interrupt inside a forward. Layers that were never filled do not count.
    """
    counts = set()
    for layer in getattr(past, "layers", ()):
        if isinstance(layer, CacheLayerMixin) and getattr(layer, "is_initialized", False):
            if layer.keys.shape[-2:-1] != layer.values.shape[-2:-1]:
                return False
            counts.add(int(layer.get_seq_length()))
    return len(counts) < 2


def is_plain(past: Cache | None) -> bool:
    """Whether a cache with positions is else a `DynamicCache` as transformers has it."""
    return isinstance(past, TrackedCache) and type(past).__mro__[2] is DynamicCache


def held_tokens(past: Cache | None) -> int:
    """The number of tokens whose keys are in a cache: not of those that it dropped."""
    held: int | None = getattr(past, "held", None)
    return cached_tokens(past) if held is None else held
