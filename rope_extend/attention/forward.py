"""What all layers of one forward of a model share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rope_extend.encodings.core.transfers import to_device
from rope_extend.models.planned_device import device_of

TABLE_BYTES, GPU_TABLE_BYTES = 2**28, 2**31
"""The size of the tensors of one forward that are kept for the next layer.

On a GPU, tables come from the host, and a copy from there waits.
"""

_Value = TypeVar("_Value")


class Forward:
    """The positions of the queries of one forward, and what all its layers share.

    Positions are on the CPU: lengths and segments follow from their values, and each look at a value on a GPU
    would wait for it.

    Attributes:
        queries: positions `[1 or batch, T]`.
        readers: ids of the modules that have asked for it.
    """

    def __init__(self, queries: Tensor) -> None:
        self.queries = queries
        self.readers: set[int] = set()
        self._kept: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._bytes = 0

    def cached(self, *name: Any, compute: Callable[[], _Value], of: Any = None) -> _Value:
        """A value that is computed in one layer, and kept for the next ones while tensors are few.

        Args:
            name: what the value is, and all that it depends on besides `of`.
            compute: computes it.
            of: the mask or the positions that it belongs to.
        """
        name = (*name, id(of))
        if name in self._kept:
            kept: _Value = self._kept[name][1]
            return kept
        value = compute()
        tensors = [
            each for each in (value if isinstance(value, tuple) else [value]) if isinstance(each, Tensor)
        ]
        size = sum(each.numel() * each.element_size() for each in tensors)
        on_a_cpu = all(device_of(each).type == "cpu" for each in tensors)
        if self._bytes + size <= (TABLE_BYTES if on_a_cpu else GPU_TABLE_BYTES):
            self._bytes += size
            self._kept[name] = of, value  # with the object, so that no other one gets its id
        return value

    def on(self, device: torch.device, values: Tensor) -> Tensor:
        """A tensor of this forward, copied to a device once for all layers there."""
        return self.cached("copy", device, of=values, compute=lambda: to_device(values, device))
