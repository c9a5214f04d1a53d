"""The planner: what a computation needs, what a device has, and the table that compares the two.

There is no formula per family. Training and evaluation each run their own step on the meta device, where
tensors have shapes and no values, and the bytes that it would hold are counted (`dry_run`, `counter_of`).
Memory that kernels and allocators need apart from tensors is covered by the margin of the budget.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from rope_extend.errors import RopeExtendError
from rope_extend.memory.budget import MARGIN, available_memory
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.models.load_options import LoadOptions
from rope_extend.units import format_bytes, format_duration

GRAIN = 64
"""Accuracy in tokens with which the longest length that fits is found; or a 64th of it, if that is more."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory of a computation in one process, in bytes.

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
    def of(cls, load_options: LoadOptions, processes: int = 1) -> Budget:
        """What a process has on the device of a model; on a CPU, processes share its memory."""
        device, spread = load_options.torch_device, load_options.device_map is not None
        free = available_memory(replace(load_options, limit_memory=None))
        free //= processes if device.type == "cpu" else 1
        host = available_memory(LoadOptions(device="cpu")) // processes
        return cls(device, min(free, load_options.limit_memory or sys.maxsize), host, spread)

    def fits(self, estimate: MemoryEstimate) -> bool:
        """Whether the memory for a computation is available, with a safety margin."""
        on_device = estimate.trained + estimate.peak if self.spread else estimate.total
        return on_device <= self.available * MARGIN and estimate.host <= self.host * MARGIN

    def check(
        self, estimate: MemoryEstimate, *, subject: str, how: str, longest: int | None, advice: str
    ) -> None:
        """Refuse a computation that does not fit.

        The error says what `subject` needs and how it is done, what there is, the longest length that fits,
        if there is one, and what to do.
        """
        if self.fits(estimate):
            return
        needed, available, where = estimate.total, self.available, f"on {self.device}"
        if estimate.total <= MARGIN * self.available:
            needed, available, where = estimate.host, self.host, "in host memory"
        fitting = f"up to {longest:,} tokens fit" if longest else "no length fits"
        raise RopeExtendError(
            f"{subject} about {format_bytes(needed)}, {format_bytes(estimate.weights)} of it for weights, "
            f"but only {format_bytes(available)} are available {where} ({how}); {fitting}. {advice}"
        )

    def as_dict(self, estimate: MemoryEstimate) -> dict[str, Any]:
        """An estimate as plain values for JSON: bytes, tokens, seconds and texts."""
        return {**asdict(estimate), "total": estimate.total, "fits": self.fits(estimate)}


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


def table(
    subject: str, rows: Sequence[tuple[str, MemoryEstimate, str]], budget: Budget,
    chosen: MemoryEstimate | None = None,
) -> str:  # fmt: skip
    """The table that every plan prints; columns that are empty in all rows are left out.

    A row has its name, the estimate, and what to say after the verdict.
    """
    columns: dict[str, Callable[[MemoryEstimate], str]] = {
        "weights": lambda row: format_bytes(row.weights),
        "trained": lambda row: format_bytes(row.trained),
        "peak": lambda row: format_bytes(row.peak),
        "total": lambda row: format_bytes(row.total),
        "in host": lambda row: format_bytes(row.host) if row.host else "-",
        "time": lambda row: format_duration(row.seconds),
    }
    for head, name in (("trained", "trained"), ("in host", "host"), ("time", "seconds")):
        if not any(getattr(estimate, name) for _, estimate, _ in rows):
            del columns[head]
    width = max(24, *(len(name) for name, *_ in rows))
    lines = [
        f"plan: {subject}, {format_bytes(budget.available)} available on {budget.device}",
        " " * width + "".join(f"{head:>12}" for head in columns),
    ]
    for name, estimate, remark in rows:
        verdict = "does not fit"
        if budget.fits(estimate):
            verdict = "chosen" if estimate is chosen else "fits"
        cells = "".join(f"{cell(estimate):>12}" for cell in columns.values())
        lines.append(f"{name:<{width}}{cells}  {', '.join(filter(None, (verdict, remark)))}")
    return "\n".join(lines)
