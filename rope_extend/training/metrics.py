"""The metrics of a run: `metrics.jsonl`, and the trackers of `accelerate`, such as TensorBoard and MLflow."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers, get_available_trackers
from accelerate.utils import LoggerType

from rope_extend.errors import RopeExtendError
from rope_extend.models.loading import one_error

PROJECT = "rope_extend"
"""The project or experiment of a run in its trackers."""


def same_text(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two perplexities, by the `eval_data` of their lines, were measured on the same documents."""
    return (one or {}).get("fingerprint") == (other or {}).get("fingerprint")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` by step, without one that a killed run did not finish.

    A resumed run writes the steps after its checkpoint again; of such lines, the last one counts.

    Raises:
        RopeExtendError: the file cannot be read.
    """
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                line = json.loads(text)
                evaluated = (line.get("eval_data") or {}).get("fingerprint")
                lines[line["step"], evaluated, *line.get("perplexity", ())] = line
    except OSError as error:
        raise RopeExtendError(f"cannot read the metrics of the run: {error}") from error
    return sorted(lines.values(), key=lambda line: int(line["step"]))


class Metrics:
    """Appends to `metrics.jsonl` and to the trackers, and keeps the latest measurements.

    Perplexities of other text than that of this session are not compared with those of this session.

    Args:
        path: the file.
        accelerator: the accelerator of the run.
        step: number of finished steps; 0 for a new run.
        evaluated: the text of the session's evaluations, as it is written with every perplexity.

    Attributes:
        loss: loss of the last step that was not skipped, in nats.
        perplexity: perplexity after the current step, by length in tokens; empty if it was not measured.
        before: perplexity before the first step.

    Raises:
        RopeExtendError: the disk is full.
    """

    def __init__(self, path: Path, accelerator: Accelerator, step: int, evaluated: Mapping[str, Any]) -> None:
        self.path, self.accelerator = path, accelerator
        self.loss, self.perplexity, self.before = math.nan, dict[int, float](), dict[int, float]()
        for values in read_metrics(path) if step and path.exists() else []:
            if values["step"] > step:
                break
            self.loss = values.get("loss", self.loss)
            if "perplexity" in values and same_text(values.get("eval_data"), evaluated):
                curve = {int(length): value for length, value in values["perplexity"].items()}
                if values["step"] == step:
                    self.perplexity |= curve
                if not values["step"]:
                    self.before = curve
        accelerator.wait_for_everyone()
        if accelerator.is_main_process and path.exists() and not path.read_bytes().endswith(b"\n"):
            self._append("\n")  # ends the line of a process that was killed

    def write(self, step: int, **values: Any) -> None:
        """Add one line, on the main process.

        Raises:
            RopeExtendError: the disk is full.
        """
        if not self.accelerator.is_main_process:
            return
        self._append(json.dumps({"step": step, **values}) + "\n")
        values.pop("eval_data", None)
        curve = {f"perplexity/{length}": value for length, value in values.pop("perplexity", {}).items()}
        self.accelerator.log(values | curve, step=step)

    def _append(self, text: str) -> None:
        try:
            with open(self.path, "a", encoding="utf-8", opener=_not_a_link) as file:
                file.write(text)
        except OSError as error:
            raise RopeExtendError(
                f"cannot write {self.path}: {error}. Checkpoints are intact; make room, then resume the run"
            ) from error


def _not_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


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
            package = name.replace("_", "-")
            raise RopeExtendError(
                f"recipe: the package of the tracker {name} is missing; pip install {package}"
            )


def start_trackers(
    accelerator: Accelerator, names: Sequence[str], directory: Path, config: Mapping[str, Any], step: int
) -> None:
    """Start trackers, on the main process, so that `accelerator.log` reaches them.

    TensorBoard writes to `tensorboard/` in the directory, and drops its entries after `step`. The others put
    the run into the project `rope_extend`, under the name of the directory if they accept one.

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
    }
    accelerator.trackers, accelerator.log_with = [], filter_trackers(list(names), str(directory))
    with one_error("a tracker does not start", "Set it up, or leave it out of the recipe"):
        accelerator.init_trackers(PROJECT, {name: str(value) for name, value in config.items()}, options)
