"""The report of a fine-tuning run, from its metrics: perplexity by length, loss, speed and memory."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult
from rope_extend.files import replacing_files
from rope_extend.report.page import PAGE, Part, Picture, write_pages
from rope_extend.report.tables import Code, Line, Section, number, public_name
from rope_extend.training.metrics import read_metrics, same_text
from rope_extend.training.recipe import Recipe
from rope_extend.units import format_duration, format_length

logger = logging.getLogger(__name__)

REPORT = "report"
"""Directory of the report, inside that of the run."""

Curve = Mapping[int, float]


@dataclass(frozen=True)
class RunLog:
    """The contents of a run's `metrics.jsonl`.

    Attributes:
        steps: lines of optimizer steps that changed the weights, in order.
        curves: perplexity by length in tokens, by the step after which it was measured; 0 is before training.
            Those on other text than the last one are left out.
        skipped: number of steps that changed no weight.
        other_text: number of evaluations that are left out because they were on other text.
        trained_on: number of documents of the evaluations that are also training data.
    """

    steps: Sequence[Mapping[str, Any]]
    curves: Mapping[int, Curve]
    skipped: int
    other_text: int = 0
    trained_on: int = 0

    @classmethod
    def read(cls, path: Path, last: int | None = None) -> RunLog:
        """Read a `metrics.jsonl` up to the step `last`: a rewind may not have replaced later ones yet.

        Raises:
            RopeExtendError: the file does not exist, or it has no line of a step.
        """
        lines = [line for line in read_metrics(path) if last is None or line["step"] <= last]
        steps = [line for line in lines if "loss" in line]
        measured = [line for line in lines if "perplexity" in line]
        if not steps:
            raise RopeExtendError(
                f"{path} has no line of a step; give the directory of a run that has trained"
            )
        evaluated: dict[str, Any] = (measured[-1].get("eval_data") if measured else None) or {}
        same = [line for line in measured if same_text(line.get("eval_data"), evaluated)]
        curves: dict[int, dict[int, float]] = {}
        for line in same:  # several of one step, if its perplexity was also measured at other lengths
            curve = {int(length): value for length, value in line["perplexity"].items()}
            curves.setdefault(line["step"], {}).update(curve)
        skipped = max(line.get("skipped", 0) for line in lines)
        return cls(steps, curves, skipped, len(measured) - len(same), evaluated.get("trained_on", 0))

    def values(self, name: str) -> list[float]:
        """The values of one metric, in all steps that have it."""
        return [line[name] for line in self.steps if isinstance(line.get(name), int | float)]


def write_training_report(directory: Path, *, trained_length: int) -> Path:
    """Write `report/` into a run's directory: `report.md`, `report.html` and two figures; returns its path.

    The report has the perplexity at every length and evaluation, the loss, the norm of the gradient, speed
    and memory. `report.html` needs no other file. The files replace those of an earlier report.

    Args:
        directory: directory of the run, with `metrics.jsonl` and `recipe.yaml`.
        trained_length: the pretrained window, in tokens.

    Raises:
        RopeExtendError: the metrics or the recipe cannot be read.
        OSError: the report cannot be written.
    """
    from rope_extend.plots.curves import plot_perplexity
    from rope_extend.plots.training_curves import plot_training

    recipe = Recipe.from_yaml(directory / "recipe.yaml")
    log = RunLog.read(directory / "metrics.jsonl", recipe.steps)
    final = directory / REPORT
    with replacing_files(final, last=PAGE) as files:
        pictures = []
        if log.curves:
            heading = "Perplexity against length, before and after training"
            draw = partial(plot_perplexity, _rows(log, recipe.method, trained_length))
            pictures.append(Picture(heading, draw, "perplexity.png"))
        draw = partial(plot_training, directory / "metrics.jsonl")
        pictures.append(Picture("Loss by step", draw, "training.png"))
        name = directory.resolve().name
        # Another directory, because a command refuses one that holds a run.
        words = ["rope-extend", "finetune", "recipe.yaml", "--output-dir", f"{name}-again"]
        made_by = Code("The command that made this report", shlex.join(words))
        parts: list[Part] = [_lead(recipe, trained_length), *pictures, *_sections(log), made_by]
        write_pages(files, f"Training report: {name}", parts)
    return final


def add_training_report(directory: Path, *, trained_length: int) -> None:
    """Call `write_training_report` at the end of a run; an error is logged, not raised."""
    try:
        write_training_report(directory, trained_length=trained_length)
    except Exception as error:  # the trained model is worth more than the report
        logger.warning("cannot write the training report: %s", error)


def _rows(log: RunLog, method: str, trained_length: int) -> list[EvaluationRow]:
    """The first and the last perplexities, for the picture."""
    return [
        EvaluationRow(
            f"step {step:,}" if step else "before", {"name": method}, adapter="run" if step else None,
            result=PerplexityResult(dict(log.curves[step])), trained_length=trained_length,
        )
        for step in sorted({min(log.curves), max(log.curves)})
    ]  # fmt: skip


def _lead(recipe: Recipe, trained_length: int) -> str:
    window = f"from {format_length(trained_length)} to {format_length(recipe.target_length)} tokens"
    blocks = f"blocks of {format_length(recipe.length)}"
    return (
        f"{public_name(recipe.model)}, {window} by {recipe.method}: {recipe.steps} steps of LoRA rank "
        f"{recipe.lora_rank} on {blocks}, learning rate {recipe.learning_rate:g}."
    )


def _sections(log: RunLog) -> list[Section]:
    return [*([_perplexity(log)] if log.curves else []), _course(log)]


def _perplexity(log: RunLog) -> Section:
    """One row for each evaluation; with two or more, also the ratio of the last to the first."""
    curves = log.curves
    lengths = sorted({length for curve in curves.values() for length in curve})
    lines: list[Line] = [["", *map(format_length, lengths)]]
    for step, curve in sorted(curves.items()):
        name = f"after step {step:,}" if step else "before training"
        lines.append([name, *(number(curve.get(length)) for length in lengths)])
    notes = ["The model is extended in every row, also the first: the rows differ by training alone."]
    first, last = curves[min(curves)], curves[max(curves)]
    if len(curves) > 1:
        ratios = [last[n] / first[n] if n in first and n in last else math.nan for n in lengths]
        change = ["–" if math.isnan(ratio) else f"{ratio:.3f}" for ratio in ratios]
        lines.append(["ratio, last to first", *change])
        notes.append("A ratio below 1 is an improvement.")
    if log.other_text:
        notes.append(
            f"{log.other_text} earlier evaluations on other text are left out, because they cannot be "
            "compared; metrics.jsonl has them."
        )
    if not log.trained_on:
        return Section("Perplexity by length, on held-out text", lines, notes)
    notes.append(f"{log.trained_on} of the documents are also training data, so the text is not held out.")
    return Section("Perplexity by length", lines, notes)


def _course(log: RunLog) -> Section:
    """Steps, loss, speed and memory of the run."""
    losses, norms, last = log.values("loss"), log.values("grad_norm"), log.steps[-1]
    part = max(1, len(losses) // 10)
    lines: list[Line] = [
        ["", "value"],
        ["steps", f"{last['step']:,}"],
        ["skipped steps, because the loss or gradient was not finite", f"{log.skipped:,}"],
        ["tokens", f"{last['tokens']:,}"],
        ["time in steps", format_duration(last["seconds"])],
        [f"loss in nats, mean of the first {part} logged steps", f"{fmean(losses[:part]):.4f}"],
        [f"loss in nats, mean of the last {part} logged steps", f"{fmean(losses[-part:]):.4f}"],
        ["norm of the gradient, median", f"{median(norms):.3g}"],
        ["norm of the gradient, largest", f"{max(norms):.3g}"],
        ["learning rate at the end", f"{last['lr']:.3g}"],
        ["tokens per second, median", f"{median(log.values('tokens_per_second')):,.0f}"],
    ]
    if peaks := log.values("peak_memory_bytes"):
        lines.append(["peak memory of the first process", f"{max(peaks) / 2**20:,.0f} MiB"])
    notes = ["Memory: allocated by tensors on a GPU; elsewhere the resident size of the process."]
    return Section("The run", lines, notes)
