"""The best fitness of a search against what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import FuncFormatter, MaxNLocator

from rope_extend.plots.style import INK, PALETTE, Canvas


def plot_search_curve(
    curve: Sequence[tuple[int, float]], path: str | Path, *, title: str | None = None
) -> Path:
    """Draw the best fitness so far, in nats per token, against the number of documents measured.

    Args:
        curve: documents measured, each counted once for a candidate, and the best fitness, ascending.
        path: the output file; the suffix gives the format: .png, .svg or .pdf.
        title: the heading.

    Raises:
        RopeExtendError: the format is unknown.
    """
    canvas = Canvas(path, title or "Search", "the best fitness on all documents so far")
    axes = canvas.axes
    passes, values = zip(*curve, strict=True) if curve else ((), ())
    axes.plot(passes, values, color=PALETTE[0], linewidth=2, marker="o", markersize=4, drawstyle="steps-post")
    axes.set_xlabel("documents measured", color=INK)
    axes.set_ylabel("fitness, nats per token", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return canvas.save()
