"""Decoding in which the model's own rotation gives the new key twice: without rotation, and rotated.

Caches hold unrotated keys, and attention needs rotated ones. cos and sin of two rows, one of no rotation and
one of the token's position, give queries and keys of two rows. So a step of decoding has no rotation of ours,
and a cache writes both keys and the value at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from rope_extend.attention.growing import ROOM, Growing
from rope_extend.attention.rotated_keys import (
    KEPT,
    RotatedKeys,
    extended,
    keep,
    kept_keys,
    layer_with,
    replaced,
)

PLACES = "rope_extend_places"
"""Attribute of a cache: `Places` by the index of a layer. Copies of the cache do not have it."""
AHEAD = 8
"""Tokens for which the views of a layer's memory are made together. That is faster than one by one."""


class Place(NamedTuple):
    """What a layer shows after some token, and the memory of the next one."""

    keys: Tensor
    """Unrotated, `[batch, kv_heads, n, head_dim]`."""
    values: Tensor
    rotated: Tensor
    slots: list[Tensor]
    """For the unrotated key, the rotated key and the value of the next token; empty if there are none."""


class Places(NamedTuple):
    """The next few tokens of a layer; a tuple, so that tools that look for tensors find them."""

    like: tuple[Any, ...]
    """What the states of a token must be like, see `_like`."""
    wholes: tuple[Tensor, ...]
    """The memory of keys, rotated keys and values, see `Growing`."""
    coming: list[Place]
    """The last one is the present state of the layer."""
    version: list[int]
    """How often the memory of its keys had been written to, one number."""


class TwoRows:
    """One forward of one token, with cos and sin of two rows.

    Args:
        past: a `DynamicCache` with positions.
        state: what the rotation depends on besides positions, see `RotatedKeys`.
        rotated: rotates all keys of a layer `[batch, kv_heads, n, head_dim]` by the tables of this forward.
    """

    def __init__(self, past: Cache, state: tuple[int, ...], rotated: Callable[[Tensor], Tensor]) -> None:
        self.past = past
        self.state = state
        self.rotated = rotated
        self._places: dict[int, Places] = vars(past).setdefault(PLACES, {})
        self._given: Tensor | None = None
        self._layer = -1

    def gave(self, key: Tensor) -> bool:
        """Whether `key` are the rotated keys that the latest `add` returned."""
        return key is self._given

    def awaits(self, index: int) -> bool:
        """Whether the latest `add` returned rotated keys, and was of this layer."""
        return self._given is not None and self._layer == index

    def add(self, key_states: Tensor, value_states: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Add a token to a layer: its key `[batch, kv_heads, 2, head_dim]` and value `[..., 1, value_dim]`.

        Returns all rotated keys and values; unrotated keys if rotated ones cannot be kept for the layer.
        """
        places = self._places.get(index)
        if places is not None and self._is_next(places, key_states, value_states, index):
            layer, coming = self.past.layers[index], places.coming
            torch._foreach_copy_(coming[-1].slots, [*key_states.chunk(2, dim=2), value_states])
            coming.pop()
            here = coming[-1]
            layer.keys, layer.values = here.keys, here.values
            places.version[0] = here.keys._version
            self._given, self._layer = here.rotated, index
            return here.rotated, here.values
        del places  # frees its memory as soon as all is copied
        return self._add(key_states, value_states, index)

    def _is_next(self, places: Places, key_states: Tensor, value_states: Tensor, index: int) -> bool:
        """Whether a layer is as its prepared places say, and the next one fits a token."""
        here, layer = places.coming[-1], self.past.layers[index]
        if not here.slots or layer.keys is not here.keys or layer.values is not here.values:
            return False
        if here.keys._version != places.version[0] or torch.is_grad_enabled() or "update" in vars(layer):
            return False
        return places.like == _like(self.state, key_states, value_states)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def add_uncompiled(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """`add`, for layers that are compiled."""
        return self.add(*arguments)

    def _add(self, key_states: Tensor, value_states: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """`add` for a layer without a prepared place."""
        past: Any = self.past
        self._given = None
        plain, new = key_states.chunk(2, dim=2)
        keys, values = past.add_states(plain, value_states, index)
        if layer_with(plain, keys, values, past, index) is None:
            return keys, values
        kept, room = kept_keys(past, index), vars(past).get(ROOM, {}).get(index)
        capacity = 0 if room is None else room[0].whole.shape[2]  # so that all grow at the same token
        if kept is not None and kept.continues(self.state, keys):
            rotated = extended(kept, new, capacity)
        else:
            rotated = replaced(kept, self.rotated(keys), capacity)
        keep(past, index, self.state, rotated, keys)
        _prepare(past, index, _like(self.state, key_states, value_states))
        self._given, self._layer = rotated.view, index
        return rotated.view, values


def settle(past: Cache, index: int) -> None:
    """Write the state of a layer as other steps take it, and forget what was prepared for the next tokens."""
    places: Places | None = vars(past).get(PLACES, {}).pop(index, None)
    if places is None:
        return
    here, (keys, rotated, values) = places.coming[-1], places.wholes
    vars(past).setdefault(ROOM, {})[index] = Growing(keys, here.keys), Growing(values, here.values)
    kept = RotatedKeys(places.like[0], Growing(rotated, here.rotated), here.keys, places.version[0])
    vars(past).setdefault(KEPT, {})[index] = kept


def _prepare(past: Cache, index: int, like: tuple[Any, ...]) -> None:
    """Cut the memory of the next few tokens of a layer; `like` is that of its latest token, see `_like`."""
    room: tuple[Growing, Growing] | None = vars(past).get(ROOM, {}).get(index)
    kept = kept_keys(past, index)
    if room is None or kept is None or room[0].view is not kept.source:
        return
    growing = room[0], kept.keys, room[1]
    start = kept.source.shape[2]
    count = min(AHEAD, *(each.whole.shape[2] - start for each in growing))
    if count == 0:
        return
    sizes = [1] * count
    slots = zip(
        *(each.whole.narrow(2, start, count).split_with_sizes(sizes, dim=2) for each in growing), strict=True
    )
    shown = [tuple(each.view for each in growing)]
    for stop in range(start + 1, start + count + 1):
        shown.append(tuple(each.whole.narrow(2, 0, stop) for each in growing))
    coming = [Place(keys, values, rotated, [*next(slots, ())]) for keys, rotated, values in shown]
    wholes = tuple(each.whole for each in growing)
    vars(past).setdefault(PLACES, {})[index] = Places(like, wholes, coming[::-1], [kept.version])
    vars(past)[ROOM].pop(index)
    vars(past)[KEPT].pop(index)


def _like(state: tuple[int, ...], key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """What the states of two tokens must have in common, so that one can follow the other."""
    return state, key.shape, value.shape, key.dtype, value.dtype, key.device
