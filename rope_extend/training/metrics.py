"""The metrics of a run: `metrics.jsonl`, and the trackers of `Trainer`, such as TensorBoard and MLflow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerCallback
from transformers.integrations import integration_utils

from rope_extend.errors import RopeExtendError
from rope_extend.models.loading import one_error


def append(path: Path, line: bytes) -> None:
    """Add a line to `metrics.jsonl`, after the end of one that a killed process did not finish.

    Raises:
        RopeExtendError: the disk is full, or the file is a link.
    """
    try:
        with open(path, "ab+", opener=_not_a_link) as file:
            file.seek(max(0, file.tell() - 1))
            cut_short = file.read() not in (b"", b"\n")
            file.write(b"\n" * cut_short + line)
    except OSError as error:
        raise RopeExtendError(
            f"cannot write {path}: {error}. Checkpoints are intact; make room, then resume the run"
        ) from error


def _not_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is not installed.

    Raises:
        RopeExtendError: says what to install; for an unknown name, lists the known ones.
    """
    for name in names:
        if name not in integration_utils.INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(integration_utils.INTEGRATION_TO_CALLBACK))
            raise RopeExtendError(f"no tracker is named {name!r}; use one of {known}")
        if name not in integration_utils.get_available_reporting_integrations():
            package = name.replace("_", "-")
            raise RopeExtendError(
                f"recipe: the package of the tracker {name} is missing; pip install {package}"
            )


def tracker(name: str, directory: Path, step: int | None) -> TrainerCallback:
    """The callback of `Trainer` for a tracker.

    TensorBoard writes to `tensorboard/` in the directory, and drops its entries after `step`. The others put
    the run where their environment variables say, such as `WANDB_PROJECT`.

    Args:
        name: name of the tracker, as `check_trackers` accepts it.
        directory: directory of the run.
        step: number of finished steps; None in a process that does not write.
    """
    problem, advice = "a tracker does not start", "Set it up, or leave it out of the recipe"
    with one_error(problem, advice):
        if name == "tensorboard" and step is not None:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(directory / name), purge_step=step + 1)
            callback = integration_utils.TensorBoardCallback(writer)
        else:
            callback = integration_utils.INTEGRATION_TO_CALLBACK[name]()
    callback.on_train_begin = one_error(problem, advice)(callback.on_train_begin)
    return callback
