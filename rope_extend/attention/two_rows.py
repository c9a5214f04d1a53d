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

from rope_extend.attention.gathering_layer import GatheringLayer, gathering
from rope_extend.attention.growing import ROOM, Growing, base_of, with_room, without_room
from rope_extend.attention.rotated_keys import (
    KEPT,
    RotatedKeys,
    keep,
    kept_keys,
    layer_with,
)

PLACES = "rope_extend_places"
"""Attribute of a cache: `Place` by the index of a layer. Copies of the cache do not have it."""


class Place(NamedTuple):
    """A layer as the step before left it; a tuple, so that tools that look for tensors find them."""

    layer: GatheringLayer
    """It has the unrotated keys."""
    like: tuple[Any, ...]
    """What the states of the next token must be like, see `_like`."""
    rotated: Growing
    """`[batch, kv_heads, n, head_dim]`."""
    values: Growing


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
        self._places: dict[int, Place] = vars(past).setdefault(PLACES, {})
        self._given: Tensor | None = None
        self._layer = -1

    def gave(self, key: Tensor) -> bool:
        """Whether `key` are the rotated keys that the latest `add` returned."""
        return key is self._given

    def awaits(self, index: int) -> bool:
        """Whether the latest `add` returned rotated keys, and was of this layer."""
        return self._given is not None and self._layer == index

    @staticmethod
    def number_of_values(index: int) -> int:
        """The number of a layer's values in its cache, see `few`; its rotated keys have the one before."""
        return 2 * index + 1

    def add(self, key_states: Tensor, value_states: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Add a token to a layer: its key `[batch, kv_heads, 2, head_dim]` and value `[..., 1, value_dim]`.

        Returns all rotated keys and values; unrotated keys if rotated ones cannot be kept for the layer.
        """
        place = self._places.get(index)
        if place is None or not self._is_next(place, key_states, value_states, index):
            del place  # frees its memory as soon as all is copied
            return self._add(key_states, value_states, index)
        layer, like, rotated, values = place
        del self._places[index], place  # one copy at a time takes memory
        plain, new = key_states.split_with_sizes((1, 1), 2)
        layer.add_key(plain)
        rotated = rotated.with_column(new, 2 * index)
        values = values.with_column(value_states, 2 * index + 1)
        layer.values = values.view
        self._places[index] = Place(layer, like, rotated, values)
        self._given, self._layer = rotated.view, index
        return rotated.view, values.view

    def _is_next(self, place: Place, key_states: Tensor, value_states: Tensor, index: int) -> bool:
        """Whether a layer is as the step before left it, and takes a token."""
        layer = place.layer
        if self.past.layers[index] is not layer or layer.values is not place.values.view:
            return False
        if torch.is_grad_enabled() or not layer.is_known() or "update" in vars(layer):
            return False
        return place.like == _like(self.state, key_states, value_states)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def add_uncompiled(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """`add`, for layers that are compiled."""
        return self.add(*arguments)

    def _add(self, key_states: Tensor, value_states: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """`add` for a layer that is not as the step before left it."""
        past: Any = self.past
        self._given = None
        plain, new = key_states.split_with_sizes((1, 1), 2)
        keys, values = past.add_states(plain, value_states, index)
        if layer_with(plain, keys, values, past, index) is None:
            return keys, values
        kept = kept_keys(past, index)
        if kept is not None and kept.continues(self.state, keys):
            rotated = kept.keys.with_column(new, 2 * index)
        else:
            rotated = _owned(self.rotated(keys))
        keep(past, index, self.state, rotated, keys)
        _leave(past, index, _like(self.state, key_states, value_states))
        self._given, self._layer = rotated.view, index
        return rotated.view, values


def settle(past: Cache, index: int) -> None:
    """Write the state of a layer as other steps take it."""
    place: Place | None = vars(past).get(PLACES, {}).pop(index, None)
    if place is None or past.layers[index] is not place.layer:
        return
    if not _is_crop_of(place.layer.values, place.values):  # another cache with this layer decoded
        return
    keys, known = place.layer.keys, place.layer.rope_extend_known  # in this order: keys are gathered
    if keys is None or known is None:
        return
    vars(past).setdefault(ROOM, {})[index] = without_room(keys), place.values
    vars(past).setdefault(KEPT, {})[index] = RotatedKeys(place.like[0], place.rotated, *known)


def _is_crop_of(values: Tensor | None, before: Growing) -> bool:
    """Whether values are those before, or a crop of them."""
    return values is before.view or (values is not None and values._base is base_of(before.whole))


def _leave(past: Cache, index: int, like: tuple[Any, ...]) -> None:
    """Write the state of a layer as `TwoRows.add` takes it; `like` is that of its latest token."""
    room: tuple[Growing, Growing] | None = vars(past).get(ROOM, {}).get(index)
    kept = kept_keys(past, index)
    if room is None or kept is None or room[0].view is not kept.source:
        return
    layer = gathering(past.layers[index])
    if layer is not None:
        layer.know()
        vars(past).setdefault(PLACES, {})[index] = Place(layer, like, kept.keys, room[1])
        vars(past)[ROOM].pop(index)
        vars(past)[KEPT].pop(index)


def _owned(states: Tensor) -> Growing:
    """States that nothing else holds, without a copy of them."""
    if states.is_inference():  # it could not be written to later, as after a crop
        return with_room(states, 0)
    return without_room(states)


def _like(state: tuple[int, ...], key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """What the states of two tokens must have in common, so that one can follow the other."""
    return state, key.shape, value.shape, key.dtype, value.dtype, key.device
