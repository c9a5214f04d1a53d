"""A fine-tuning run: loss by step."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from rope_extend.errors import RopeExtendError
from rope_extend.plots.style import INK, PALETTE, Canvas


def plot_training(metrics: str | Path, path: str | Path) -> Path:
    """Draw the loss against the step, from a run's `metrics.jsonl`, with its running mean.

    Args:
        metrics: a file of JSON lines. Lines with `step` and `loss` (nats per token) are drawn.
        path: the output file; the suffix gives the format: .png, .svg or .pdf.
    """
    metrics = Path(metrics)
    if not metrics.is_file():
        raise RopeExtendError(f"no training log at {str(metrics)!r}; a fine-tuning run writes metrics.jsonl")
    points: dict[int, float] = {}  # a resumed run repeats steps; the last line counts
    for text in metrics.read_bytes().splitlines():
        # A line may be cut off, or have no loss.
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            line = json.loads(text)
            points[int(float(line["step"]))] = float(line["loss"])
    if not points:
        raise RopeExtendError(f"no line of {str(metrics)!r} has a 'step' and a 'loss'")
    steps, losses = np.array(sorted(points.items()), dtype=np.float64).T
    width = max(1, len(losses) // 10)
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    starts = np.maximum(np.arange(1, len(losses) + 1) - width, 0)
    means = (sums[1:] - sums[starts]) / (np.arange(1, len(losses) + 1) - starts)

    subtitle = f"each step, and the mean of the last {width}" if width > 1 else "each step"
    canvas = Canvas(path, "Training", subtitle)
    axes = canvas.axes
    marker = "o" if len(steps) < 3 else ""  # one point is no line
    axes.plot(steps, losses, color=PALETTE[0], alpha=0.35, linewidth=1, marker=marker)
    axes.plot(steps, means, color=PALETTE[0], linewidth=2)
    axes.set_ylabel("loss, nats per token", color=INK)
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return canvas.save()
