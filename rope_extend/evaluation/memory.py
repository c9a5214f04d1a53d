"""Counting the bytes that a computation holds, exactly and on any device, the meta device included."""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is active, the bytes of what operations return, for as long as it lives.

    What was there before does not count, nor what kernels take and give back by themselves.

    Attributes:
        live: bytes at present.
        peak: the most at one time.
        largest: elements of the largest tensor.
        operations: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.largest = self.operations = 0
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return out

    def add(self, tensor: torch.Tensor) -> Self:
        """Count a tensor that was there before."""
        self.largest = max(self.largest, tensor.numel())
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._held:
            self._held[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key)
        return self

    def _forget(self, key: int) -> None:
        self.live -= self._held.pop(key)
