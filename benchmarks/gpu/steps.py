"""What every section of `make gpu` is made of: steps, their figures, and the sizes that they run at."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from measuring import EIGHT_BILLION
from transformers import LlamaConfig

from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.training.memory_options import GPU_TILE

CARD = 85e9
"""Bytes that a GPU with 80 GiB has free. What a larger one has in addition is taken before a step."""


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        name: what was measured.
        value: None if it could not be measured; `note` says why.
        unit: its unit; empty for text and counts.
        at_most: the target, if lower is better.
        at_least: the target, if higher is better.
        note: more about the value.
    """

    name: str
    value: float | None
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the target is met; None without a target or without a value."""
        if self.value is None or (self.at_most is None and self.at_least is None):
            return None
        low = float("-inf") if self.at_least is None else self.at_least
        return low <= self.value <= (float("inf") if self.at_most is None else self.at_most)


@dataclass(frozen=True)
class Setting:
    """Sizes of the measurements: those of an 8B model on a GPU, or tiny ones on a CPU.

    Attributes:
        device: device of all models.
        dry: whether this is a dry run, which shows that all steps run and measures nothing.
        config: shape of the models.
        curve: the longest window of the perplexity curve, in tokens.
        pieces: a window that is processed in pieces, in tokens.
        chunk: tokens of a piece.
        block: tokens of a training step with and without offloading.
        long_block: tokens of a training step of all layers.
        tile: tokens in a tile of an MLP.
        longest: the longest window that is looked for, in tokens.
        budget: bytes that the emulated card has free.
        positions: the last position of the rotary table that is checked.
    """

    device: str
    dry: bool
    config: LlamaConfig
    curve: int
    pieces: int
    chunk: int
    block: int
    long_block: int
    tile: int
    longest: int
    budget: float
    positions: int

    def target(self, value: float) -> float | None:
        """A target that only holds at full size on a GPU; None in a dry run."""
        return None if self.dry else value


FULL = Setting(
    "cuda", False, EIGHT_BILLION, curve=131_072, pieces=262_144, chunk=16_384, block=32_768,
    long_block=131_072, tile=GPU_TILE, longest=2**22, budget=CARD, positions=2**21,
)  # fmt: skip
DRY = Setting(
    "cpu", True,
    LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    ),
    curve=256, pieces=512, chunk=128, block=128, long_block=256, tile=64, longest=1024,
    budget=3.2e6, positions=2**12,
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A part of a section that is measured and recorded as a whole.

    Attributes:
        name: its name, unique in the section.
        run: measures, and gives figures.
        seconds: about how long it takes on an H100.
    """

    name: str
    run: Callable[[Setting], Iterator[Figure]]
    seconds: float


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object], device: str, repetitions: int = 1) -> float:
    """The shortest time of some repetitions."""
    times = []
    for _ in range(repetitions):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


def peak_of(run: Callable[[], object], model: torch.nn.Module, device: str) -> int:
    """Peak bytes of tensors while `run` runs, including the model's."""
    if device == "cuda":
        free_cache()
        run()
        synchronize(device)
        return torch.cuda.max_memory_allocated()
    memory = LiveBytes()
    for tensor in (*model.parameters(), *model.buffers()):
        memory.add(tensor)
    with memory:
        run()
    return memory.peak


def free_cache() -> None:
    """Free what earlier steps left, and count peaks from here."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
