"""The planner: what a computation needs, what a device has, and the table that compares the two.

There is no formula per family. Training and evaluation each run their own step on the meta device, where
tensors have shapes and no values, and the bytes that it would hold are counted (`dry_run`, `counter_of`).
Memory that kernels and allocators need apart from tensors is covered by the margin of the budget.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from rope_extend.memory.budget import MARGIN, available_memory
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.memory.meta_device import DirectKernelCalls, dry_run_attention
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.planned_device import planned_for
from rope_extend.units import format_bytes, format_duration

GRAIN = 64
"""Accuracy in tokens with which the longest length that fits is found; or a 64th of it, if that is more."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """The memory of a computation, in bytes.

    Attributes:
        weights: the model.
        trained: trained weights in float32, and the optimizer's two moments of each.
        peak: the most that is allocated in addition to these.
        host: what is kept in host memory.
        seconds: estimated time; 0 if it is not estimated.
    """

    weights: int
    trained: int = 0
    peak: int
    host: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Peak memory on the device."""
        return self.weights + self.trained + self.peak


@dataclass(frozen=True)
class Budget:
    """The memory of a device.

    Attributes:
        device: the device.
        available: its free bytes, or its limit.
        host: free bytes of host memory.
        spread: whether weights can go to other devices, so that only the rest must fit.
    """

    device: torch.device
    available: int
    host: int = sys.maxsize
    spread: bool = False

    @classmethod
    def of(cls, load_options: LoadOptions) -> Budget:
        """What the device of a model has free."""
        spread = load_options.device_map is not None
        return cls(load_options.torch_device, available_memory(load_options), spread=spread)

    def fits(self, need: Need) -> bool:
        """Whether the memory for a computation is available, with a safety margin."""
        on_device = need.trained + need.peak if self.spread else need.total
        return on_device <= self.available * MARGIN and need.host <= self.host * MARGIN

    def misfit(self, need: Need) -> str:
        """What a computation needs and what there is, for the error that refuses it."""
        needed, available, where = need.total, self.available, f"on {self.device}"
        if need.total <= MARGIN * self.available:
            needed, available, where = need.host, self.host, "in host memory"
        return (
            f"about {format_bytes(needed)}, {format_bytes(need.weights)} of it for weights, but only "
            f"{format_bytes(available)} are available {where}"
        )


@contextmanager
def dry_run(model: nn.Module, device: torch.device, *, maskless: bool = False) -> Iterator[None]:
    """A context in which a model without weights allocates what it would allocate on a device.

    Patches belong inside, because they may wrap the attention function that they find.

    Args:
        model: a model on the meta device.
        device: the device on which the model will run.
        maskless: whether the attention kernel needs no mask.
    """
    with planned_for(device), dry_run_attention(model, maskless=maskless), DirectKernelCalls():
        yield


def counter_of(model: nn.Module, scored: int | None = None) -> LiveBytes:
    """A counter that has a model's tensors already; `scored` is that of `LiveBytes`."""
    counter = LiveBytes(scored)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            counter.add(tensor)
    return counter


def longest(fits: Callable[[int], bool], tokens: int, grain: int = GRAIN) -> int:
    """The longest length below `tokens` that fits, to within a 64th or `grain` tokens; 0 if there is none."""
    low, high = 0, -(-tokens // grain)  # in grains: the longest known to fit, the shortest known not to fit
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * grain) else (low, middle)
    return low * grain


Row = tuple[str, Need, str]
"""A row of the table: its name, what is needed, and what to say after the verdict."""


def table(subject: str, rows: Sequence[Row], budget: Budget, chosen: Need | None = None) -> str:
    """The table that every plan prints; columns that are empty in all rows are left out."""
    needs = [need for _, need, _ in rows]
    columns: dict[str, Callable[[Need], str]] = {"weights": lambda need: format_bytes(need.weights)}
    if any(need.trained for need in needs):
        columns["trained"] = lambda need: format_bytes(need.trained)
    columns |= {
        "peak": lambda need: format_bytes(need.peak),
        "total": lambda need: format_bytes(need.total),
    }
    if any(need.host for need in needs):
        columns["in host"] = lambda need: format_bytes(need.host) if need.host else "-"
    if any(need.seconds for need in needs):
        columns["time"] = lambda need: format_duration(need.seconds)
    width = max(24, *(len(name) for name, *_ in rows))
    lines = [
        f"plan: {subject}, {format_bytes(budget.available)} available on {budget.device}",
        " " * width + "".join(f"{head:>12}" for head in columns),
    ]
    for name, need, remark in rows:
        verdict = "fits" if budget.fits(need) else "does not fit"
        verdict = "chosen" if need is chosen and budget.fits(need) else verdict
        cells = "".join(f"{cell(need):>12}" for cell in columns.values())
        lines.append(f"{name:<{width}}{cells}  {', '.join(filter(None, (verdict, remark)))}")
    return "\n".join(lines)
