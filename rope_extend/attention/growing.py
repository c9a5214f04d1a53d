"""Keys and values of a cache that grow in memory of their own, seldom copying those of earlier tokens.

Stock caches copy all keys and values for each new token. Here the new ones are written after the earlier
ones, into memory that was allocated for a few tokens more. What a tensor shows is never written to again. So
views that a user has, or the layer of another cache, keep their values, as with stock caches.
"""

from __future__ import annotations

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
    slots: tuple[Tensor, ...] = ()
    """The next columns of `whole`, one by one; none where it is copied next."""

    def extended(self, new: Tensor) -> Growing:
        """With the columns of `new` `[batch, heads, m, width]`: in place, or in memory for `spare` more."""
        start, count = self.view.shape[2], new.shape[2]
        stop = start + count
        if stop > self.whole.shape[2]:
            return _copied([self.view, new], spare(stop))
        self.whole.narrow(2, start, count).copy_(new)
        return Growing(self.whole, self.whole.narrow(2, 0, stop), self.slots[count:])

    def with_column(self, new: Tensor, number: int) -> Growing:
        """With one column `[batch, heads, 1, width]`: in place, or in memory for few more, see `few`."""
        whole, view, slots = self
        stop = view.shape[2] + 1
        if slots:
            slots[0].copy_(new)
            return Growing(whole, whole.narrow(2, 0, stop), slots[1:])
        room = few(stop, number)
        if room or torch.is_inference_mode_enabled():
            return _copied([view, new], room)
        whole = torch.cat([view, new], dim=2)  # as `_copied` would, in fewer calls
        return Growing(whole, whole)


def without_room(states: Tensor) -> Growing:
    """A tensor that is copied when it grows."""
    return Growing(states, states)


def spare(tokens: int) -> int:
    """For how many further tokens memory is allocated: a few, and two of a thousand in long texts."""
    return max(8, tokens // 512)


def few(tokens: int, number: int) -> int:
    """For how many further tokens memory is allocated, where all tensors of a cache together have little.

    None in short texts: there, to copy a tensor takes no longer than to cut its memory. At most one of 256 in
    others. Each tensor has a number, and others of them have room at any time. So together they have half of
    that, and no token copies many.
    """
    if tokens < _SHORT:
        return 0
    period = 1 + tokens // 256
    shift = int(number * _GOLDEN % 1 * period)
    return -(tokens + shift) % period


_SHORT = 1024
_GOLDEN = (5**0.5 - 1) / 2
"""Multiples of this, without whole numbers, lie evenly between 0 and 1, however many they are."""


def with_room(states: Tensor, room: int) -> Growing:
    """A copy of states `[batch, heads, n, width]`, with memory for further columns."""
    return _copied([states], room)


def _copied(parts: list[Tensor], room: int) -> Growing:
    """Consecutive columns, in memory of their own with `room` more."""
    if room == 0:
        whole = joined(parts)
        return Growing(whole, whole)
    # It has to hold some tensor, and copies of a column take the fewest operations.
    last = parts[-1]
    if last.shape[2] == 1:
        parts = [*parts[:-1], last.expand(-1, -1, 1 + room, -1)]
    else:
        parts = [*parts, last.narrow(2, 0, 1).expand(-1, -1, room, -1)]
    whole = joined(parts)
    view, *slots = whole.split_with_sizes([whole.shape[2] - room] + [1] * room, dim=2)
    return Growing(whole, view, tuple(slots))


def joined(parts: list[Tensor]) -> Tensor:
    """Consecutive columns `[batch, heads, m, width]` in memory of their own."""
    if not torch.is_inference_mode_enabled():
        return torch.cat(parts, dim=2)
    # Tensors of inference mode do not count their changes; outside of it, gradients are on.
    with torch.inference_mode(False), torch.no_grad():
        return torch.cat(parts, dim=2)


def base_of(states: Tensor) -> Tensor:
    """The tensor that states are a view of; themselves if they are none."""
    return states if states._base is None else states._base


def fits(states: Tensor, new: Tensor) -> bool:
    """Whether `new` can follow `states`: the same rows, heads, width, dtype and device."""
    if states.dtype != new.dtype or states.dim() != 4 or new.dim() != 4 or states.device != new.device:
        return False
    rows, heads, _, width = states.shape
    others = new.shape
    return rows == others[0] and heads == others[1] and width == others[3]


def updates_as_stock(cls: Any, layer: Any) -> bool:
    """Whether a class of caches and a layer have the `update` of transformers, not one of a user's own."""
    return (cls.update is Cache.update or GROWS in vars(cls)) and "update" not in vars(layer)


def append(
    cache: Any, key: Tensor, value: Tensor, index: int, number: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """Add keys and values to a layer of a cache in place, and return all of them; None if it must copy.

    A layer grows in place if its class is known to hold nothing but its keys and values. Gradients need the
    tensors of each step as they are. With the `number` of the values, see `few`, they get little memory for
    further tokens, and keys none.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or cache.offloading:
        return None
    if index >= len(cache.layers) or key.is_meta:
        return None
    layer = cache.layers[index]
    if type(layer) is not DynamicLayer and not getattr(type(layer), GROWS, False):
        return None
    keys, values = layer.keys, layer.values
    if keys is None or not fits(keys, key) or not fits(values, value) or keys.shape[2] != values.shape[2]:
        return None
    rooms: dict[int, tuple[Growing, Growing]] = vars(cache).setdefault(ROOM, {})
    of_keys, of_values = rooms.pop(index, (None, None))
    if of_keys is None or of_keys.view is not keys:
        of_keys = without_room(keys)
    if of_values is None or of_values.view is not values:
        of_values = without_room(values)
    del keys, values  # one copy at a time takes memory
    of_keys = of_keys.extended(key) if number is None else without_room(joined([of_keys.view, key]))
    layer.keys = of_keys.view
    of_values = of_values.extended(value) if number is None else of_values.with_column(value, number)
    layer.values = of_values.view
    rooms[index] = of_keys, of_values
    return layer.keys, layer.values
