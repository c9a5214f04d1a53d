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
    return _drawing(encoding)(encoding, path)


def caption(name: str) -> str:
    """What the picture of a method's page shows, in one sentence."""
    return (_drawing(example(name)).__doc__ or "").strip()


def _drawing(encoding: Encoding) -> Callable[[Encoding, Path], Path]:
    """What draws an encoding: the picture of its most telling effect."""
    drawings: dict[type[Encoding], Callable[[Encoding, Path], Path]] = {
        RemapEncoding: _draw_remap, Shaw: _draw_ranges, BiasEncoding: _draw_bias,
        Learned: _draw_rows, AbsoluteEncoding: _draw_vectors, LinearAttention: _draw_features,
    }  # fmt: skip
    if (kind := shown_kind(encoding)) in drawings:
        return drawings[kind]
    if encoding.decay(ROTARY) is not None:
        return _draw_decay
    return _draw_logits if encoding.scales_logits(ROTARY) else _draw_schedule


def _draw_schedule(encoding: Encoding, path: Path) -> Path:
    """The tokens per turn of each channel pair, and its frequency divided by plain RoPE's."""
    assert isinstance(encoding, RopeEncoding)
    title = encoding.name if encoding.name == "longrope" else str(encoding)  # not its list of divisors
    figure, (left, right) = new_panels(title, columns=2, height=3.4)
    plain, pairs = ROTARY.inv_freq().numpy(), np.arange(ROTARY.dim // 2)
    left.plot(pairs, 2 * np.pi / plain, color=PLAIN, linewidth=1, linestyle=(0, (4, 2)), label="plain RoPE")
    lengths, dashes = [TARGET], ["-"]
    if encoding.depends_on_length:
        lengths, dashes = [ROTARY.trained_length << step for step in range(4)], [*_DASHES[::-1]]
    for rank, length in enumerate(lengths):
        table = encoding.inv_freq(ROTARY, length).numpy()
        label = f"{format_length(length)} tokens" if len(lengths) > 1 else encoding.name
        style: dict[str, Any] = {
            "color": method_colour(encoding.name),
            "linewidth": 1.8,
            "linestyle": dashes[rank],
        }
        waves = 2 * np.pi / np.where(table > 0, table, np.nan)
        left.plot(pairs, waves, label=label, **style)
        right.plot(pairs, table / plain, label=label, **style)
    _wavelength_axis(left)
    right.set_ylim(-0.03, 1.1)
    right.set_ylabel("frequency ÷ plain RoPE's", color=INK)
    for axes in (left, right):
        axes.set_xlabel("channel pair", color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    left.legend(frameon=False, fontsize=8.5, loc="upper left")
    return save(figure, path)


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


def _draw_logits(encoding: Encoding, path: Path) -> Path:
    """The factor on the logits of each query, by its position."""
    assert isinstance(encoding, RopeEncoding)
    figure, (axes,) = new_panels(str(encoding), height=3.2)
    positions = torch.arange(0, TARGET, 16)
    scale = encoding.logit_scale(ROTARY, positions)
    assert scale is not None
    axes.plot(positions.numpy(), scale.numpy(), color=method_colour(encoding.name), linewidth=2)
    _distance_axis(axes, "position of the query, tokens", "factor on its logits")
    return save(figure, path)


def _draw_decay(encoding: Encoding, path: Path) -> Path:
    """The factor on the product of a query and a key in some pairs, by distance."""
    assert isinstance(encoding, RopeEncoding)
    figure, (axes,) = new_panels(str(encoding), height=3.2)
    decay = encoding.decay(ROTARY)
    assert decay is not None
    distances = torch.arange(0, TARGET, 16)
    for rank, pair in enumerate((0, 16, 31)):
        axes.plot(
            distances.numpy(), torch.exp(distances * decay[pair]).numpy(), label=f"pair {pair}",
            color=method_colour(encoding.name), linewidth=1.8, linestyle=_DASHES[rank],
        )  # fmt: skip
    _distance_axis(axes, "distance from query to key, tokens", "factor on their product")
    axes.legend(frameon=False, fontsize=9)
    return save(figure, path)


def _draw_remap(encoding: Encoding, path: Path) -> Path:
    """The distance that the last token of a text is given to each earlier one."""
    assert isinstance(encoding, RemapEncoding)
    length = target_of(encoding.name)
    figure, (axes,) = new_panels(str(encoding), height=3.2)
    for pair, dash, label in ((0, "-", "fastest pair"), (-1, (0, (3, 1.5)), "slowest pair")):
        axes.plot(
            np.arange(0, length, 4), given_distances(encoding, length, pair)[::4], linewidth=1.8,
            color=method_colour(encoding.name), linestyle=dash, label=label,
        )  # fmt: skip
    axes.axhline(ROTARY.trained_length, color=QUIET, linewidth=1, linestyle=(0, (4, 2)))
    _distance_axis(axes, "true distance, tokens", "distance given, tokens")
    if encoding.name == "near_far":  # in all others, both are equal
        axes.legend(frameon=False, fontsize=9)
    return save(figure, path)


def _draw_bias(encoding: Encoding, path: Path) -> Path:
    """The bias of some heads by distance, with its initial parameters."""
    assert isinstance(encoding, BiasEncoding)
    figure, (axes,) = new_panels(f"{encoding}: bias of {len(HEADS)} of {MODEL.heads} heads", height=3.2)
    distance = torch.unique(torch.logspace(0, np.log10(TARGET - 1), 200).long())
    bias = encoding.bias(MODEL, distance, torch.full_like(distance, TARGET), encoding.initial(MODEL))
    for rank, head in enumerate(HEADS):
        axes.plot(
            distance.numpy(), bias[head - 1].numpy(), label=f"head {head}", linewidth=1.6,
            color=method_colour(encoding.name), linestyle=_DASHES[rank],
        )  # fmt: skip
    drawn = bias[[head - 1 for head in HEADS]]
    axes.set_ylim(max(float(drawn.min()), -24) - 0.5, float(drawn.max()) + 0.5)
    axes.set_xscale("log", base=2)
    _distance_axis(axes, "distance from query to key, tokens", "added to the logit")
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    return save(figure, path)


def _draw_ranges(encoding: Encoding, path: Path) -> Path:
    """Which vector each distance has."""
    assert isinstance(encoding, Shaw)
    figure, (axes,) = new_panels(f"{encoding}: the vector of each distance", height=3.2)
    distance = torch.arange(33)
    row = distance.clamp(max=encoding.reach)
    axes.step(distance.numpy(), row.numpy(), color=method_colour(encoding.name), linewidth=2, where="mid")
    axes.set_xlabel("distance from query to key, tokens", color=INK)
    axes.set_ylabel("row of the learned table", color=INK)
    return save(figure, path)


def _draw_vectors(encoding: Encoding, path: Path) -> Path:
    """The vectors of the first positions as a heat map."""
    assert isinstance(encoding, AbsoluteEncoding)
    figure, (axes,) = new_panels(str(encoding), height=3.6)
    values = encoding.vectors(MODEL, torch.arange(128), encoding.initial(MODEL)).numpy()
    image = axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_xlabel("channel", color=INK)
    axes.set_ylabel("position", color=INK)
    figure.colorbar(image, ax=axes, label="added to the embedding")
    return save(figure, path)


def _draw_rows(encoding: Encoding, path: Path) -> Path:
    """The row of the learned table that each position gets, under two rules."""
    figure, (axes,) = new_panels("learned: the row of each position", height=3.2)
    positions = torch.arange(0, TARGET, 32)
    for (beyond, rows), dash in zip(learned_rows(positions).items(), ("-", "--"), strict=True):
        colour = method_colour("learned")
        axes.plot(positions.numpy(), rows.numpy(), dash, color=colour, linewidth=1.6, label=beyond)
    _distance_axis(axes, "position, tokens", "row of the learned table")
    axes.legend(framealpha=1, edgecolor="white", fontsize=9, loc="upper center")
    return save(figure, path)


def _draw_features(encoding: Encoding, path: Path) -> Path:
    """The feature of a channel of a query or key, by its value."""
    assert isinstance(encoding, LinearAttention)
    figure, (axes,) = new_panels(f"{encoding}: the feature map", height=3.2)
    x = torch.linspace(-4, 4, 161)
    axes.plot(x.numpy(), encoding.features(x).numpy(), color=method_colour(encoding.name), linewidth=2)
    axes.set_xlabel("channel of a query or key", color=INK)
    axes.set_ylabel("feature", color=INK)
    return save(figure, path)


def _distance_axis(axes: Axes, across: str, up: str) -> None:
    """Name both axes, print tokens as `2k`, and mark the trained window."""
    axes.set_xlabel(across, color=INK)
    axes.set_ylabel(up, color=INK)
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


def new_panels(title: str, columns: int = 1, rows: int = 1, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    """A figure with a heading, 8 by `height` inches, and its axes row by row."""
    figure = Figure(figsize=(8, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(QUIET)
        panel.tick_params(colors=INK, labelsize=9)
    return figure, axes


def save(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of its suffix; returns the path."""
    write_figure(figure, path, path.suffix[1:])
    return path


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
