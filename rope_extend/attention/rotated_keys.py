"""Keys of a cache as the present table rotates them, kept from one decoded token to the next.

A length-dependent table changes rarely. So the rotated keys of a layer are kept next to the unrotated ones,
and a step of decoding rotates the new key alone. All keys are rotated again when the table changes, and
whenever the cache is not in the state that the step before left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Cache
from transformers.cache_utils import DynamicLayer

KEPT = "rope_extend_rotated_keys"
"""Attribute of a cache: `RotatedKeys` by the index of a layer. Copies of the cache do not have it."""
CHOICE = "rope_extend_keep_rotated_keys"
"""Attribute of a cache by which users choose. Without it, rotated keys are kept."""
SPARE = 16
"""Tokens for which memory is allocated in addition. The kept keys are copied once in this many steps."""


class _Source(NamedTuple):
    """Which memory a tensor is, and in which state, except for the number of its tokens."""

    storage: StorageWeakRef
    """It does not keep the memory, but no other memory is equal to it, not even at the same address."""
    offset: int
    strides: tuple[int, ...]
    version: int


def _source(key: Tensor) -> _Source:
    storage = StorageWeakRef(key.untyped_storage())  # type: ignore[no-untyped-call]
    return _Source(storage, int(key.storage_offset()), key.stride(), key._version)


class RotatedKeys(NamedTuple):
    """The rotated keys of one layer; a tuple, so that tools that look for tensors find them."""

    lengths: tuple[int, ...]
    """The lengths that set the table, one for each row or one for all."""
    keys: Tensor
    """`[batch, kv_heads, capacity, head_dim]`."""
    tokens: int
    """The number of tokens whose keys these are."""
    source: _Source
    """The layer's unrotated keys."""

    def continues(self, lengths: tuple[int, ...], key: Tensor) -> bool:
        """Whether these are the rotated keys of all tokens but the last of `key`, under the same table."""
        rows = (*key.shape[:2], key.shape[-1])
        same = (*self.keys.shape[:2], self.keys.shape[-1]) == rows and self.keys.dtype == key.dtype
        return same and self.lengths == lengths and self.tokens == key.shape[2] - 1

    def room(self) -> Tensor:
        """The keys with memory for at least one token more."""
        if self.tokens < self.keys.shape[2]:
            return self.keys
        return allocated(self.keys[:, :, : self.tokens])


def allocated(keys: Tensor) -> Tensor:
    """A copy of keys `[batch, kv_heads, n, head_dim]` with memory for `SPARE` tokens more."""
    copy = keys.new_empty(*keys.shape[:2], keys.shape[2] + SPARE, keys.shape[-1])
    copy[:, :, : keys.shape[2]] = keys
    return copy


def layer_with(
    query: Tensor, key: Tensor, value: Tensor, past: Cache | None, index: Any
) -> DynamicLayer | None:
    """The layer of a cache whose keys `key` is; None if rotated keys cannot be kept for it.

    Only a `DynamicLayer` is known to hold its keys in one tensor that it never writes to. Kept keys are
    written to by the next token, so no backward pass may need them.
    """
    if torch.is_grad_enabled() and (query.requires_grad or value.requires_grad):
        return None
    if past is None or not getattr(past, CHOICE, True) or not isinstance(index, int):
        return None
    if key.is_meta or key.requires_grad or key.is_inference() or index >= len(past.layers):
        return None
    layer = past.layers[index]
    return layer if type(layer) is DynamicLayer and layer.keys is key else None


def keep(past: Cache, index: int, lengths: tuple[int, ...], keys: Tensor, key: Tensor) -> None:
    """Keep the rotated keys of a layer whose unrotated ones are `key`."""
    kept = vars(past).setdefault(KEPT, {})
    kept[index] = RotatedKeys(lengths, keys, key.shape[2], _source(key))


def drop_changed(past: Cache) -> None:
    """Before a forward: forget the rotated keys of layers that changed since the last one.

    A cache that was cropped has the same keys, but fewer.
    """
    kept: dict[int, RotatedKeys] = vars(past).get(KEPT, {})
    for index, rotated in list(kept.items()):
        key = getattr(past.layers[index], "keys", None)
        if not isinstance(key, Tensor) or key.dim() != 4 or key.is_inference():
            del kept[index]  # inference tensors have no version
        elif _source(key) != rotated.source:
            del kept[index]
        elif key.shape[2] < rotated.tokens:
            kept[index] = rotated._replace(tokens=key.shape[2])
