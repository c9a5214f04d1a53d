"""Sampled position ids: short training blocks that stand for long texts.

A block of 2k tokens whose position ids are spread over 32k shows a model query-key distances up to 32k, at
the cost of 2k. It does not show how to attend to 32k keys: only training at the full length does. All rotary
methods that depend on position can be used; methods for which sampled positions have no meaning are refused
by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from rope_extend.data.choices import SHORTEST
from rope_extend.encodings import Encoding, RopeEncoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.models.config_facts import layer_types_except_full_attention, window_of
from rope_extend.models.families import family_for

Ints = np.ndarray[Any, np.dtype[np.int64]]

_STREAM = 0x705
"""Part of the seed, so that these draws differ from others with the same seed and number."""


Sampler = Callable[[int, int, np.random.Generator], Ints]
"""Takes the tokens of a block, those of the window to reach, which are as many or more, and a generator.

Returns increasing positions from 0 to below the window, int64 `[length]`.
"""


def pose(length: int, target_length: int, generator: np.random.Generator) -> Ints:
    """Two chunks of consecutive positions, with a random gap between them: PoSE (2309.10400).

    The first chunk has 1 to half of the tokens and begins at 0; the second is moved by u ~ U{0, …, target -
    length}. The text has no gap: the paper found that skipping text too matters little.
    """
    positions = np.arange(length)
    first = generator.integers(1, (length + 1) // 2, endpoint=True)
    positions[first:] += generator.integers(0, target_length - length, endpoint=True)
    return positions


def cream(length: int, target_length: int, generator: np.random.Generator) -> Ints:
    """The head and tail of the window, and a piece between, most often from the middle: CREAM (2406.07138).

    With s = target / length: head and tail have a third of the tokens each or, half of the time, 4s (at most
    a third). The piece of m tokens ends at a position drawn evenly from [head + (m-1) a/2, length a/2 -
    tail), with a ~ N(1 + s, 3²) truncated to [2, 2s]. The authors' code clamps values outside to the nearest
    end and rounds a down; here the truncation is exact and a is not rounded.
    """
    scale = target_length / length
    edge = length // 3
    if generator.random() < 0.5:
        edge = min(edge, int(4 * scale))
    middle = length - 2 * edge
    normal = NormalDist(1 + scale, 3.0)
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


def random_positions(length: int, target_length: int, generator: np.random.Generator) -> Ints:
    """Different positions drawn evenly from the whole window, one for each token, in order: 2305.16843."""
    return np.sort(generator.choice(target_length, size=length, replace=False, shuffle=False))


SAMPLERS: dict[str, Sampler] = {"pose": pose, "cream": cream, "random": random_positions}
"""The samplers by the name in recipes, with the papers' parameters."""


def check_sampled(
    sampler: str, encoding: Encoding, shape: RopeShape, config: Any, target_length: int
) -> None:
    """Refuse an encoding or a family for which sampled positions do not stand for a text of `target_length`.

    Length-dependent schedules that choose a table for each query use its position, and are accepted. Families
    that count tokens instead, as windows of attention do, are refused.

    Raises:
        RopeExtendError: names the encoding or the family, the reason, and what to do instead.
    """
    if not isinstance(encoding, RopeEncoding):
        raise RopeExtendError(
            f"positions {sampler} cannot be combined with {encoding}: only rotary methods use sampled "
            "positions; train it on long blocks"
        )
    ends = torch.tensor([shape.trained_length - 1, 8 * shape.trained_length])
    rotates = any(encoding.inv_freq(shape, int(end) + 1).any() for end in ends)
    reason = None
    if not rotates and encoding.decay(shape) is None:
        reason = "it does not use positions; train it on long blocks, or leave positions out"
    elif encoding.scales_by_position(shape):
        reason = (
            "it scales attention by the number of tokens that a query can see, which sampled positions do "
            "not raise; train it on long blocks, or use the schedule inside it alone"
        )
    if reason is not None:
        raise RopeExtendError(f"positions {sampler} cannot be combined with {encoding}: {reason}")
    counts = family_for(config.model_type).counts
    for kind in sorted(layer_types_except_full_attention(config.get_text_config(decoder=True))):
        size = window_of(config.get_text_config(decoder=True), kind)
        if size is not None and size < target_length:
            counts = f"its layers of type {kind} attend to {size} tokens"
    if counts:
        raise RopeExtendError(
            f"positions {sampler} cannot be combined with {config.model_type}: {counts}, whatever their "
            "positions. So they would be trained on what never occurs in use; leave positions out, and train "
            "on long blocks"
        )


class PositionCollator:
    """Batches blocks and adds sampled position ids; a `collate_fn` for any data loader or `Trainer`.

    The positions of sequence number n follow from the seed and n alone, so a resumed run gets the same ones.
    Calls count the sequences. In a worker of a data loader, positions follow from its seed too, which torch
    draws in each epoch, and `drawn` does not help a resumed run.

    Args:
        sampler: `pose`, `cream` or `random`.
        target_length: the window to reach, in tokens.
        seed: seed of all draws.
        drawn: number of sequences before the first call, for a resumed run.

    Raises:
        RopeExtendError: an unknown name, or a negative seed.
    """

    def __init__(self, sampler: str, target_length: int, *, seed: int = 0, drawn: int = 0) -> None:
        if sampler not in SAMPLERS:
            raise RopeExtendError(
                f"no position sampler is named {sampler!r}; use one of {', '.join(SAMPLERS)}"
            )
        if seed < 0:
            raise RopeExtendError(f"seed must be at least 0; got {seed}")
        self.sampler, self.target_length, self.seed, self.drawn = sampler, target_length, seed, drawn

    def positions(self, length: int, number: int, *stream: int) -> Ints:
        """The positions of sequence `number`, int64 `[length]`; others for each further part of the seed.

        Raises:
            RopeExtendError: a block that is too short for the sampler, or longer than the window.
        """
        if not SHORTEST <= length <= self.target_length:
            raise RopeExtendError(
                f"positions {self.sampler} needs blocks of {SHORTEST} to {self.target_length} tokens, the "
                f"window to reach; got {length}"
            )
        generator = np.random.default_rng([self.seed, _STREAM, *stream, number])
        return SAMPLERS[self.sampler](length, self.target_length, generator)

    def placed(self, item: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        """The block of sequence `number` with its positions, and the mask of ones that they need."""
        ids = item["input_ids"]
        positions = torch.from_numpy(self.positions(len(ids), number))
        return {**item, "position_ids": positions, "attention_mask": torch.ones_like(ids)}

    def share_beyond(self, window: int, length: int, sequences: int) -> float:
        """Share of the tokens of the first sequences whose position is `window` or above."""
        beyond = (int((self.positions(length, number) >= window).sum()) for number in range(sequences))
        return sum(beyond) / (sequences * length)

    def __call__(self, items: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Batch `input_ids`, `labels` and all else that items have, with `position_ids` and `attention_mask`.

        All are `[batch, length]`. Without the mask of ones, transformers would take a gap in the positions
        for the start of another text.

        Raises:
            RopeExtendError: items that have position ids, or a length as in `positions`.
        """
        if any("position_ids" in item for item in items):
            raise RopeExtendError(
                "PositionCollator: these blocks have position_ids already, of packed documents or "
                "rope_extend.blocks(..., positions=); leave the collator out"
            )
        batch: dict[str, torch.Tensor] = default_collate(list(items))
        worker = get_worker_info()
        stream = () if worker is None else (worker.seed,)
        numbers = range(self.drawn, self.drawn + len(items))
        length = len(items[0]["input_ids"])
        rows = [self.positions(length, number, *stream) for number in numbers]
        self.drawn += len(rows)
        batch["position_ids"] = torch.from_numpy(np.stack(rows))
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        return batch
