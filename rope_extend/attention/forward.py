"""What all layers of one forward of a model share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rope_extend.encodings.core.transfers import to_device

_Value = TypeVar("_Value")


class Forward:
    """The positions of the queries of one forward, and what all its layers share.

    Positions are on the CPU: lengths and segments follow from their values, and each look at a value on a GPU
    would wait for it.

    Attributes:
        queries: positions `[1 or batch, T]`.
    """

    def __init__(self, queries: Tensor) -> None:
        self.queries = queries
        self._kept: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def once(
        self,
        *name: Any,
        compute: Callable[[], _Value],
        of: Any = None,
        keep: Callable[[_Value], bool] = lambda value: True,
    ) -> _Value:
        """A value that is computed in one layer, and used again in the next ones.

        Args:
            name: what the value is, and all that it depends on besides `of`.
            compute: computes it.
            of: the mask or the positions that it belongs to.
            keep: whether a value is kept.
        """
        name = (*name, id(of))
        if name in self._kept:
            kept: _Value = self._kept[name][1]
            return kept
        value = compute()
        if keep(value):
            self._kept[name] = of, value  # with the object, so that no other one gets its id
        return value

    def on(self, device: torch.device, values: Tensor) -> Tensor:
        """A tensor of this forward, copied to a device once for all layers there."""
        return self.once("copy", device, of=values, compute=lambda: to_device(values, device))
