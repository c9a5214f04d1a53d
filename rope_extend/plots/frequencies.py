"""Rotary schedules: the wavelength of each channel pair."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator, NullLocator

from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.plots.style import INK, QUIET, TEXT, Canvas, draw_line, method_colour
from rope_extend.units import format_length


def plot_frequencies(
    encodings: Iterable[RopeEncoding],
    shape: RopeShape,
    path: str | Path,
    *,
    seq_len: int | None = None,
) -> Path:
    """Draw each channel pair's wavelength under each method.

    A pair whose wavelength is longer than the trained window never completed a turn in training. Beyond the
    window, its angles are new to the model.

    Args:
        encodings: rotary schedules, one line each.
        shape: the model's rotary shape.
        path: the output file; the suffix gives the format: .png, .svg or .pdf.
        seq_len: the current length in tokens, for schedules that depend on it.
    """
    encodings = list(encodings)
    if not encodings:
        raise RopeExtendError("no encodings to draw")
    canvas = Canvas(path, "Frequencies by method")
    axes = canvas.axes
    for rank, encoding in enumerate(encodings):
        frequencies = encoding.inv_freq(shape, seq_len).numpy()
        rotating = np.where(frequencies > 0, frequencies, np.nan)  # frequency zero has no wavelength
        # Where schedules agree, the earlier line is visible as a border of the later one.
        width = 1.5 + 0.6 * (len(encodings) - 1 - rank)
        pairs, colour = np.arange(len(frequencies), dtype=np.float64), method_colour(encoding.name)
        draw_line(axes, pairs, 2 * np.pi / rotating, label=str(encoding), color=colour, linewidth=width)
    axes.set_yscale("log")
    axes.set_ylabel("wavelength, tokens per turn", color=INK)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.axhline(shape.trained_length, color=QUIET, linewidth=1, zorder=1)
    axes.annotate(
        f"trained window, {format_length(shape.trained_length)}",
        (1, shape.trained_length), (-2, 4), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
        ha="right", color=QUIET, fontsize=TEXT,
    )  # fmt: skip
    axes.set_xlabel("channel pair", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return canvas.save()
