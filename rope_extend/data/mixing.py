"""The order in which blocks are read, from one source or from several by weight.

The block at each position of the endless stream follows from the seed and the position alone. So a resumed
run needs only its step, and the order does not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rope_extend.data.blocks import Blocks

Ints = np.ndarray[Any, np.dtype[np.int64]]


@lru_cache(maxsize=16)
def _order(seed: int, epoch: int, count: int, source: int) -> Ints:
    # For numpy, a trailing 0 is the same seed as no number: source 0 has the order of a run without mixing.
    return np.random.default_rng([seed, epoch, source]).permutation(count)


def block_index(position: int, seed: int, count: int, source: int = 0) -> int:
    """The number of the block at a position of a source's endless stream, shuffled anew every epoch.

    Args:
        position: from 0.
        seed: seed of the run.
        count: number of blocks of the source.
        source: number of the source, so that two sources of equal size have different orders.
    """
    epoch, offset = divmod(position, count)
    return int(_order(seed, epoch, count, source)[offset])


class Mixture:
    """The endless stream of blocks that a run reads, each drawn from one of several sources by weight.

    The source of each position is drawn independently. After n positions, the share of a source with weight w
    is w, with a standard deviation of sqrt(w (1 - w) / n). A short source repeats, in a new order each time.

    Args:
        sources: blocks of the same length.
        weights: how often each source is read, as ratios in any unit; above 0.
        seed: seed of the run.
    """

    def __init__(
        self, sources: Sequence[Blocks], weights: Sequence[float] = (1.0,), *, seed: int = 0
    ) -> None:
        self.sources, self.seed = sources, seed
        self.weights = np.asarray(weights, dtype=np.float64) / sum(weights)
        self._drawn: Ints = np.zeros(0, dtype=np.int64)  # the sources of the first positions

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        """The block at a position, from 0."""
        source, number = self.locate(position)
        blocks = self.sources[source]
        return blocks[block_index(number, self.seed, len(blocks), source)]

    def locate(self, position: int) -> tuple[int, int]:
        """The source of the block at a position, and the number of earlier blocks from that source."""
        drawn = self._first(position + 1)
        return int(drawn[-1]), int(np.count_nonzero(drawn[:-1] == drawn[-1]))

    def counts(self, position: int) -> Ints:
        """Number of blocks of each source before a position."""
        return np.bincount(self._first(position), minlength=len(self.sources))

    def epochs(self, position: int) -> list[float]:
        """How often each source was read from end to end before a position, with fractions."""
        sizes = [len(blocks) for blocks in self.sources]
        return [int(count) / size for count, size in zip(self.counts(position), sizes, strict=True)]

    def _first(self, count: int) -> Ints:
        """The sources of the first positions: a longer draw begins with a shorter one."""
        if len(self._drawn) < count:
            generator = np.random.default_rng([self.seed, 0, 0, 1])  # the last number is not that of `_order`
            self._drawn = generator.choice(len(self.sources), size=2 * count, p=self.weights)
        return self._drawn[:count]

    def share_beyond(self, window: int) -> float:
        """Share of the tokens at positions `window` and above, which are outside a window of that length."""
        shares = [blocks.share_beyond(window) for blocks in self.sources]
        return float(np.dot(self.weights, shares))

    def __repr__(self) -> str:
        if len(self.sources) == 1:
            return repr(self.sources[0])
        parts = zip(self.weights, self.sources, strict=True)
        return "Mixture(" + ", ".join(f"{100 * weight:.3g} % {blocks}" for weight, blocks in parts) + ")"
