"""Which modules still run after an interrupt (Ctrl-C).

PyTorch calls no hook after an interrupt. So what hooks began is not ended, and looks as if it still ran.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

from torch import nn

_CALL = "_call_impl"
"""The function in which `nn.Module` runs hooks and `forward`."""


def still_running(began: Sequence[nn.Module | None], latest: nn.Module) -> list[bool]:
    """Whether each of some modules still runs in this thread, by the call stack.

    Args:
        began: modules whose pre-hooks ran in this thread, in this order.
        latest: the module whose pre-hook calls this.

    Returns:
        One value for each of `began`. All are True if the stack does not show the latest module either.
    """
    outer = _modules_on_the_stack()
    if not outer or outer.pop() is not latest:
        return [True] * len(began)
    found = []
    for module in began:
        place = next((index for index, one in enumerate(outer) if one is module), None)
        found.append(place is not None)
        outer = outer if place is None else outer[place + 1 :]
    return found


def _modules_on_the_stack() -> list[object]:
    """The modules that run in this thread, the innermost last."""
    found: list[object] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _CALL:
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found[::-1]
