"""Several processes of one run, as `torchrun` or `accelerate launch` starts them."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from accelerate import PartialState

PATIENCE = timedelta(days=30)
"""How long a process waits for the others: as long as the longest document takes."""


def process_count() -> int:
    """How many processes were started together; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this process is the one that writes and reports."""
    return int(os.environ.get("RANK", "0")) == 0


def processes(place: torch.device) -> PartialState | None:
    """The processes of this run, connected; None where there is one.

    Args:
        place: where this process computes.
    """
    if process_count() == 1:
        return None
    return PartialState(cpu=place.type == "cpu", timeout=PATIENCE)
