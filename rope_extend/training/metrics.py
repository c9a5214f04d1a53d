"""The metrics of a run: `metrics.jsonl`, and the trackers of `Trainer`, such as TensorBoard and MLflow."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import integration_utils

from rope_extend.errors import RopeExtendError
from rope_extend.models.loading import one_error


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
    """Appends to `metrics.jsonl`, and keeps the latest measurements; only the main process writes.

    Perplexities of other text than that of this session are not compared with those of this session.

    Args:
        path: the file.
        step: number of finished steps; 0 for a new run.
        evaluated: the text of the session's evaluations, as it is written with every perplexity.
        writes: whether this process writes.

    Attributes:
        loss: loss of the last step that was not skipped, in nats.
        perplexity: perplexity after the current step, by length in tokens; empty if it was not measured.
        before: perplexity before the first step.

    Raises:
        RopeExtendError: the disk is full.
    """

    def __init__(self, path: Path, step: int, evaluated: Mapping[str, Any], *, writes: bool) -> None:
        self.path, self.evaluated, self.writes = path, evaluated, writes
        self.loss, self.perplexity, self.before = math.nan, dict[int, float](), dict[int, float]()
        # Those of an earlier run, which may have had other settings; a link is refused below.
        if writes and not step and not path.is_symlink():
            path.unlink(missing_ok=True)
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

    def write(self, step: int, **values: Any) -> None:
        """Add one line, after the end of one that a killed process did not finish.

        Raises:
            RopeExtendError: the disk is full.
        """
        if self.writes:
            self._append(json.dumps({"step": step, **values}).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        try:
            with open(self.path, "ab+", opener=_not_a_link) as file:
                file.seek(max(0, file.tell() - 1))
                cut_short = file.read() not in (b"", b"\n")
                file.write(b"\n" * cut_short + line)
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
    begin = callback.on_train_begin

    def on_train_begin(*args: Any, **options: Any) -> None:
        with one_error(problem, advice):
            begin(*args, **options)

    callback.on_train_begin = on_train_begin
    return callback
