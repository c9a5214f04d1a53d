"""The report of a fine-tuning run: what it changed, and how it went, from the metrics that it wrote."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rope_extend import plots
from rope_extend.data import format_length
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.html import Picture, page
from rope_extend.evaluation.tables import Line, Section, number
from rope_extend.evaluation.versions import versions
from rope_extend.training.recipe import Recipe

logger = logging.getLogger(__name__)

REPORT = "report"
"""Directory of the report, in that of the run."""

Curve = Mapping[int, float]


@dataclass(frozen=True)
class RunLog:
    """What a run wrote into `metrics.jsonl`.

    Attributes:
        steps: lines of optimizer steps that changed the weights, in order.
        curves: perplexity by length in tokens, by the step after which it was measured; 0 is before training.
        skipped: how many steps changed no weight.
    """

    steps: Sequence[Mapping[str, Any]]
    curves: Mapping[int, Curve]
    skipped: int

    @classmethod
    def read(cls, path: Path) -> RunLog:
        """Read a `metrics.jsonl`; a last line that was cut short is left out.

        Raises:
            RopeExtendError: there is none, or it has no line of a step.
        """
        steps, curves, skipped = [], {}, 0
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise RopeExtendError(f"cannot read the metrics of the run: {error}") from error
        for text in lines:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if "loss" in line:
                steps.append(line)
            if "perplexity" in line:
                curves[line["step"]] = {int(length): value for length, value in line["perplexity"].items()}
            skipped = max(skipped, line.get("skipped", 0))
        if not steps:
            raise RopeExtendError(f"{path} has no line of a step")
        return cls(steps, curves, skipped)

    def values(self, name: str) -> list[float]:
        """One of the values of all steps that have it."""
        return [line[name] for line in self.steps if isinstance(line.get(name), int | float)]


def write_training_report(directory: Path, *, trained_length: int) -> Path:
    """Write `report/` into a run's directory: `report.md`, `report.html` and two pictures; returns its path.

    The perplexity at every length before and after, and at each evaluation between; the loss and the
    gradient's norm; speed, memory and, where it is known, the share of the device's peak. `report.html` needs
    no other file. It all appears at once, in place of an earlier one.

    Args:
        directory: of the run, with `metrics.jsonl` and `recipe.yaml`.
        trained_length: the window the model was pretrained with, in tokens.

    Raises:
        RopeExtendError: no metrics or recipe that can be read.
        OSError: it cannot be written.
    """
    log, recipe = RunLog.read(directory / "metrics.jsonl"), Recipe.from_yaml(directory / "recipe.yaml")
    final, partial = directory / REPORT, directory / f".{REPORT}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        pictures = [
            Picture(
                plots.plot_training(directory / "metrics.jsonl", partial / "training.png"),
                "Loss and norm of the gradient by step",
            )
        ]
        if log.curves:
            path = plots.plot_course(log.curves, trained_length, partial / "perplexity.png")
            pictures.insert(0, Picture(path, "Perplexity against length, before and after training"))
        sections = _sections(log)
        title, lead = f"Training report: {directory.resolve().name}", _lead(recipe, trained_length)
        text = [f"# {title}", lead, *(section.markdown() for section in sections)]
        text += [f"![{picture.words}]({picture.path.name})" for picture in pictures]
        (partial / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
        (partial / "report.html").write_text(
            page(title, [lead], [*pictures, *sections], versions()), encoding="utf-8"
        )
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def add_training_report(directory: Path, *, trained_length: int) -> None:
    """`write_training_report` at the end of a run that is done: what goes wrong is logged, not raised."""
    try:
        write_training_report(directory, trained_length=trained_length)
    except Exception as error:  # a picture is not worth a trained model
        logger.warning("no report on the training: %s", error)


def _lead(recipe: Recipe, trained_length: int) -> str:
    window = f"from {format_length(trained_length)} to {format_length(recipe.target_length)} tokens"
    blocks = f"blocks of {format_length(recipe.length)}"
    return (
        f"{recipe.model}, {window} by {recipe.method}: {recipe.steps} steps of LoRA rank {recipe.lora_rank} "
        f"on {blocks}, learning rate {recipe.learning_rate:g}."
    )


def _sections(log: RunLog) -> list[Section]:
    return [*([_perplexity(log.curves)] if log.curves else []), _course(log)]


def _perplexity(curves: Mapping[int, Curve]) -> Section:
    """One row for each evaluation, and where there are two the change between the ends."""
    lengths = sorted({length for curve in curves.values() for length in curve})
    lines: list[Line] = [["", *map(format_length, lengths)]]
    for step, curve in sorted(curves.items()):
        name = f"after step {step:,}" if step else "before training"
        lines.append([name, *(number(curve.get(length)) for length in lengths)])
    notes = ["The model was extended before the first row was measured: the rows differ in training alone."]
    first, last = curves[min(curves)], curves[max(curves)]
    if len(curves) > 1:
        ratios = [last[one] / first[one] if one in first and one in last else math.nan for one in lengths]
        change = ["–" if math.isnan(ratio) else f"{ratio:.3f}" for ratio in ratios]
        lines.append(["ratio, last to first", *change])
        notes.append("A ratio below 1 is a gain.")
    return Section("Perplexity by length, on held-out text", lines, notes)


def _course(log: RunLog) -> Section:
    """How the run went."""
    losses, norms, last = log.values("loss"), log.values("grad_norm"), log.steps[-1]
    part = max(1, len(losses) // 10)
    lines: list[Line] = [
        ["", "value"],
        ["steps", f"{last['step']:,}"],
        ["of them skipped, for a loss or gradient that was not finite", f"{log.skipped:,}"],
        ["tokens", f"{last['tokens']:,}"],
        ["time in steps", _duration(last["seconds"])],
        [f"loss, mean of the first {part} steps logged, nats", f"{fmean(losses[:part]):.4f}"],
        [f"loss, mean of the last {part}", f"{fmean(losses[-part:]):.4f}"],
        ["norm of the gradient, median", f"{median(norms):.3g}"],
        ["norm of the gradient, largest", f"{max(norms):.3g}"],
        ["learning rate at the end", f"{last['lr']:.3g}"],
        ["tokens per second, median", f"{median(log.values('tokens_per_second')):,.0f}"],
    ]
    if shares := log.values("mfu"):
        lines.append(["share of the devices' peak operations (MFU), median", f"{100 * median(shares):.1f} %"])
    if peaks := log.values("peak_memory_bytes"):
        lines.append(["most memory, of the first process", f"{max(peaks) / 2**20:,.0f} MiB"])
    notes = ["Memory: allocated by tensors on a GPU; elsewhere the process's resident size."]
    if shares:
        notes.append(
            "MFU: 4 operations for each token and frozen weight, 6 for each trained one, and attention "
            "within the causal mask, against the peak of dense products; recomputation does not count."
        )
    return Section("The run", lines, notes)


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
