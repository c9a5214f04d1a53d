"""Keys of a cache as the present table rotates them, kept from one decoded token to the next.

A length-dependent table changes rarely. So the rotated keys of a layer are kept next to the unrotated ones,
and a step of decoding rotates the new key alone. All keys are rotated again when the table changes, and
whenever the cache is not in the state that the step before left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from rope_extend.attention.growing import GROWS, Growing, base_of

KEPT = "rope_extend_rotated_keys"
"""Attribute of a cache: `RotatedKeys` by the index of a layer. Copies of the cache do not have it."""
CHOICE = "rope_extend_keep_rotated_keys"
"""Attribute of a cache by which users choose. Without it, rotated keys are kept."""


class RotatedKeys(NamedTuple):
    """The rotated keys of one layer; a tuple, so that tools that look for tensors find them."""

    state: tuple[int, ...]
    """What the rotation depends on besides positions, such as the lengths that set the table."""
    keys: Growing
    """`[batch, kv_heads, n, head_dim]`, for the first n tokens of the layer."""
    source: Tensor
    """The layer's unrotated keys. While they are held, no other tensor gets their memory."""
    version: int
    """How often the memory of `source` had been written to."""

    def continues(self, state: tuple[int, ...], key: Tensor) -> bool:
        """Whether these are the rotated keys of all tokens but the last of `key`, under the same table."""
        return self.source is key and self.state == state and self.keys.view.shape[2] == key.shape[2] - 1


def layer_with(
    query: Tensor, key: Tensor, value: Tensor, past: Cache | None, index: Any
) -> DynamicLayer | None:
    """The layer of a cache whose keys `key` is; None if rotated keys cannot be kept for it.

    Only layers that are known to hold their keys in one tensor that they never write to. Kept keys are
    written to by the next token, so no backward pass may need them.
    """
    if past is None or not isinstance(index, int) or not vars(past).get(CHOICE, True):
        return None
    if torch.is_grad_enabled() and (query.requires_grad or value.requires_grad or key.requires_grad):
        return None
    layers = getattr(past, "layers", ())
    if key.is_meta or key.is_inference() or index >= len(layers):
        return None
    layer = layers[index]
    known = type(layer) is DynamicLayer or getattr(type(layer), GROWS, False)
    return layer if known and layer.keys is key else None


def kept_keys(past: Cache, index: int) -> RotatedKeys | None:
    """The rotated keys of a layer; None if there are none."""
    kept: dict[int, RotatedKeys] = vars(past).get(KEPT, {})
    return kept.get(index)


def keep(past: Cache, index: int, state: tuple[int, ...], keys: Growing, key: Tensor) -> None:
    """Keep the rotated keys of a layer whose unrotated ones are `key`."""
    vars(past).setdefault(KEPT, {})[index] = RotatedKeys(state, keys, key, key._version)


def released(past: Cache, index: int, before: Tensor | None) -> RotatedKeys | None:
    """Before a layer gets new keys: its rotated keys, which are no longer kept; None if they are out of date.

    `before` are the layer's keys. They may have been cropped since their rotated keys were kept.
    """
    kept: dict[int, RotatedKeys] = vars(past).get(KEPT, {})
    rotated = kept.pop(index, None)
    if rotated is None or before is None or not _is_start_of(before, rotated):
        return None
    keys = rotated.keys
    if before.shape[2] < keys.view.shape[2]:
        # Nobody else has these keys, so the cropped ones are written to again.
        rotated = rotated._replace(keys=Growing(keys.whole, keys.whole.narrow(2, 0, before.shape[2])))
    return rotated._replace(source=rotated.keys.view)  # the layer's keys can be freed


def follow(past: Cache, index: int, rotated: RotatedKeys, after: Tensor) -> None:
    """After a layer got new keys: keep the rotated keys of the first tokens of `after`."""
    if not after.is_inference():  # its changes are not counted
        keep(past, index, rotated.state, rotated.keys, after)


def _is_start_of(before: Tensor, rotated: RotatedKeys) -> bool:
    """Whether a tensor is the source of rotated keys, or its first tokens, and was not written to."""
    source = rotated.source
    if before is not source:
        same = before._base is base_of(source) and before.storage_offset() == source.storage_offset()
        if not same or before.dim() != 4 or before.stride() != source.stride():
            return False
        if before.shape[:2] != source.shape[:2] or before.shape[2] > source.shape[2]:
            return False
    return before._version == rotated.version
