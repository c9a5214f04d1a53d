"""Every picture: from saved results, from a training log, or from an encoding alone.

Drawn with matplotlib's objects on its Agg canvas: no window, no global state, safe in any thread. Colours
are those of Okabe and Ito, which colour-blind readers can tell apart, and nothing hangs on colour alone:
lines are named where they end, and dashes tell untrained from fine-tuned.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from rope_extend.data import format_length
from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import Comparison
from rope_extend.evaluation.results import EvaluationRow, RetrievalResult

Floats = np.ndarray[Any, np.dtype[np.float64]]
_Row = TypeVar("_Row", bound="EvaluationRow | RetrievalResult")

FORMATS = (".png", ".svg", ".pdf")
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
PLAIN = "#5F5F5F"  # what nothing was done to
INK, QUIET, _GRID, _BEYOND = "#222222", "#777777", "#E4E4E4", "#F6F6F6"
_TEXT_HEIGHT = 0.047  # of one line of labels, as a share of the axes
_TICKS = 12  # most labels that stand side by side


def plot_perplexity(
    rows: Sequence[EvaluationRow], trained_length: int, path: str | Path, *, title: str | None = None
) -> Path:
    """Draw perplexity against length, both logarithmic, with the trained window marked.

    Args:
        rows: one line each; a colour for each method, dashed where it is untrained, solid where it is
            fine-tuned, dotted where the context was cropped.
        trained_length: the window the model was pretrained with, in tokens.
        path: where to; the suffix says how: .png, .svg or .pdf.
        title: heading.

    Raises:
        RopeExtendError: if there is nothing to draw, or no such format.
    """
    picture = _Picture(path, title or "Perplexity against length", _legend(rows), room=16)
    axes = picture.axes
    ends = []
    for row, style in _styled(rows):
        lengths, values = np.array(sorted(row.result.ppl.items()), dtype=np.float64).T
        ends += _line(axes, lengths, values, row.label, markersize=5.5, **style)
    _perplexity_axis(axes)
    lengths = sorted({length for row in rows for length in row.result.ppl})
    _length_axis(axes, lengths, "length, tokens")
    _mark_window(axes, trained_length)
    _name_ends(axes, ends)
    return picture.save()


def plot_loss_by_position(
    rows: Sequence[EvaluationRow], trained_length: int, path: str | Path, *, title: str | None = None
) -> Path:
    """Draw the mean loss in nats per token against the position of the predicted token.

    Positions are averaged in groups that widen as they go, four to each doubling: single ones are noisy.
    Arguments and errors are those of :func:`plot_perplexity`.
    """
    picture = _Picture(path, title or "Loss by position", _legend(rows), room=16)
    axes = picture.axes
    longest = max((len(row.result.nll_by_position) + 1 for row in rows), default=1)
    first = max(1, longest // 256)
    ends = []
    for row, style in _styled(rows):
        positions, means = _in_groups(row.result.nll_by_position, first)
        ends += _line(axes, positions, means, row.label, **{**style, "marker": ""})
    axes.set_ylabel("loss, nats per token", color=INK)
    whole = all(row.result.protocol in ("prefix", "cropped") for row in rows)
    what = "document" if whole else "window"
    powers = [2**n for n in range(longest.bit_length()) if 2**n >= first]
    _length_axis(axes, powers, f"position in the {what}, tokens")
    axes.set_xlim(first, longest)
    _mark_window(axes, trained_length)
    _name_ends(axes, ends)
    return picture.save()


def plot_accuracy(
    results: Sequence[RetrievalResult], task: str, path: str | Path, *, title: str | None = None
) -> Path:
    """Draw the share of trials solved against length, with 95 % intervals and the trained window marked.

    Args:
        results: one line each, as :func:`plot_perplexity` draws them; those without the task are left out.
        task: which task.
        path: where to; the suffix says how: .png, .svg or .pdf.
        title: heading.

    Raises:
        RopeExtendError: if there is nothing to draw, or no such format.
    """
    rows = [result for result in results if task in result.tasks]
    picture = _Picture(path, title or f"Retrieval against length: {task}", _legend(rows), room=16)
    axes = picture.axes
    ends = []
    for row, style in _styled(rows):
        lengths = row.lengths(task)
        rates = [rate for length in lengths if (rate := row.rate(task, length)) is not None]
        x, y = np.array(lengths, dtype=np.float64), np.array([100 * rate.mean for rate in rates])
        axes.vlines(
            x, [100 * rate.low for rate in rates], [100 * rate.high for rate in rates], color=style["color"],
            linewidth=4, alpha=0.18, zorder=2,
        )  # fmt: skip
        ends += _line(axes, x, y, row.label, markersize=5.5, **style)
    axes.set_ylim(-3, 103)
    axes.set_ylabel("trials solved, %", color=INK)
    lengths = sorted({length for row in rows for length in row.lengths(task)})
    _length_axis(axes, lengths, "length, tokens")
    trained = next((row.trained_length for row in rows if row.trained_length), None)
    if trained is not None:
        _mark_window(axes, trained)
    _name_ends(axes, ends)
    return picture.save()


def plot_heat_map(result: RetrievalResult, task: str, path: str | Path, *, title: str | None = None) -> Path:
    """Draw the share of trials solved over depth and length, the trained window marked between columns.

    Args:
        result: what was measured.
        task: a task that has depths.
        path: where to; the suffix says how: .png, .svg or .pdf.
        title: heading.

    Raises:
        RopeExtendError: if there is nothing to draw, or no such format.
    """
    lengths, depths = result.lengths(task), result.depths(task)
    if not depths:
        raise RopeExtendError(f"no heat map of {task!r}: {result.label} has no trials of it at a depth")
    subtitle = f"{result.label} · trials solved, %"
    picture = _Picture(path, title or f"Retrieval by depth: {task}", subtitle, room=16)
    axes = picture.axes
    rates = [[result.rate(task, length, depth) for length in lengths] for depth in depths]
    shares = np.array([[np.nan if rate is None else 100 * rate.mean for rate in row] for row in rates])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    image = axes.imshow(np.ma.masked_invalid(shares), cmap="cividis", vmin=0, vmax=100, aspect="auto")
    written = max(shares.shape) <= 2 * _TICKS
    if not written:  # no room for numbers: the colours must do
        bar = picture.figure.colorbar(image, ax=axes, pad=0.02)
        bar.outline.set_visible(False)
    for (row, column), share in np.ndenumerate(shares):
        if np.isfinite(share) and written:
            colour = "white" if share < 55 else INK  # what reads well on cividis
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", color=colour, fontsize=9.5)
    axes.xaxis.set_major_locator(FixedLocator(range(0, len(lengths), math.ceil(len(lengths) / _TICKS))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: format_length(lengths[round(at)])))
    axes.yaxis.set_major_locator(FixedLocator(range(0, len(depths), math.ceil(len(depths) / _TICKS))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{100 * depths[round(at)]:.0f} %"))
    axes.tick_params(length=0)
    axes.set_xlabel("length, tokens", color=INK)
    axes.set_ylabel("depth of the needle", color=INK)
    trained = result.trained_length
    if trained is not None:
        edge = sum(length <= trained for length in lengths) - 0.5
        axes.axvline(edge, color="#D55E00", linewidth=2.5, clip_on=False)
        axes.annotate(
            f"trained window, {format_length(trained)}", (edge, 1), (0, 4), ha="center",
            xycoords=axes.get_xaxis_transform(), textcoords="offset points", color=QUIET, fontsize=9,
        )  # fmt: skip
    return picture.save()


def plot_comparison(
    comparisons: Sequence[Comparison], trained_length: int, path: str | Path, *, title: str | None = None
) -> Path:
    """Draw the perplexities of pairs of rows, and below by how much the second of each differs.

    The band is the 95 % interval of the difference, over documents; where it holds zero, the two cannot be
    told apart. Arguments and errors are those of :func:`plot_perplexity`.
    """
    if not comparisons:
        raise RopeExtendError("nothing to draw: no pairs of rows")
    rows = {id(row): row for pair in comparisons for row in (pair.first, pair.second)}
    what = "second − first"
    if len(comparisons) == 1:
        what = f"{comparisons[0].second.label} − {comparisons[0].first.label}"
    subtitle = f"below: {what}, with its 95 % interval over documents"
    picture = _Picture(path, title or "Perplexity, and the difference", subtitle, panels=2, room=16)
    upper, lower = picture.panels
    ends = []
    looks = _colours(row.label for row in rows.values())  # two rows of one method must differ here
    for row, style in _styled(list(rows.values())):
        style["color"], style["marker"] = looks[row.label]
        lengths, values = np.array(sorted(row.result.ppl.items()), dtype=np.float64).T
        ends += _line(upper, lengths, values, row.label, markersize=5.5, **style)
    for pair in comparisons:
        colour = looks[pair.second.label][0]
        at = np.array([one.length for one in pair.differences], dtype=np.float64)
        _line(lower, at, np.array([one.nats for one in pair.differences]), "", color=colour, marker="o")
        if all(one.low is not None for one in pair.differences):
            low, high = ([getattr(one, end) for one in pair.differences] for end in ("low", "high"))
            lower.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
    lower.axhline(0, color=QUIET, linewidth=1, zorder=1)
    lower.set_ylabel("difference of loss, nats", color=INK)
    _perplexity_axis(upper)
    measured = sorted({length for row in rows.values() for length in row.result.ppl})
    _length_axis(lower, measured, "length, tokens")
    _mark_window(upper, trained_length)
    _name_ends(upper, ends)
    return picture.save()


def plot_training(metrics: str | Path, path: str | Path, *, title: str | None = None) -> Path:
    """Draw the loss against the step, from a run's ``metrics.jsonl``, with its running mean.

    Beneath it the norm of the gradient, before it was clipped, where the lines have it.

    Args:
        metrics: a file of JSON lines; those with ``step`` and ``loss`` (nats per token) are drawn.
        path: where to; the suffix says how: .png, .svg or .pdf.
        title: heading.

    Raises:
        RopeExtendError: if there is no such file, or no loss in it, or no such format.
    """
    metrics = Path(metrics)
    if not metrics.is_file():
        raise RopeExtendError(f"no training log at {str(metrics)!r}; a fine-tuning run writes metrics.jsonl")
    points = []
    for text in metrics.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError, KeyError):  # cut short, or a line without a loss
            line = json.loads(text)
            points.append((line["step"], line["loss"], line.get("grad_norm", math.nan)))
    if not points:
        raise RopeExtendError(f"no line of {str(metrics)!r} has a 'step' and a 'loss'")
    steps, losses, norms = np.array(points, dtype=np.float64).T
    width = max(1, len(losses) // 10)
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    starts = np.maximum(np.arange(1, len(losses) + 1) - width, 0)
    means = (sums[1:] - sums[starts]) / (np.arange(1, len(losses) + 1) - starts)

    subtitle = f"each step, and the mean of the last {width}" if width > 1 else "each step"
    known = np.isfinite(norms) & (norms > 0)
    picture = _Picture(path, title or "Training", subtitle, panels=2 if known.any() else 1)
    axes = picture.axes
    marker = "o" if len(steps) < 3 else ""  # one point is no line
    axes.plot(steps, losses, color=PALETTE[0], alpha=0.35, linewidth=1, marker=marker)
    axes.plot(steps, means, color=PALETTE[0], linewidth=2)
    axes.set_ylabel("loss, nats per token", color=INK)
    if known.any():
        axes = picture.panels[1]
        axes.plot(steps[known], norms[known], color=PALETTE[1], linewidth=1, marker=marker)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        axes.set_ylabel("norm of the gradient", color=INK)
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return picture.save()


def plot_course(
    curves: Mapping[int, Mapping[int, float]],
    trained_length: int,
    path: str | Path,
    *,
    title: str | None = None,
) -> Path:
    """Draw perplexity against length before a run, at each evaluation within it, and after.

    Args:
        curves: perplexity by length in tokens, by the step after which it was measured; 0 is before training.
        trained_length: the window the model was pretrained with, in tokens.
        path: where to; the suffix says how: .png, .svg or .pdf.
        title: heading.

    Raises:
        RopeExtendError: if there is nothing to draw, or no such format.
    """
    if not any(curves.values()):
        raise RopeExtendError("nothing to draw: no perplexity was measured")
    order = sorted(step for step, curve in curves.items() if curve)
    subtitle = "dashed: before training; thin: during it" if len(order) > 2 else ""
    picture = _Picture(path, title or "Perplexity before and after training", subtitle, room=16)
    axes = picture.axes
    ends = []
    for step in order:
        lengths, values = np.array(sorted(curves[step].items()), dtype=np.float64).T
        if step not in (order[0], order[-1]):
            axes.plot(lengths, values, color=PALETTE[0], alpha=0.3, linewidth=1)
            continue
        dashes = _DASHES["fine-tuned" if step else "untrained"][0]
        ends += _line(
            axes, lengths, values, f"step {step:,}" if step else "before", marker="o", markersize=5.5,
            color=PALETTE[0] if step else PLAIN, linestyle=dashes,
        )  # fmt: skip
    _perplexity_axis(axes)
    _length_axis(axes, sorted({length for curve in curves.values() for length in curve}), "length, tokens")
    _mark_window(axes, trained_length)
    _name_ends(axes, ends)
    return picture.save()


def plot_by_step(
    runs: Mapping[str, Mapping[int, float]],
    level: tuple[str, float],
    path: str | Path,
    *,
    title: str | None = None,
    subtitle: str = "",
) -> Path:
    """Draw the perplexity of several runs against the step, and a level that they are held against.

    Args:
        runs: perplexity by step, by name; the first is drawn in the foreground.
        level: what the horizontal line is, and where.
        path: where to; the suffix says how: .png, .svg or .pdf.
        title: heading.
        subtitle: the line below it.

    Raises:
        RopeExtendError: if there is nothing to draw, or no such format.
    """
    if not any(runs.values()):
        raise RopeExtendError("nothing to draw: no perplexity was measured")
    picture = _Picture(path, title or "Perplexity by step", subtitle, room=24)
    axes = picture.axes
    ends = []
    for colour, (name, course) in zip([*PALETTE, *[PLAIN] * len(runs)], runs.items(), strict=False):
        steps, values = np.array(sorted(course.items()), dtype=np.float64).T
        ends += _line(axes, steps, values, name, marker="o", markersize=4.5, color=colour)
    axes.axhline(level[1], color=PLAIN, linewidth=1, linestyle=":")
    axes.annotate(
        level[0], (0, level[1]), xytext=(4, -4), textcoords="offset points", va="top", color=QUIET, fontsize=9
    )
    _perplexity_axis(axes)
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _name_ends(axes, ends)
    return picture.save()


def plot_distances(positions: str | Path, path: str | Path, *, title: str | None = None) -> Path:
    """Draw how often a run with sampled positions saw each distance between a query and a key.

    Beside it, what as many blocks of consecutive positions see, which ends at the length of a block. Where
    the line has a gap, no pair was that far apart.

    Args:
        positions: ``positions.json`` of a run.
        path: where to; the suffix says how: .png, .svg or .pdf.
        title: heading.

    Raises:
        RopeExtendError: if there is no such file, or it is not one, or no such format.
    """
    positions = Path(positions)
    if not positions.is_file():
        raise RopeExtendError(
            f"no report on positions at {str(positions)!r}; a fine-tuning run that samples positions writes "
            "positions.json"
        )
    try:
        data = json.loads(positions.read_text(encoding="utf-8"))
        groups = [(g["from"], g["to"], g["pairs"] / (g["to"] - g["from"])) for g in data["distances"]]
        starts, stops, pairs = np.array(groups, dtype=np.float64).T
        block, sequences, trained = data["block_length"], data["sequences"], data["trained_length"]
        name, share = data["sampler"], 100 * data["seen_beyond"]
    except (ValueError, KeyError, TypeError) as error:
        raise RopeExtendError(f"{positions} is not a report on positions: {error!r}") from error
    subtitle = (
        f"{sequences:,} blocks of {format_length(block)}; of the distances beyond the trained window "
        f"{share:.3g} % were seen"
    )
    picture = _Picture(path, title or f"Distances seen in training: {name}", subtitle, room=16)
    axes = picture.axes
    pairs[pairs == 0] = np.nan
    middles = (starts + stops - 1) / 2
    axes.plot(middles, pairs, color=PALETTE[0], linewidth=1.8, zorder=3)
    distances = np.arange(block)
    axes.plot(distances, sequences * (block - distances), color=PLAIN, linestyle=(0, (4, 2)), linewidth=1.4)
    axes.set_yscale("log")
    axes.set_xlabel("distance between query and key, tokens", color=INK)
    axes.set_ylabel("pairs at each distance", color=INK)
    axes.set_xlim(0, stops[-1])
    ticks = [stops[-1] * part / 4 for part in range(5)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_length(round(value))))
    axes.yaxis.set_minor_locator(NullLocator())
    _mark_window(axes, trained)
    axes.annotate(
        "consecutive", (block, sequences), (4, 0), textcoords="offset points", color=PLAIN, fontsize=9
    )
    return picture.save()


def plot_frequencies(
    encodings: Iterable[RopeEncoding],
    shape: RopeShape,
    path: str | Path,
    *,
    seq_len: int | None = None,
    title: str | None = None,
) -> Path:
    """Draw each channel pair's wavelength under each method, and its frequency against plain RoPE's.

    A pair whose wavelength is longer than the trained window never made a full turn in training: positions
    beyond the window take it to angles that the model has not seen.

    Args:
        encodings: rotary schedules, one line each.
        shape: the model's rotary shape.
        path: where to; the suffix says how: .png, .svg or .pdf.
        seq_len: current length in tokens, for schedules that depend on it.
        title: heading.

    Raises:
        RopeExtendError: if there is nothing to draw, or no such format.
    """
    encodings = list(encodings)
    if not encodings:
        raise RopeExtendError("no encodings to draw")
    picture = _Picture(path, title or "What becomes of each frequency", panels=2)
    upper, lower = picture.panels
    plain = shape.inv_freq().numpy()
    ends: list[_End] = []
    colours = _colours(encoding.name for encoding in encodings)
    for rank, encoding in enumerate(encodings):
        frequencies = encoding.inv_freq(shape, seq_len).numpy()
        turning = np.where(frequencies > 0, frequencies, np.nan)  # a pair that stands still has no wavelength
        pairs = np.arange(len(frequencies), dtype=np.float64)
        # Where schedules agree, the earlier line shows as a border of the later one.
        style = {"color": colours[encoding.name][0], "linewidth": 1.5 + 0.6 * (len(encodings) - 1 - rank)}
        ends += _line(upper, pairs, 2 * np.pi / turning, str(encoding), **style)
        _line(lower, pairs, frequencies / plain, str(encoding), **style)
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
    _name_ends(upper, ends)
    return picture.save()


# --------------------------------------------------------------------------------------------- drawing


class _Picture:
    """A figure with a heading, and axes that keep to the background."""

    def __init__(
        self, path: str | Path, title: str, subtitle: str = "", *, panels: int = 1, room: float = 0
    ) -> None:
        """``room`` is what to leave free between axes and heading, in points."""
        self.path = Path(path)
        if self.path.suffix.lower() not in FORMATS:
            raise RopeExtendError(
                f"no picture format {self.path.suffix!r}: {str(path)!r} must end in {', '.join(FORMATS)}"
            )
        height = 4.8 if panels == 1 else 6.4
        self.figure = Figure(figsize=(8, height), layout="constrained", facecolor="white")
        FigureCanvasAgg(self.figure)
        grid = self.figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=[3, 2][:panels])
        self.panels: list[Axes] = list(grid[:, 0])
        self.axes = self.panels[0]
        for axes in self.panels:
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(QUIET)
            axes.tick_params(colors=INK, labelsize=9.5)
            axes.grid(axis="y", color=_GRID, linewidth=0.8)
            axes.set_axisbelow(True)
        pad = room + (26 if subtitle else 10)
        self.axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=pad)
        self.axes.annotate(
            subtitle, (0, 1), (0, room + 8), xycoords="axes fraction", textcoords="offset points",
            color=QUIET, fontsize=9.5,
        )  # fmt: skip

    def save(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.figure.savefig(self.path, dpi=200)
        return self.path


_DASHES = {
    "untrained": ((0, (4, 2)), "dashed"),
    "fine-tuned": ("-", "solid"),
    "context cropped": ((0, (1, 1.5)), "dotted"),
}

_End = tuple[float, float, str, Any]
"""Where a line ends, in data coordinates; its name; its colour."""


def _legend(rows: Sequence[EvaluationRow | RetrievalResult]) -> str:
    """What the dashes mean, where there is more than one kind."""
    kinds = {_kind(row) for row in rows}
    return " · ".join(
        f"{name}: {kind}" for kind, (_, name) in _DASHES.items() if kind in kinds and len(kinds) > 1
    )


def _kind(row: EvaluationRow | RetrievalResult) -> str:
    if row.result.cropped if isinstance(row, EvaluationRow) else row.crop is not None:
        return "context cropped"
    return "untrained" if row.adapter is None else "fine-tuned"


def _colours(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Give each method a colour and a marker, in order of appearance; plain RoPE is always grey."""
    others = [method for method in dict.fromkeys(methods) if method != "none"]
    looks = [(colour, _MARKERS[(i + n) % 6]) for n in range(6) for i, colour in enumerate(PALETTE)]
    return {"none": (PLAIN, "o"), **dict(zip(others, looks, strict=False))}


def _styled(rows: Sequence[_Row]) -> list[tuple[_Row, dict[str, Any]]]:
    if not rows:
        raise RopeExtendError("no rows to draw")
    # A colour for each method, as long as dashes tell its rows apart; else one for each row.
    looks = Counter((row.method, _kind(row)) for row in rows)
    names = [row.method if looks[row.method, _kind(row)] == 1 else row.label for row in rows]
    colours = _colours(names)
    styled = []
    for row, name in zip(rows, names, strict=True):
        colour, marker = colours[name]
        style = {"color": colour, "marker": marker, "linestyle": _DASHES[_kind(row)][0], "linewidth": 1.8}
        if row.adapter is None:
            style["markerfacecolor"] = "white"
        styled.append((row, style))
    return styled


def _line(axes: Axes, x: Floats, y: Floats, label: str, **style: Any) -> list[_End]:
    """Draw what is finite of a line; return its end, or nothing if nothing is finite."""
    finite = np.isfinite(y)
    if len(x) > 2 * _TICKS:  # markers would hide the line
        style["marker"] = ""
    axes.plot(x[finite], y[finite], label=label, clip_on=False, zorder=3, **style)
    return [(x[finite][-1], y[finite][-1], label, style["color"])] if finite.any() else []


def _name_ends(axes: Axes, ends: Sequence[_End]) -> None:
    """Write each line's name beside its end, moved apart where lines end close together."""
    if not ends:
        return
    axes.set_ylim(axes.get_ylim())  # as it is now: the places below are shares of it
    to_axes = axes.transData + axes.transAxes.inverted()
    shares = [float(to_axes.transform((x, y))[1]) for x, y, _, _ in ends]
    for (x, y, label, colour), share in zip(ends, _spread(shares, _TEXT_HEIGHT), strict=True):
        axes.annotate(
            label, (x, y), (1.035, share), textcoords="axes fraction", va="center", fontsize=9.5,
            color=tuple(0.75 * part for part in to_rgb(colour)),  # darker, as thin strokes look paler
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "alpha": 0.6, "shrinkB": 3,
                        "relpos": (0, 0.5)},
            annotation_clip=False,
        )  # fmt: skip


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """Move places in 0 … 1 apart to at least ``gap``, with the least squared movement, their order kept.

    With q_i = place_i − i · gap the condition is that q does not fall: isotonic regression, which pooling
    adjacent violators solves exactly.
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    pools: list[list[float]] = []
    for rank, i in enumerate(order):
        pools.append([places[i] - rank * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    flat = [float(np.mean(pool)) for pool in pools for _ in pool]
    highest = max(0.0, 1 - (len(places) - 1) * gap)
    spread = [0.0] * len(places)
    for rank, i in enumerate(order):
        spread[i] = min(max(flat[rank], 0.0), highest) + rank * gap
    return spread


def _perplexity_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1, 3)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.set_ylabel("perplexity (lower is better)", color=INK)


def _length_axis(axes: Axes, lengths: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(_apart(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_length(round(value))))
    axes.set_xlabel(label, color=INK)


def _apart(lengths: Sequence[int]) -> list[int]:
    """Those whose labels have room beside each other: powers of two first, of very many only these."""
    logs = {length: math.log2(length) for length in sorted(lengths, reverse=True)}
    room = (max(logs.values()) - min(logs.values())) / _TICKS
    powers = [length for length in logs if length & (length - 1) == 0]
    kept: list[int] = []
    for length in powers if len(lengths) > _TICKS and len(powers) > 2 else [*powers, *logs]:
        if all(abs(logs[other] - logs[length]) >= room for other in kept if other != length):
            kept.append(length)
    return sorted(set(kept))


def _mark_window(axes: Axes, trained_length: int) -> None:
    left, right = axes.get_xlim()
    axes.set_xlim(left, right)  # as it is now
    at, text = (float(trained_length), 1), f"trained window, {format_length(trained_length)}"
    if left <= trained_length <= right:
        axes.axvline(trained_length, color=QUIET, linewidth=1, zorder=1)
    else:
        text = f"{'beyond' if trained_length < left else 'within'} the {text}"
        at = (left, 1)
    axes.axvspan(max(left, trained_length), max(right, trained_length), color=_BEYOND, zorder=0, linewidth=0)
    axes.annotate(
        text, at, (0, 4), xycoords=axes.get_xaxis_transform(), textcoords="offset points", color=QUIET,
        fontsize=9,
    )  # fmt: skip


def _mean(losses: Floats) -> float:
    """Mean of what was scored."""
    scored = losses[~np.isnan(losses)]
    return float(scored.mean()) if scored.size else np.nan


def _in_groups(losses: Floats, first: int) -> tuple[Floats, Floats]:
    """Means over groups of positions from ``first`` on, four to a doubling, and each group's middle."""
    last = len(losses) + 1  # entry p is the loss of the target at position p + 1
    edges = first * 2 ** np.arange(0, np.log2(last / first) + 0.25, 0.25)
    groups = list(itertools.pairwise(np.unique(edges.round().astype(np.int64).clip(1, last)).tolist()))
    means = np.array([_mean(losses[start - 1 : stop - 1]) for start, stop in groups])
    return np.array([np.sqrt(start * (stop - 1)) for start, stop in groups]), means
