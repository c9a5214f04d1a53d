"""A layer of a cache that puts its latest keys together with the others only when somebody reads them.

Where the model itself rotates a decoded token, attention uses rotated keys. The unrotated ones are needed
again when the frequencies change, or if a user reads them. So each new one is kept as it is. To copy all keys
for a token, or to have memory for further ones, would cost time or bytes.
"""

from __future__ import annotations

from threading import RLock
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from rope_extend.attention.growing import joined

_KEYS = "keys"
"""The entry of a layer's `__dict__` with all keys but the latest."""
_MOST = 64
"""The number of tokens whose keys are kept one by one, at most."""
_CHANGING = RLock()
"""Held while keys change: other threads may read them, and so gather them, while a model decodes."""


class GatheringLayer(DynamicLayer):  # type: ignore[misc]
    """A `DynamicLayer` whose `keys` `[batch, kv_heads, n, head_dim]` are gathered when they are read.

    A layer becomes one by `gathering`, and stays one. `update` and other methods are those of transformers.
    """

    rope_extend_grows = True
    rope_extend_later: tuple[Tensor, ...] = ()
    """The latest keys, `[batch, kv_heads, 1, head_dim]` each; in an attribute, where tools find tensors."""
    rope_extend_known: tuple[Tensor, int] | None = None
    """The other keys, and how often their memory had been written to, see `know`; None if replaced."""

    @property
    def keys(self) -> Tensor | None:
        """All keys."""
        if self.rope_extend_later:
            self._gather()
        keys: Tensor | None = self.__dict__[_KEYS]
        return keys

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        with _CHANGING:
            self.__dict__[_KEYS] = keys
            self.rope_extend_later, known = (), self.rope_extend_known
            if known is not None and (keys is None or keys._base is not known[0]):  # more than a crop
                self.rope_extend_known = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are plain layers, with all keys."""
        own = ("rope_extend_later", "rope_extend_known")
        state = {"keys": self.keys, **{name: value for name, value in vars(self).items() if name not in own}}
        return DynamicLayer, (), state

    def get_seq_length(self) -> int:
        """The number of tokens."""
        with _CHANGING:
            later = self.rope_extend_later
            return int(self.__dict__[_KEYS].shape[2]) + len(later) if later else int(super().get_seq_length())

    def know(self) -> None:
        """From here on, notice what changes the keys, except for `add_key`."""
        keys = self.__dict__[_KEYS]
        self.rope_extend_known = keys, keys._version

    def is_known(self) -> bool:
        """Whether nothing but `add_key` changed the keys since `know`."""
        keys, known = self.__dict__[_KEYS], self.rope_extend_known
        return known is not None and known[0] is keys and known[1] == keys._version

    def add_key(self, key: Tensor) -> None:
        """Add the key of a token, `[batch, kv_heads, 1, head_dim]`."""
        key = key.clone()  # it may be a part of a larger tensor
        with _CHANGING:
            self.rope_extend_later = later = *self.rope_extend_later, key
            if len(later) >= _MOST:
                self._gather()

    def _gather(self) -> None:
        with _CHANGING:
            if not self.rope_extend_later:
                return
            known = self.is_known()
            self.__dict__[_KEYS] = joined([self.__dict__[_KEYS], *self.rope_extend_later])
            self.rope_extend_later = ()
            if known:
                self.know()


def gathering(layer: Any) -> GatheringLayer | None:
    """A layer of a cache, which gathers its keys from here on; None if it is of another class."""
    if type(layer) is DynamicLayer:
        layer.__class__ = GatheringLayer
    return layer if type(layer) is GatheringLayer else None
