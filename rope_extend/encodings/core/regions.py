"""Regions of pairs of a query and a key: which pairs belong to one, and how it is rotated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DROPPED = -1
"""The region of pairs that do not attend."""

PositionMap = Callable[[Tensor], Tensor]
"""From positions `[...]`, float64 whole tokens, to the positions that are used for rotation."""


@dataclass(frozen=True)
class Region:
    """Pairs of a query and a key whose distance is computed in the same way.

    Attributes:
        query: the position that a query is rotated to.
        key: the position that a key is rotated to.
        schedule: the `RopeEncoding` of the frequencies, by the length of `regions`; None for plain RoPE. In a
            position map, its factor on cos and sin belongs to all pairs of a query (`factor_of_queries`).
    """

    query: PositionMap
    key: PositionMap
    schedule: Any = None


def _same(positions: Tensor) -> Tensor:
    return positions


NEAR = Region(_same, _same)
"""The region of pairs that keep their own positions; it is the first of every method."""


@dataclass(frozen=True)
class Everywhere:
    """All pairs are in region 0."""

    def region(self, query: Tensor, key: Tensor) -> Tensor:
        """The region of each pair, int64, for positions that broadcast."""
        return torch.zeros_like(query - key)


@dataclass(frozen=True)
class Bands:
    """Region 0 holds pairs closer than `window` tokens, region 1 all others."""

    window: int

    def region(self, query: Tensor, key: Tensor) -> Tensor:
        """The region of each pair, int64, for positions that broadcast; a later key is near."""
        return (query - key >= self.window).to(torch.int64)

    def is_plain(self, lowest: int, highest: int) -> bool:
        """Whether all pairs of positions from `lowest` to `highest` are in region 0."""
        return highest - lowest < self.window


@dataclass(frozen=True)
class Chunks:
    """Positions are cut into chunks. Region 0 is a pair of one chunk, 1 of neighbours, 2 of all others."""

    size: int

    def region(self, query: Tensor, key: Tensor) -> Tensor:
        """The region of each pair, int64, for positions that broadcast; no key may be later."""
        return (query // self.size - key // self.size).clamp(0, 2).to(torch.int64)

    def is_plain(self, lowest: int, highest: int) -> bool:
        """Whether all pairs of positions from `lowest` to `highest` are in region 0."""
        return highest // self.size == lowest // self.size


@dataclass(frozen=True)
class StartAndWindow:
    """Keys below position `start` are region 1, others closer than `window` region 0, the rest is dropped."""

    start: int
    window: int

    def region(self, query: Tensor, key: Tensor) -> Tensor:
        """The region of each pair, int64, or DROPPED, for positions that broadcast; a later key is near."""
        near = torch.where(query - key < self.window, 0, DROPPED)
        return torch.where((key < self.start) & (key <= query), 1, near)

    def is_plain(self, lowest: int, highest: int) -> bool:
        """Whether all pairs of positions from `lowest` to `highest` keep their own distance."""
        return highest - lowest < self.window


Borders = Everywhere | Bands | Chunks | StartAndWindow
