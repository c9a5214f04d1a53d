"""The trackers of a run: those of `accelerate`, such as TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers, get_available_trackers
from accelerate.utils import LoggerType

from rope_extend.errors import RopeExtendError
from rope_extend.models.loading import one_error

PROJECT = "rope_extend"
"""The project or experiment of a run in its trackers."""

_PACKAGES = {"tensorboard": "rope_extend[tensorboard]", "comet_ml": "comet-ml"}
"""The packages of trackers whose name for pip differs from that in accelerate."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is not installed.

    Raises:
        RopeExtendError: says what to install; for an unknown name, lists the known ones.
    """
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise RopeExtendError(f"no tracker is named {name!r}; use one of {known}")
        # `filter_trackers` would log the absence, which fails before the accelerator exists.
        if name in LoggerType and LoggerType(name) not in get_available_trackers():
            package = _PACKAGES.get(name, name)
            raise RopeExtendError(
                f"recipe: the package of the tracker {name} is missing; pip install '{package}'"
            )


def start_trackers(
    accelerator: Accelerator, names: Sequence[str], directory: Path, config: Mapping[str, Any], step: int
) -> None:
    """Start trackers, on the main process, so that `accelerator.log` reaches them.

    TensorBoard writes to `directory/tensorboard`, and drops its entries after `step`. The others put the run
    into the project `rope_extend`; those that accept a name for it get that of the directory.

    Args:
        accelerator: the accelerator of the run; its earlier trackers are dropped.
        names: names of the trackers.
        directory: directory of the run.
        config: values that describe the run.
        step: number of finished steps.

    Raises:
        RopeExtendError: a tracker does not start.
    """
    run = directory.resolve().name
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"purge_step": step + 1},
        "wandb": {"name": run, "dir": str(directory)},
        "mlflow": {"run_name": run},
        "trackio": {"name": run},
        "swanlab": {"experiment_name": run},
    }
    values = {name: str(value) for name, value in config.items()}
    started = []
    for name in names:
        # One at a time: `init_trackers` starts all of `log_with` again, and the project differs.
        accelerator.trackers, accelerator.log_with = [], filter_trackers([name], str(directory))
        with one_error(f"the tracker {name} does not start", "Set it up, or leave it out of the recipe"):
            accelerator.init_trackers(name if name == "tensorboard" else PROJECT, values, options)
        started += accelerator.trackers
    accelerator.trackers = started
