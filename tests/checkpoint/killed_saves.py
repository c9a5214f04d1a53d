"""Saves over a checkpoint and is killed at every step in turn: `killed_saves.py DIRECTORY`.

`DIRECTORY/old` is the checkpoint. Each killed save leaves `DIRECTORY/killed-N`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from integrity import Fault, extended, watching

import rope_extend as rx


class Killed(Fault):
    """Kills its process instead of raising."""

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        try:
            super().__call__(event, arguments)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGKILL)


def main(work: Path) -> None:
    """Save in a child process, which is killed one step later each time, until a save ends."""
    torch.set_num_threads(1)
    model, number = extended("linear"), 0
    while True:
        number += 1
        target = Path(shutil.copytree(work / "old", work / f"killed-{number}"))
        child = os.fork()
        if not child:
            with watching(Killed(target, number, KeyboardInterrupt(), clearing=True)):
                rx.save(model, target, overwrite=True, max_shard_size="50KB")
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
            break


if __name__ == "__main__":
    main(Path(sys.argv[1]))
