"""The processes of one run, as `torchrun` or `accelerate launch` starts them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from accelerate import PartialState

PATIENCE = timedelta(days=30)
"""Timeout of collective operations: one process may need this long for one document."""


def process_count() -> int:
    """The number of processes started together; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this is the process that writes files and reports."""
    return int(os.environ.get("RANK", "0")) == 0


def processes(device: torch.device) -> PartialState | None:
    """Connect the processes of this run, this one on `device`; None if there is only one."""
    if process_count() == 1:
        return None
    from accelerate import PartialState

    return PartialState(cpu=device.type == "cpu", timeout=PATIENCE)
