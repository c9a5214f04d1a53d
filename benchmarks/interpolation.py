"""Position interpolation by training step, compared with training without it."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator
from measuring import Row, row

import rope_extend as rx
from rope_extend.errors import RopeExtendError
from rope_extend.plots.style import (
    INK,
    PALETTE,
    PLAIN,
    QUIET,
    Canvas,
    draw_line,
    name_ends,
    perplexity_axis,
)
from rope_extend.training.run_report import RunLog

NAME = "interpolation_curve"
"""The name of the picture, and of the file with its numbers."""


def interpolation_curve(
    repetitions: int, steps: int | None = None, pictures: Path | None = None, **changes: Any
) -> Iterator[Row]:
    """Position interpolation at 4x the window by training step, and training without it (2306.15595).

    Runs configs/demo_1k_linear.yaml twice; `changes` replace fields of it. Draws both runs into `pictures`,
    and writes their numbers next to the picture.
    """
    config = Path(__file__).parent.parent / "configs" / "demo_1k_linear.yaml"
    changes |= {"steps": steps} if steps else {}
    curves = {}
    with tempfile.TemporaryDirectory() as directory:
        for method in ("linear", "none"):
            output = f"{directory}/{method}"
            recipe = rx.Recipe.from_yaml(config, {**changes, "method": method, "output_dir": output})
            rx.finetune(recipe)
            curves[method] = RunLog.read(Path(output) / "metrics.jsonl").curves
    inside, beyond = recipe.eval_lengths or ()
    base = curves["none"][0][inside]
    ours, direct = ({step: at[beyond] for step, at in curve.items()} for curve in curves.values())
    last = max(ours)
    name, peer = f"interpolation: perplexity at {beyond}", f"the base model's at its {inside}"
    yield row(f"{name} after {last} steps", peer, "ppl", ours[last], base, 1.0)
    below = min((step for step, value in ours.items() if value < base), default=math.inf)
    yield row("interpolation: steps until then", "the target", "steps", below, 200, 1.0)
    peer = "the same training without it"
    yield row(f"{name} before training", peer, "ppl", ours[0], direct[0])
    yield row(f"{name} after {last} steps", peer, "ppl", ours[last], direct[last], 1.0)
    if pictures:
        measured = Curve(inside, beyond, base, ours, direct)
        pictures.mkdir(parents=True, exist_ok=True)
        (pictures / f"{NAME}.json").write_text(
            json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8"
        )
        for suffix in (".png", ".svg"):
            draw_curve(measured, pictures / f"{NAME}{suffix}")


@dataclass(frozen=True)
class Curve:
    """Perplexity by step, with and without interpolation.

    Attributes:
        inside: the trained window, in tokens.
        beyond: the length of the perplexities, in tokens.
        base: the base model's perplexity at `inside`.
        interpolated: perplexity by step with interpolation.
        direct: the same without it.
    """

    inside: int
    beyond: int
    base: float
    interpolated: dict[int, float]
    direct: dict[int, float]

    @classmethod
    def read(cls, path: Path) -> Curve:
        """From the file that is written next to the picture."""
        values = json.loads(path.read_text(encoding="utf-8"))
        for name in ("interpolated", "direct"):  # JSON has no numbers as keys
            values[name] = {int(step): value for step, value in values[name].items()}
        return cls(**values)


def draw_curve(curve: Curve, path: Path) -> Path:
    """The picture of a measured curve."""
    return plot_by_step(
        {"interpolated": curve.interpolated, "direct": curve.direct},
        (f"the base model at {curve.inside}: {curve.base:.1f}", curve.base),
        path,
        title=f"Perplexity at {curve.beyond} tokens by step",
        subtitle=f"LoRA on blocks of {curve.beyond}, with and without position interpolation",
    )


def plot_by_step(
    runs: Mapping[str, Mapping[int, float]],
    level: tuple[str, float],
    path: str | Path,
    *,
    title: str | None = None,
    subtitle: str = "",
) -> Path:
    """Draw the perplexity of several runs against the step, and a level to compare them with.

    Args:
        runs: perplexity by step, by name of the run.
        level: the label and the perplexity of the horizontal line.
        path: the output file; the suffix gives the format: .png, .svg or .pdf.
        title: the heading.
        subtitle: the line below the heading.

    Raises:
        RopeExtendError: there is nothing to draw, or the format is unknown.
    """
    if not any(runs.values()):
        raise RopeExtendError("nothing to draw: no perplexity was measured")
    canvas = Canvas(path, title or "Perplexity by step", subtitle, room=24)
    axes = canvas.axes
    ends = []
    for colour, (name, course) in zip([*PALETTE, *[PLAIN] * len(runs)], runs.items(), strict=False):
        steps, values = np.array(sorted(course.items()), dtype=np.float64).T
        ends += draw_line(axes, steps, values, name, marker="o", markersize=4.5, color=colour)
    axes.axhline(level[1], color=PLAIN, linewidth=1, linestyle=":")
    axes.annotate(
        level[0], (0, level[1]), xytext=(4, -4), textcoords="offset points", va="top", color=QUIET, fontsize=9
    )
    perplexity_axis(axes)
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    name_ends(axes, ends)
    return canvas.save()
