"""A picture of each method for its page: what it does to a typical small model, drawn from its own code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from rope_extend.encodings import (
    AbsoluteEncoding,
    BiasEncoding,
    Encoding,
    Learned,
    LinearAttention,
    ModelShape,
    RemapEncoding,
    RopeEncoding,
    RopeShape,
    Shaw,
    method_named,
)
from rope_extend.plots.style import INK, PLAIN, QUIET, method_colour, write_figure
from rope_extend.units import format_length

ROTARY = RopeShape(dim=64, theta=10_000.0, trained_length=2048)
MODEL = ModelShape(heads=8, hidden_size=64, trained_length=2048)
TARGET = 16_384
"""The extended window in the pictures, in tokens."""
SHOWN = {"short_original": "short_original(yarn)"}
"""Methods that do nothing alone, and what is shown instead."""
TARGETS = {"string": 3 * ROTARY.trained_length // 2}
"""Targets of methods that do not reach `TARGET`, in tokens."""
HEADS = (1, 3, 5, 7)
"""The heads of biases that are drawn, counted from 1."""
_DASHES = ("-", "--", "-.", ":")
_KINDS: tuple[type[Encoding], ...] = (
    RemapEncoding, Shaw, BiasEncoding, Learned, AbsoluteEncoding, LinearAttention, RopeEncoding,
)  # fmt: skip
"""The kinds of encodings by what a page shows of them; each comes before the kinds that it belongs to."""


def example(name: str) -> Encoding:
    """The encoding that the page of a method shows: with its defaults, at `target_of(name)`.

    LongRoPE has no default divisors; it gets ones that grow evenly from 1 to s.

    Raises:
        RopeExtendError: an unknown name.
    """
    parameters = {}
    if name == "longrope":
        parameters["long_factor"] = np.linspace(1, TARGET / ROTARY.trained_length, ROTARY.dim // 2).tolist()
    return method_named(SHOWN.get(name, name)).for_target(ROTARY, target_of(name), **parameters)


def shown_kind(encoding: Encoding) -> type[Encoding]:
    """The kind of an encoding by what its page shows, in pictures and in numbers."""
    return next(kind for kind in _KINDS if isinstance(encoding, kind))


def target_of(name: str) -> int:
    """The extended window that the page of a method shows, in tokens."""
    return TARGETS.get(name, TARGET)


def learned_rows(positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """The row of a learned table that each position `[n]` gets, float32 `[n]`, by the rule of `beyond`.

    Found by a table whose rows are their own numbers.
    """
    rows = ROTARY.trained_length
    counting = {"table": torch.arange(rows, dtype=torch.float32)[:, None]}
    return {
        beyond: Learned(rows=rows, beyond=beyond, length=length).vectors(MODEL, positions, counting)[:, 0]
        for beyond, length in (("interpolate", TARGET), ("tile", None))
    }


def draw_method(name: str, path: Path) -> Path:
    """Draw the picture of a method's page; the suffix gives the format: .png, .svg or .pdf.

    Raises:
        RopeExtendError: an unknown name.
    """
    encoding = example(name)
    draw = _drawing(encoding)
    title = encoding.name if name in ("longrope", "learned") else str(encoding)  # not a list of divisors
    title += {
        _draw_bias: f": bias of {len(HEADS)} of {MODEL.heads} heads", _draw_features: ": the feature map",
        _draw_ranges: ": the vector of each distance", _draw_rows: ": the row of each position",
    }.get(draw, "")  # fmt: skip
    height = {_draw_schedule: 3.4, _draw_vectors: 3.6}.get(draw, 3.2)
    figure = Figure(figsize=(8, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
    panels = list(figure.subplots(1, 2 if draw is _draw_schedule else 1, squeeze=False).flat)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(QUIET)
        panel.tick_params(colors=INK, labelsize=9)
    draw(encoding, *panels)
    write_figure(figure, path, path.suffix[1:])
    return path


def caption(name: str) -> str:
    """What the picture of a method's page shows, in one sentence."""
    return (_drawing(example(name)).__doc__ or "").strip()


def _drawing(encoding: Encoding) -> Callable[..., None]:
    """What draws an encoding: the picture of its most telling effect."""
    drawings: dict[type[Encoding], Callable[..., None]] = {
        RemapEncoding: _draw_remap, Shaw: _draw_ranges, BiasEncoding: _draw_bias,
        Learned: _draw_rows, AbsoluteEncoding: _draw_vectors, LinearAttention: _draw_features,
    }  # fmt: skip
    if (kind := shown_kind(encoding)) in drawings:
        return drawings[kind]
    if encoding.decay(ROTARY) is not None:
        return _draw_decay
    return _draw_logits if encoding.scales_logits(ROTARY) else _draw_schedule


def _line(axes: Axes, encoding: Encoding, x: Any, y: Any, **style: Any) -> None:
    """Draw a line in the colour of a method."""
    axes.plot(np.asarray(x), np.asarray(y), color=method_colour(encoding.name), **style)


def _draw_schedule(encoding: RopeEncoding, left: Axes, right: Axes) -> None:
    """The tokens per turn of each channel pair, and its frequency divided by plain RoPE's."""
    plain, pairs = ROTARY.inv_freq().numpy(), np.arange(ROTARY.dim // 2)
    left.plot(pairs, 2 * np.pi / plain, color=PLAIN, linewidth=1, linestyle=(0, (4, 2)), label="plain RoPE")
    lengths, dashes = [TARGET], ["-"]
    if encoding.depends_on_length:
        lengths, dashes = [ROTARY.trained_length << step for step in range(4)], [*_DASHES[::-1]]
    for length, dash in zip(lengths, dashes, strict=True):
        table = encoding.inv_freq(ROTARY, length).numpy()
        label = f"{format_length(length)} tokens" if len(lengths) > 1 else encoding.name
        waves = 2 * np.pi / np.where(table > 0, table, np.nan)
        for axes, values in ((left, waves), (right, table / plain)):
            _line(axes, encoding, pairs, values, label=label, linewidth=1.8, linestyle=dash)
    _wavelength_axis(left)
    right.set_ylim(-0.03, 1.1)
    right.set_ylabel("frequency ÷ plain RoPE's", color=INK)
    for axes in (left, right):
        axes.set_xlabel("channel pair", color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    left.legend(frameon=False, fontsize=8.5, loc="upper left")


def _wavelength_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("tokens per turn", color=INK)
    for length, window in ((ROTARY.trained_length, "trained"), (TARGET, "extended")):
        axes.axhline(length, color=QUIET, linewidth=0.8, zorder=1)
        axes.annotate(
            f"{window}, {format_length(length)}", (1, length), (0, 2), xycoords=axes.get_yaxis_transform(),
            textcoords="offset points", ha="right", color=QUIET, fontsize=8,
        )  # fmt: skip


def _draw_logits(encoding: RopeEncoding, axes: Axes) -> None:
    """The factor on the logits of each query, by its position."""
    positions = torch.arange(0, TARGET, 16)
    _line(axes, encoding, positions, encoding.logit_scale(ROTARY, positions), linewidth=2)
    _distance_axis(axes, "position of the query, tokens", "factor on its logits")


def _draw_decay(encoding: RopeEncoding, axes: Axes) -> None:
    """The factor on the product of a query and a key in some pairs, by distance."""
    decay, distances = encoding.decay(ROTARY), torch.arange(0, TARGET, 16)
    assert decay is not None
    for pair, dash in zip((0, 16, 31), _DASHES, strict=False):
        values = torch.exp(distances * decay[pair])
        _line(axes, encoding, distances, values, label=f"pair {pair}", linewidth=1.8, linestyle=dash)
    _distance_axis(axes, "distance from query to key, tokens", "factor on their product")
    axes.legend(frameon=False, fontsize=9)


def _draw_remap(encoding: RemapEncoding, axes: Axes) -> None:
    """The distance that the last token of a text is given to each earlier one."""
    length = target_of(encoding.name)
    for pair, dash, label in ((0, "-", "fastest pair"), (-1, (0, (3, 1.5)), "slowest pair")):
        given = given_distances(encoding, length, pair)[::4]
        _line(axes, encoding, np.arange(0, length, 4), given, linewidth=1.8, linestyle=dash, label=label)
    axes.axhline(ROTARY.trained_length, color=QUIET, linewidth=1, linestyle=(0, (4, 2)))
    _distance_axis(axes, "true distance, tokens", "distance given, tokens")
    if encoding.name == "near_far":  # in all others, both are equal
        axes.legend(frameon=False, fontsize=9)


def _draw_bias(encoding: BiasEncoding, axes: Axes) -> None:
    """The bias of some heads by distance, with its initial parameters."""
    distance = torch.unique(torch.logspace(0, np.log10(TARGET - 1), 200).long())
    bias = encoding.bias(MODEL, distance, torch.full_like(distance, TARGET), encoding.initial(MODEL))
    for head, dash in zip(HEADS, _DASHES, strict=True):
        _line(axes, encoding, distance, bias[head - 1], label=f"head {head}", linewidth=1.6, linestyle=dash)
    drawn = bias[[head - 1 for head in HEADS]]
    axes.set_ylim(max(float(drawn.min()), -24) - 0.5, float(drawn.max()) + 0.5)
    axes.set_xscale("log", base=2)
    _distance_axis(axes, "distance from query to key, tokens", "added to the logit")
    axes.legend(frameon=False, fontsize=9, loc="lower left")


def _draw_ranges(encoding: Shaw, axes: Axes) -> None:
    """Which vector each distance has."""
    distance = torch.arange(33)
    _line(axes, encoding, distance, distance.clamp(max=encoding.reach), linewidth=2, drawstyle="steps-mid")
    _name_axes(axes, "distance from query to key, tokens", "row of the learned table")


def _draw_vectors(encoding: AbsoluteEncoding, axes: Axes) -> None:
    """The vectors of the first positions as a heat map."""
    values = encoding.vectors(MODEL, torch.arange(128), encoding.initial(MODEL)).numpy()
    image = axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    _name_axes(axes, "channel", "position")
    axes.figure.colorbar(image, ax=axes, label="added to the embedding")


def _draw_rows(encoding: Learned, axes: Axes) -> None:
    """The row of the learned table that each position gets, under two rules."""
    positions = torch.arange(0, TARGET, 32)
    for (beyond, rows), dash in zip(learned_rows(positions).items(), ("-", "--"), strict=True):
        _line(axes, encoding, positions, rows, linestyle=dash, linewidth=1.6, label=beyond)
    _distance_axis(axes, "position, tokens", "row of the learned table")
    axes.legend(framealpha=1, edgecolor="white", fontsize=9, loc="upper center")


def _draw_features(encoding: LinearAttention, axes: Axes) -> None:
    """The feature of a channel of a query or key, by its value."""
    x = torch.linspace(-4, 4, 161)
    _line(axes, encoding, x, encoding.features(x), linewidth=2)
    _name_axes(axes, "channel of a query or key", "feature")


def _name_axes(axes: Axes, across: str, up: str) -> None:
    axes.set_xlabel(across, color=INK)
    axes.set_ylabel(up, color=INK)


def _distance_axis(axes: Axes, across: str, up: str) -> None:
    """Name both axes, print tokens as `2k`, and mark the trained window."""
    _name_axes(axes, across, up)
    if axes.get_xscale() == "linear":
        axes.set_xticks([step * TARGET // 8 for step in range(9)])
        axes.set_xlim(left=0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_length(round(value))))
    axes.axvline(ROTARY.trained_length, color=QUIET, linewidth=1, zorder=1)
    axes.annotate(
        "trained window", (ROTARY.trained_length, 1), (3, 2), xycoords=axes.get_xaxis_transform(),
        textcoords="offset points", color=QUIET, fontsize=8,
    )  # fmt: skip


def linked(paper: str) -> str:
    """A source as a link in Markdown, if it is an arXiv id."""
    number = paper.replace(".", "")
    return f"[arXiv {paper}](https://arxiv.org/abs/{paper})" if number.isdigit() else paper


def given_distances(method: RemapEncoding, length: int, pair: int) -> np.ndarray[Any, Any]:
    """The distance that a channel pair is rotated by, in its plain frequency, for each true distance."""
    query, keys = torch.tensor(length - 1), torch.arange(length)
    given = method.distance(ROTARY, query, keys)
    region = method.borders.region(query, keys)
    table_length = int(method.table_length(ROTARY, torch.tensor([length]))[0])
    for index, each in enumerate(method.regions(ROTARY, table_length)):
        if each.schedule is not None:
            slower = each.schedule.inv_freq(ROTARY, table_length)[pair] / ROTARY.inv_freq()[pair]
            given = torch.where(region == index, given * slower, given)
    return given.flip(0).numpy()
