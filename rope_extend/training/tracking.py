"""The trackers of a run, of those that `accelerate` knows: TensorBoard, Weights & Biases, MLflow, …"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers

from rope_extend.errors import RopeExtendError
from rope_extend.pretrained import one_error

PROJECT = "rope_extend"
"""Under which project, experiment or the like the trackers file a run."""

_PACKAGES = {"tensorboard": "rope_extend[tensorboard]", "comet_ml": "comet-ml"}
"""What pip calls the packages that it calls otherwise than accelerate does."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is not there.

    Raises:
        RopeExtendError: naming what to install, or for an unknown name those that there are.
    """
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise RopeExtendError(f"no tracker is called {name!r}; there are {known}")
        if not filter_trackers([name], "."):
            package = _PACKAGES.get(name, name)
            raise RopeExtendError(
                f"recipe: {name} is asked for but the package is missing; pip install '{package}'"
            )


def start_trackers(
    accelerator: Accelerator, names: Sequence[str], directory: Path, config: Mapping[str, Any], step: int
) -> None:
    """Start trackers, on the main process, so that `accelerator.log` reaches them.

    TensorBoard writes to `directory/tensorboard`, and drops what it has of the steps after `step`. The others
    file the run under the project `rope_extend`, where they take a name under that of its directory.

    Args:
        accelerator: of the run; what it tracked with before is let go of.
        names: of the trackers.
        directory: of the run.
        config: values that describe the run.
        step: where the run stands.

    Raises:
        RopeExtendError: one of them does not start.
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
        # One at a time, because each has its own name for the run, and all that are there are started again.
        accelerator.trackers, accelerator.log_with = [], filter_trackers([name], str(directory))
        with one_error(f"the tracker {name} does not start", "Set it up, or leave it out of the recipe"):
            accelerator.init_trackers(name if name == "tensorboard" else PROJECT, values, options)
        started += accelerator.trackers
    accelerator.trackers = started
