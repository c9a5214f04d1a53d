"""Keys and values of a cache that grow in memory of their own, without copying those of earlier tokens.

Stock caches copy all keys and values for each new token. Here the new ones are written after the earlier
ones, into memory that was allocated for a few tokens more. What a tensor shows is never written to again. So
views that a user has, or the layer of another cache, keep their values, as with stock caches.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

ROOM = "rope_extend_room"
"""Attribute of a cache: a `Growing` for keys and one for values, by the index of a layer. Not in copies."""
GROWS = "rope_extend_grows"
"""Attribute of a class: whether its layers may grow in place, as a `DynamicLayer` may; on a class of caches,
whether its `update` adds nothing to that of transformers."""


class Growing(NamedTuple):
    """A tensor, and the memory in which it may grow; a tuple, so that tools that look for tensors find it."""

    whole: Tensor
    """`[batch, heads, capacity, width]`."""
    view: Tensor
    """The first n columns of `whole`. Later ones were never shown."""

    def takes(self, current: Tensor, new: Tensor) -> bool:
        """Whether `new` can be written after `current`."""
        if current is not self.view or not fits(current, new):
            return False
        return current.shape[2] + new.shape[2] <= self.whole.shape[2]

    def append(self, new: Tensor) -> Growing:
        """With the columns of `new`."""
        start, count = self.view.shape[2], new.shape[2]
        self.whole.narrow(2, start, count).copy_(new)
        return Growing(self.whole, self.whole.narrow(2, 0, start + count))


def fits(states: Tensor, new: Tensor) -> bool:
    """Whether `new` can follow `states`: the same rows, heads, width, dtype and device."""
    if states.dtype != new.dtype or states.dim() != 4 or new.dim() != 4 or states.device != new.device:
        return False
    rows, heads, _, width = states.shape
    others = new.shape
    return rows == others[0] and heads == others[1] and width == others[3]


def spare(tokens: int) -> int:
    """For how many further tokens memory is allocated: a few, and two of a thousand in long texts."""
    return max(8, tokens // 512)


def allocated(states: Tensor, more: int = 0, capacity: int = 0) -> Growing:
    """A copy of `states` `[batch, heads, n, width]`, with memory for `more` and `spare` columns.

    If `capacity` is enough for them, for this number of columns in all.
    """
    rows, heads, tokens, width = states.shape
    columns = capacity if capacity >= tokens + more else tokens + more + spare(tokens + more)
    # Tensors of inference mode do not count their changes.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        whole = states.new_empty(rows, heads, columns, width)
    view = whole.narrow(2, 0, tokens)
    view.copy_(states)
    return Growing(whole, view)


def updates_as_stock(cls: Any, layer: Any) -> bool:
    """Whether a class of caches and a layer have the `update` of transformers, not one of a user's own."""
    return (cls.update is Cache.update or GROWS in vars(cls)) and "update" not in vars(layer)


def append(cache: Any, key: Tensor, value: Tensor, index: int) -> tuple[Tensor, Tensor] | None:
    """Add keys and values to a layer of a cache in place, and return all of them; None if it must copy.

    A layer grows in place if its class is known to hold nothing but its keys and values. Gradients need the
    tensors of each step as they are.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or cache.offloading:
        return None
    if index >= len(cache.layers) or key.is_meta:
        return None
    layer = cache.layers[index]
    rooms: dict[int, tuple[Growing, Growing]] = vars(cache).setdefault(ROOM, {})
    room = rooms.get(index)
    if room is None or not (room[0].takes(layer.keys, key) and room[1].takes(layer.values, value)):
        if type(layer) is not DynamicLayer and not getattr(type(layer), GROWS, False):
            return None
        keys, values = layer.keys, layer.values
        if keys is None or not fits(keys, key) or not fits(values, value) or keys.shape[2] != values.shape[2]:
            return None
        rooms.pop(index, None)
        room = None
        of_keys = allocated(keys, key.shape[2])
        layer.keys = of_keys.view
        del keys  # one copy at a time takes memory
        of_values = allocated(values, value.shape[2])
        layer.values = of_values.view
        del values
        room = of_keys, of_values
    rooms[index] = room = room[0].append(key), room[1].append(value)
    layer.keys, layer.values = room[0].view, room[1].view
    return layer.keys, layer.values
