"""One forward of a model: the positions of its queries and keys, and what of the model runs in a thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from rope_extend.attention.two_rows import TwoRows
from rope_extend.encodings.core.transfers import to_device

FORWARD = "_rope_extend_forward"
"""The attribute of cos and sin with the `Forward` that they were computed for."""


@dataclass
class Forward:
    """The positions of the queries and keys of one forward, and tables that all its layers share.

    Positions are on the CPU: lengths and segments follow from their values, and each look at a value on a GPU
    would wait for it.
    """

    queries: Tensor
    """Positions `[1 or batch, T]`."""
    keys: Tensor
    """Positions `[1 or batch, past + T]`."""
    past: Cache | None = field(default=None, kw_only=True)
    """The cache while the decoder runs; None if there is none yet."""
    running: bool = field(default=False, kw_only=True)
    """Whether the decoder runs; not when its layers run again for the backward pass."""
    read: tuple[float, ...] = field(default=(), kw_only=True)
    """The values of `AttentionHandler.on_the_device`."""
    tables: dict[tuple[Any, ...], Any] = field(default_factory=dict, kw_only=True)
    """Tensors computed in one layer and used again in the next ones."""
    gradients: bool = field(default=True, kw_only=True)
    """Whether the decoder was called with gradients enabled."""
    step: TwoRows | None = field(default=None, kw_only=True)
    """Set if the model rotates the one token of this forward itself."""

    def on(self, device: torch.device, values: Tensor) -> Tensor:
        """A tensor of this forward, copied to a device once for all layers there."""
        name = ("copy", id(values), device)
        if name not in self.tables:  # with the tensor, so that no other one gets its id
            self.tables[name] = values, to_device(values, device)
        copy: Tensor = self.tables[name][1]
        return copy

    def finish(self) -> None:
        """Drop what only the running decoder needs. The backward pass computes tables again."""
        self.past, self.running, self.step = None, False, None
        self.tables.clear()


@dataclass
class Frame:
    """A decoder, or a module with a handler, while it runs."""

    is_decoder: bool
    module: nn.Module | None = None
    past: Cache | None = None
    """The cache that the decoder got."""
    position_ids: Tensor | None = None
    """The decoder's positions as the rotary module got them; None before it is called."""
    forward: Forward | None = None
    """None if it is not known."""
    others: list[Forward] = field(default_factory=list)
    """Of a decoder: forwards at other positions, for which its rotary module was called too."""
    compared: Tensor | None = None
    """The latest positions that a module got instead of the decoder's."""
    equal: bool = False
    """Whether these have the same values."""
    marked: bool = False
    """Whether this decoder marked its cache as in use; an outer one may have done so before."""
    gradients: bool = True
    """Whether the decoder was called with gradients enabled; rotary modules run without."""


class Running(threading.local):
    """What runs in a thread, the innermost last."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Running, ()  # nothing runs in a copy


def mark(tables: tuple[Tensor, ...], forward: Forward) -> None:
    """Remember which forward cos and sin belong to."""
    for table in tables:
        setattr(table, FORWARD, forward)


def marked_forward(arguments: Any) -> Forward | None:
    """The forward that cos and sin among the arguments of a module belong to; None if they say nothing."""
    if isinstance(arguments, Tensor):
        return getattr(arguments, FORWARD, None)
    if isinstance(arguments, Mapping):
        arguments = arguments.values()
    elif not isinstance(arguments, tuple | list):
        return None
    for argument in arguments:
        found = marked_forward(argument)
        if found is not None:
            return found
    return None
