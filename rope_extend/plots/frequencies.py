"""Rotary schedules: the wavelength and the frequency of each channel pair."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator, NullLocator

from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.plots.palette import looks_of_rows
from rope_extend.plots.style import INK, QUIET, Canvas, draw_line
from rope_extend.units import format_length


def plot_frequencies(
    encodings: Iterable[RopeEncoding],
    shape: RopeShape,
    path: str | Path,
    *,
    seq_len: int | None = None,
) -> Path:
    """Draw each channel pair's wavelength under each method, and its frequency divided by plain RoPE's.

    A pair whose wavelength is longer than the trained window never completed a turn in training. Beyond the
    window, its angles are new to the model.

    Args:
        encodings: rotary schedules, one line each.
        shape: the model's rotary shape.
        path: the output file; the suffix gives the format: .png, .svg or .pdf.
        seq_len: the current length in tokens, for schedules that depend on it.

    Raises:
        RopeExtendError: there is nothing to draw, or the format is unknown.
    """
    encodings = list(encodings)
    if not encodings:
        raise RopeExtendError("no encodings to draw")
    canvas = Canvas(path, "Frequencies by method", panels=2)
    upper, lower = canvas.panels
    plain = shape.inv_freq().numpy()
    looks = looks_of_rows([(encoding.name, "untrained") for encoding in encodings])
    for rank, encoding in enumerate(encodings):
        frequencies = encoding.inv_freq(shape, seq_len).numpy()
        rotating = np.where(frequencies > 0, frequencies, np.nan)  # frequency zero has no wavelength
        pairs = np.arange(len(frequencies), dtype=np.float64)
        # Where schedules agree, the earlier line is visible as a border of the later one.
        style = {"color": looks[rank].colour, "linewidth": 1.5 + 0.6 * (len(encodings) - 1 - rank)}
        draw_line(upper, pairs, 2 * np.pi / rotating, label=str(encoding), **style)
        draw_line(lower, pairs, frequencies / plain, **style)
    upper.set_yscale("log")
    upper.set_ylabel("wavelength, tokens per turn", color=INK)
    upper.yaxis.set_minor_locator(NullLocator())
    upper.axhline(shape.trained_length, color=QUIET, linewidth=1, zorder=1)
    upper.annotate(
        f"trained window, {format_length(shape.trained_length)}",
        (1, shape.trained_length), (-2, 4), xycoords=upper.get_yaxis_transform(), textcoords="offset points",
        ha="right", color=QUIET, fontsize=9,
    )  # fmt: skip
    lower.set_ylabel("frequency ÷ plain RoPE's", color=INK)
    lower.set_xlabel("channel pair", color=INK)
    lower.set_ylim(bottom=0)
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    return canvas.save()
