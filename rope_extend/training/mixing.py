"""The order in which blocks are read, from one source or from several by weight.

Which block comes at which position of the endless stream follows from the seed and the position alone. So a
run that goes on needs to know its step and nothing else, and the order does not depend on the number of
processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rope_extend.data import Blocks
from rope_extend.training.packing import PackedBlocks

_CHUNK = 4096
"""Positions whose sources are drawn at once."""

Ints = np.ndarray[Any, np.dtype[np.int64]]


@lru_cache(maxsize=16)
def _order(seed: int, epoch: int, count: int, source: int) -> Ints:
    # numpy takes a source of 0 for no further number: the order of a single source is what it always was.
    return np.random.default_rng([seed, epoch, source]).permutation(count)


def block_index(position: int, seed: int, count: int, source: int = 0) -> int:
    """Which of `count` blocks comes at a position of a source's endless stream, shuffled anew every epoch.

    Args:
        position: from 0.
        seed: of the run.
        count: blocks of the source.
        source: the number of the source, so that two of equal size have orders of their own.
    """
    epoch, place = divmod(position, count)
    return int(_order(seed, epoch, count, source)[place])


class Mixture:
    """The endless stream of blocks that a run reads, each drawn from one of several sources by weight.

    The source of each position is drawn independently, so after n positions the share of a source with
    weight w is within sqrt(w (1 - w) / n) of w, as a standard deviation. A source that is short repeats, in
    another order each time.

    Args:
        sources: blocks of one length each.
        weights: how often each is read, in any unit; above 0.
        seed: of the run.
    """

    def __init__(
        self, sources: Sequence[Blocks | PackedBlocks], weights: Sequence[float] = (1.0,), *, seed: int = 0
    ) -> None:
        self.sources, self.seed = sources, seed
        self.weights = np.asarray(weights, dtype=np.float64) / sum(weights)
        self._seen: list[Ints] = [np.zeros(len(sources), dtype=np.int64)]

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        """The block at a position, from 0."""
        source, number = self.place(position)
        blocks = self.sources[source]
        return blocks[block_index(number, self.seed, len(blocks), source)]

    def place(self, position: int) -> tuple[int, int]:
        """From which source the block at a position is, and how many were from it before."""
        if len(self.sources) == 1:
            return 0, position
        chunk, place = divmod(position, _CHUNK)
        drawn = self._drawn(chunk)
        source = int(drawn[place])
        return source, int(self._before(chunk)[source] + (drawn[:place] == source).sum())

    def counts(self, position: int) -> Ints:
        """How many of the blocks before a position are from each source."""
        if len(self.sources) == 1:
            return np.array([position])
        chunk, place = divmod(position, _CHUNK)
        return self._before(chunk) + self._tally(self._drawn(chunk)[:place])

    def epochs(self, position: int) -> list[float]:
        """How often each source was read from end to end before a position, in parts of its blocks."""
        sizes = [len(blocks) for blocks in self.sources]
        return [int(count) / size for count, size in zip(self.counts(position), sizes, strict=True)]

    def _before(self, chunk: int) -> Ints:
        """How many blocks of each source there are before a chunk of positions."""
        while len(self._seen) <= chunk:
            self._seen.append(self._seen[-1] + self._tally(self._drawn(len(self._seen) - 1)))
        return self._seen[chunk]

    def _tally(self, drawn: Ints) -> Ints:
        return np.bincount(drawn, minlength=len(self.sources))

    def _drawn(self, chunk: int) -> Ints:
        return _sources(self.seed, chunk, tuple(self.weights.tolist()))

    def share_beyond(self, window: int) -> float:
        """Share of the tokens that sit at positions `window` and above: what the old window never saw."""
        shares = [blocks.share_beyond(window) for blocks in self.sources]
        return float(np.dot(self.weights, shares))

    def __repr__(self) -> str:
        if len(self.sources) == 1:
            return repr(self.sources[0])
        parts = zip(self.weights, self.sources, strict=True)
        return "Mixture(" + ", ".join(f"{100 * weight:.3g} % {blocks}" for weight, blocks in parts) + ")"


@lru_cache(maxsize=16)
def _sources(seed: int, chunk: int, weights: tuple[float, ...]) -> Ints:
    generator = np.random.default_rng([seed, chunk, 0, 1])  # the last sets them apart from the orders
    return generator.choice(len(weights), size=_CHUNK, p=weights)
