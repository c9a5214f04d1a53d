"""The charts of a run's page: perplexity before and after training, and the loss by step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rope_extend.report.chart import Chart, Curve, Point
from rope_extend.report.colours import HUES, MARKERS, PLAIN, Look

_PLAIN, _MAIN = Look(*PLAIN, MARKERS[0]), Look(*HUES[0], MARKERS[0])


def course_chart(curves: Mapping[int, Mapping[int, float]], trained_length: int) -> Chart:
    """Perplexity against length before a run, at each evaluation during it, and after.

    Args:
        curves: perplexity by length in tokens, by the step after which it was measured; 0 is before training.
        trained_length: the pretrained window, in tokens.
    """
    steps = sorted(step for step, curve in curves.items() if curve)
    drawn = []
    for step in steps:
        points = [Point(length, value) for length, value in sorted(curves[step].items())]
        name = f"after step {step:,}" if step else "before training"
        look, kind = (_MAIN, "fine-tuned") if step else (_PLAIN, "untrained")
        drawn.append(Curve(name, points, look, kind, step in (steps[0], steps[-1])))
    return Chart(
        "Perplexity before and after training", drawn, "length, tokens", "perplexity (lower is better)",
        logarithmic=True, window=trained_length,
    )  # fmt: skip


def loss_chart(steps: Sequence[Mapping[str, Any]]) -> Chart:
    """The loss against the step, and its running mean over a tenth of the run."""
    points = [
        Point(line["step"], line["loss"]) for line in steps if isinstance(line.get("loss"), int | float)
    ]
    width = max(1, len(points) // 10)
    sums = [0.0, *itertools.accumulate(point.y for point in points)]
    means = [
        Point(point.x, (sums[end] - sums[max(0, end - width)]) / min(end, width))
        for end, point in enumerate(points, start=1)
    ]
    drawn = [Curve("each step", points, _PLAIN)]
    drawn += [Curve(f"mean of the last {width}", means, _MAIN)] if width > 1 else []
    return Chart("Loss by step", drawn, "step", "loss, nats per token", lengths=False)
