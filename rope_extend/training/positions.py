"""Positions sampled while training in a short window, so that a cheap block stands for a long text.

A block of 2k tokens whose ids are spread over 32k shows a model query-key distances up to 32k, for the price
of 2k. What it cannot show is how attention has to choose among 32k keys: only training at the full length
does. Any rotary method that reads by position takes part; those for which sampled positions have no meaning
are refused by name.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch.utils.data import default_collate

from rope_extend.encodings import Encoding, RopeEncoding, RopeShape
from rope_extend.encodings.base import check_number
from rope_extend.errors import RopeExtendError

Ints = np.ndarray[Any, np.dtype[np.int64]]

_STREAM = 0x705
"""Sets these draws apart from others that are seeded by the same two numbers."""


class PositionSampler(ABC):
    """Which positions of a long window the tokens of a short block are given.

    Attributes:
        name: as recipes call it.
        paper: arXiv id.
        shortest: the fewest tokens that a block may have.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    shortest: ClassVar[int] = 2

    @abstractmethod
    def sample(self, length: int, target_length: int, generator: np.random.Generator) -> Ints:
        """`[length]` int64, rising, from 0 to below `target_length`, which is not less than `length`."""


@dataclass(frozen=True)
class PoSE(PositionSampler):
    """Two consecutive chunks, of which the second begins anywhere further on.

    The first has 1 to half of the tokens and begins at 0; the second is moved by u ~ U{0, …, target -
    length}. The text is that of the block, without a skip of its own, which the paper found to matter little.
    """

    name: ClassVar[str] = "pose"
    paper: ClassVar[str] = "2309.10400"

    def sample(self, length: int, target_length: int, generator: np.random.Generator) -> Ints:
        """Two runs of consecutive positions."""
        positions = np.arange(length)
        first = generator.integers(1, (length + 1) // 2, endpoint=True)
        positions[first:] += generator.integers(0, target_length - length, endpoint=True)
        return positions


@dataclass(frozen=True)
class CREAM(PositionSampler):
    """The window's head and tail, and between them a consecutive piece, most often from the middle.

    With s = target / length: head and tail have a third of the tokens each or, half of the time, 4s (at most
    a third). The piece of m tokens ends at a place drawn evenly from [head + (m-1) a/2, length a/2 - tail),
    with a ~ N(1 + s, sigma²) truncated to [2, 2s]. The authors' code moves what lies outside to the nearest
    end and rounds a down; here the truncation is exact and a is not rounded.

    Attributes:
        sigma: standard deviation of a.
    """

    sigma: float = 3.0

    name: ClassVar[str] = "cream"
    paper: ClassVar[str] = "2406.07138"
    shortest: ClassVar[int] = 3

    def __post_init__(self) -> None:
        check_number(self.name, "sigma", self.sigma, minimum=0, above=True)

    def sample(self, length: int, target_length: int, generator: np.random.Generator) -> Ints:
        """Three runs of consecutive positions."""
        scale = target_length / length
        edge = length // 3
        if generator.random() < 0.5:
            edge = min(edge, int(4 * scale))
        middle = length - 2 * edge
        normal = NormalDist(1 + scale, self.sigma)
        low, high = normal.cdf(2), normal.cdf(2 * scale)
        share = low + (high - low) * generator.random()
        half = min(max(normal.inv_cdf(min(max(share, 1e-300), 1 - 2**-53)) / 2, 1.0), scale)
        first_end = int(edge + (middle - 1) * half)
        last_end = max(first_end, int(length * half) - edge - 1)
        end = min(int(generator.integers(first_end, last_end, endpoint=True)), target_length - edge - 1)
        return np.concatenate([
            np.arange(edge),
            np.arange(end - middle + 1, end + 1),
            np.arange(target_length - edge, target_length),
        ])  # fmt: skip


@dataclass(frozen=True)
class RandomPositions(PositionSampler):
    """As many different positions as there are tokens, drawn evenly from the whole window, in order."""

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "2305.16843"

    def sample(self, length: int, target_length: int, generator: np.random.Generator) -> Ints:
        """A sorted sample without replacement."""
        return np.sort(generator.choice(target_length, size=length, replace=False, shuffle=False))


SAMPLERS: dict[str, PositionSampler] = {one.name: one for one in (PoSE(), CREAM(), RandomPositions())}
"""The samplers by name, with the papers' parameters."""


def check_meaning(sampler: PositionSampler, encoding: Encoding, shape: RopeShape) -> None:
    """Refuse an encoding for which sampled positions do not stand for a long text.

    Length-dependent schedules that choose a table for each query go by its position, and take part.

    Raises:
        RopeExtendError: naming the encoding, the reason, and what works.
    """
    if not isinstance(encoding, RopeEncoding):
        raise RopeExtendError(
            f"positions {sampler.name} and {encoding} do not go together: positions are sampled for rotary "
            "methods; train it on long blocks"
        )
    ends = torch.tensor([shape.trained_length - 1, 8 * shape.trained_length])
    scale = encoding.logit_scale(shape, ends)
    still = not any(encoding.inv_freq(shape, int(end) + 1).any() for end in ends)
    reason = None
    if encoding.per_row:
        reason = (
            "it reads each row by the table of the row's length, and a short row with far positions is not a "
            "long one; per='query' takes part"
        )
    elif still and encoding.decay(shape) is None:
        reason = "it does not look at positions at all; train it on long blocks, or leave positions out"
    elif scale is not None and scale[0] != scale[1]:
        reason = (
            "it sharpens attention by the number of tokens that a query can see, which sampled positions do "
            "not raise; train it on long blocks, or use the schedule inside it alone"
        )
    if reason is not None:
        raise RopeExtendError(f"positions {sampler.name} and {encoding} do not go together: {reason}")


class PositionCollator:
    """Batches blocks and gives each the positions of a sampler; a `collate_fn` for any loader or `Trainer`.

    The positions of sequence number n follow from the seed and n alone, so a run that goes on at n sees what
    it would have seen. Calls count the sequences; a loader with workers counts in each of them.

    Args:
        sampler: a sampler, or one of the names `pose`, `cream` and `random`.
        target_length: the window to reach, in tokens.
        seed: of all draws.
        drawn: how many sequences came before, for a run that goes on.

    Raises:
        RopeExtendError: an unknown name.
    """

    def __init__(
        self, sampler: PositionSampler | str, target_length: int, *, seed: int = 0, drawn: int = 0
    ) -> None:
        if isinstance(sampler, str):
            if sampler not in SAMPLERS:
                raise RopeExtendError(
                    f"no sampler of positions is named {sampler!r}; there are {', '.join(SAMPLERS)}"
                )
            sampler = SAMPLERS[sampler]
        self.sampler, self.target_length, self.seed, self.drawn = sampler, target_length, seed, drawn

    def positions(self, length: int, number: int) -> Ints:
        """`[length]` int64: where the tokens of sequence `number` stand.

        Raises:
            RopeExtendError: a block that is too short for the sampler, or longer than the window.
        """
        if not self.sampler.shortest <= length <= self.target_length:
            raise RopeExtendError(
                f"positions {self.sampler.name} wants blocks of {self.sampler.shortest} to "
                f"{self.target_length} tokens, the window to reach; got {length}"
            )
        generator = np.random.default_rng([self.seed, _STREAM, number])
        return self.sampler.sample(length, self.target_length, generator)

    def __call__(self, items: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """`input_ids`, `labels` and whatever else the items have, `position_ids` and `attention_mask`.

        All are `[batch, length]`. The mask of ones says that a gap in the positions is no seam between two
        texts, for which transformers takes it otherwise.
        """
        batch: dict[str, torch.Tensor] = default_collate(list(items))
        rows = [self.positions(len(item["input_ids"]), self.drawn + row) for row, item in enumerate(items)]
        self.drawn += len(rows)
        batch["position_ids"] = torch.from_numpy(np.stack(rows))
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        return batch


@dataclass(frozen=True)
class Coverage:
    """How often each distance between a query and a key was seen in training.

    Attributes:
        sampler: name of the sampler.
        block_length: tokens per sequence.
        target_length: the window to reach, in tokens.
        trained_length: the pretrained window, in tokens.
        sequences: how many sequences were counted.
        pairs: int64 `[target_length]`: query-key pairs at each distance, 0 included.
        tokens_beyond: share of the tokens whose position is beyond the pretrained window.
    """

    sampler: str
    block_length: int
    target_length: int
    trained_length: int
    sequences: int
    pairs: Ints
    tokens_beyond: float

    @classmethod
    def of(
        cls, collator: PositionCollator, block_length: int, sequences: int, *, trained_length: int
    ) -> Self:
        """Count what the first `sequences` sequences of a run see, each a block of its own.

        The number of pairs at each distance is the autocorrelation of the positions, and so one Fourier
        transform a sequence: exact after rounding, milliseconds at 128k.
        """
        window = collator.target_length
        spectrum = np.zeros(window + 1)
        beyond = 0
        for number in range(sequences):
            positions = collator.positions(block_length, number)
            marks = np.zeros(2 * window)
            marks[positions] = 1
            spectrum += np.abs(np.fft.rfft(marks)) ** 2
            beyond += int((positions >= trained_length).sum())
        pairs = np.rint(np.fft.irfft(spectrum, 2 * window)[:window]).astype(np.int64)
        share = beyond / (sequences * block_length)
        return cls(collator.sampler.name, block_length, window, trained_length, sequences, pairs, share)

    @cached_property
    def pairs_beyond(self) -> float:
        """Share of the pairs that are further apart than the pretrained window reaches."""
        return float(self.pairs[self.trained_length :].sum() / self.pairs.sum())

    @cached_property
    def seen_beyond(self) -> float:
        """Share of the distances from the pretrained window to the target that were seen; 0 without any."""
        beyond = self.pairs[self.trained_length :]
        return float((beyond > 0).mean()) if beyond.size else 0.0

    def groups(self, count: int = 256) -> list[dict[str, Any]]:
        """The distances in at most `count` groups of equal width, each from `from` to below `to`.

        `pairs` is the number of query-key pairs at them, `seen` the share of them seen at least once.
        """
        edges = np.linspace(0, self.target_length, min(count, self.target_length) + 1).astype(np.int64)
        return [
            {
                "from": int(start),
                "to": int(stop),
                "pairs": int(self.pairs[start:stop].sum()),
                "seen": float((self.pairs[start:stop] > 0).mean()),
            }
            for start, stop in itertools.pairwise(edges)
        ]

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        data = {
            "sampler": self.sampler,
            "paper": SAMPLERS[self.sampler].paper,
            "block_length": self.block_length,
            "target_length": self.target_length,
            "trained_length": self.trained_length,
            "sequences": self.sequences,
            "tokens_beyond": self.tokens_beyond,
            "pairs_beyond": self.pairs_beyond,
            "seen_beyond": self.seen_beyond,
            "distances": self.groups(),
        }
        path.write_text(json.dumps(data, indent=1), encoding="utf-8")
