"""The gallery: a picture of each kind of position encoding, drawn from its own code.

It needs no model and no results. Every picture follows from an encoding and the shape of a typical small
model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from torch import Tensor

from rope_extend.encodings import (
    AbsoluteEncoding,
    BiasEncoding,
    ModelShape,
    RemapEncoding,
    RopeEncoding,
    RopeShape,
    encoding,
    encoding_class,
    rotary_method,
)
from rope_extend.errors import RopeExtendError
from rope_extend.plots.frequencies import plot_frequencies
from rope_extend.plots.style import INK, PALETTE, QUIET, method_colour, write_figure
from rope_extend.units import format_length

ROTARY = RopeShape(dim=64, theta=10_000.0, trained_length=2048)
MODEL = ModelShape(heads=8, hidden_size=64, trained_length=2048)
TARGET = 16_384
"""The extended window in the pictures, in tokens."""
SUFFIXES = (".png", ".svg")
"""Each picture is written in both formats; pages show the second, which is sharp at every size."""
_DPI = 110


@dataclass(frozen=True)
class Exhibit:
    """One picture.

    Attributes:
        name: the name of its files, without a suffix.
        title: the heading.
        text: two to four sentences for readers who are new to the subject.
        methods: the encodings that it shows; the page links their papers.
        draw: draws it into a file.
    """

    name: str
    title: str
    text: str
    methods: tuple[str, ...]
    draw: Callable[[Path], Path]

    @property
    def papers(self) -> list[str]:
        """The papers of its encodings, each once."""
        return list(dict.fromkeys(encoding_class(name).paper for name in self.methods))


def draw_gallery(directory: str | Path, *, overwrite: bool = False) -> list[Path]:
    """Draw every picture into a directory, which is created if missing; returns the files.

    Raises:
        RopeExtendError: a file exists and `overwrite` is false, or it cannot be written.
    """
    directory = Path(directory)
    files = {directory / f"{exhibit.name}{suffix}": exhibit for exhibit in EXHIBITS for suffix in SUFFIXES}
    for path in files:
        if path.exists() and not overwrite:
            raise RopeExtendError(f"{path} exists; choose another directory, or overwrite=True")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [exhibit.draw(path) for path, exhibit in files.items()]
    except OSError as error:
        raise RopeExtendError(f"cannot write into {directory}: {error}") from error


def page(pictures: str) -> str:
    """The gallery in Markdown; `pictures` is the directory of the files, relative to the page."""
    parts = [
        "# Position encodings in pictures",
        "<!-- written by tools/draw_gallery.py -->",
        "Attention alone does not know the order of the tokens. A position encoding adds it. Each picture is "
        f"drawn from the code that patches a model. Heads have {ROTARY.dim} channels, the RoPE base is "
        f"{ROTARY.theta:,.0f}, the trained window is {ROTARY.trained_length:,} tokens and the extended "
        f"window {TARGET:,}. `rope-extend plot encodings --output DIR` draws the pictures.",
    ]
    for exhibit in EXHIBITS:
        names = ", ".join(f"[`{name}`](methods/{name}.md)" for name in exhibit.methods)
        links = ", ".join(linked(paper) for paper in exhibit.papers)
        parts += [
            f"## {exhibit.title}",
            f"![{exhibit.title}]({pictures}/{exhibit.name}{SUFFIXES[-1]})",
            exhibit.text,
            f"Methods: {names}. Sources: {links}.",
        ]
    return "\n\n".join(parts) + "\n"


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
    write_figure(figure, path, path.suffix[1:], _DPI)
    return path


def _bias(bias: BiasEncoding, distance: Tensor, query: Tensor) -> np.ndarray:
    return bias.bias(MODEL, distance, query, bias.initial(MODEL)).numpy()


def _bias_encoding(name: str) -> BiasEncoding:
    bias = encoding(name)
    assert isinstance(bias, BiasEncoding)
    return bias


def draw_vectors(path: Path, positions: int = 128) -> Path:
    """Sinusoidal vectors as a heat map, positions down and channels across."""
    sinusoidal = encoding("sinusoidal")
    assert isinstance(sinusoidal, AbsoluteEncoding)
    figure, (axes,) = new_panels("Sinusoidal vectors", height=4.6)
    values = sinusoidal.vectors(MODEL, torch.arange(positions), {}).numpy()
    image = axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_xlabel("channel", color=INK)
    axes.set_ylabel("position", color=INK)
    figure.colorbar(image, ax=axes, label="added to the embedding")
    return save(figure, path)


def draw_clocks(path: Path, pairs: Sequence[int] = (0, 8, 16, 24), positions: int = 9) -> Path:
    """Rotary channel pairs as clocks: one row per pair, one dial per position."""
    figure, (axes,) = new_panels("RoPE's clocks", height=4.2)
    table = rotary_method("none").for_target(ROTARY, TARGET).inv_freq(ROTARY)
    circle = np.linspace(0, 2 * np.pi, 60)
    for row, pair in enumerate(pairs):
        for position in range(positions):
            angle = float(position * table[pair])
            axes.plot(
                position + 0.4 * np.cos(circle), -row + 0.4 * np.sin(circle), color=QUIET, linewidth=0.8
            )
            axes.plot(
                [position, position + 0.38 * np.cos(angle)], [-row, -row + 0.38 * np.sin(angle)],
                color=PALETTE[row % len(PALETTE)], linewidth=2.2,
            )  # fmt: skip
    waves = [2 * np.pi / float(table[pair]) for pair in pairs]
    axes.set_yticks(
        [-row for row in range(len(pairs))],
        [f"pair {pair}: a turn in\n{wave:,.0f} tokens" for pair, wave in zip(pairs, waves, strict=True)],
    )
    axes.set_xticks(range(positions))
    axes.set_xlabel("position", color=INK)
    axes.set_aspect("equal")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return save(figure, path)


def _schedules(names: Sequence[str]) -> list[RopeEncoding]:
    return [rotary_method(name).for_target(ROTARY, TARGET) for name in names]


def draw_spectra(path: Path, names: Sequence[str] = ("none", "linear", "ntk", "yarn", "llama3")) -> Path:
    """The frequencies of each schedule as a row of strokes, and the frequency of one turn in each window."""
    figure, (axes,) = new_panels("Frequencies before and after an extension", height=3.6)
    for row, schedule in enumerate(_schedules(names)):
        table = schedule.inv_freq(ROTARY).numpy()
        axes.vlines(table, -row - 0.35, -row + 0.35, color=method_colour(schedule.name), linewidth=1.6)
    axes.set_yticks([-row for row in range(len(names))], [str(schedule) for schedule in _schedules(names)])
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("radians per token", color=INK)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    windows = ((ROTARY.trained_length, "the trained window", "left"), (TARGET, "the extended one", "right"))
    for length, window, side in windows:  # one text on each side of the two lines, which are near
        axes.axvline(2 * np.pi / length, color=QUIET, linewidth=1, linestyle=(0, (4, 2)))
        axes.annotate(
            f"one turn in\n{window}, {format_length(length)}", (2 * np.pi / length, 1),
            (3 if side == "left" else -3, -2), xycoords=axes.get_xaxis_transform(),
            textcoords="offset points", color=QUIET, fontsize=8, va="bottom", ha=side,
        )  # fmt: skip
    return save(figure, path)


def draw_matrices(path: Path, name: str, title: str, tokens: int = 96) -> Path:
    """The bias of four heads as matrices, queries down and keys across; later keys are white."""
    bias = _bias_encoding(name)
    heads = [0, 2, 4, 6]
    figure, panels = new_panels(title, columns=len(heads), height=2.9)
    query = torch.arange(tokens)[:, None]
    distance = query - torch.arange(tokens)
    values = np.where(distance.numpy() < 0, np.nan, _bias(bias, distance.clamp(min=0), query))
    lowest = float(np.nanmin(values[heads]))
    for axes, head in zip(panels, heads, strict=True):
        image = axes.imshow(np.ma.masked_invalid(values[head]), cmap="cividis", vmin=lowest, vmax=0)
        axes.set_title(f"head {head + 1} of {MODEL.heads}", fontsize=9.5, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        axes.set_xlabel("key", color=INK)
    panels[0].set_ylabel("query", color=INK)
    figure.colorbar(image, ax=panels, shrink=0.8, label="added to the logit")
    return save(figure, path)


def draw_biases(
    path: Path, names: Sequence[str] = ("alibi", "t5_bias", "kerple", "fire", "sandwich"), head: int = 3
) -> Path:
    """The bias of one head by distance, with each encoding's initial parameters."""
    figure, (axes,) = new_panels(f"Biases by distance, head {head + 1} of {MODEL.heads}", height=4.2)
    distance = torch.unique(torch.logspace(0, np.log10(TARGET), 300).long())
    query = torch.full_like(distance, TARGET)
    for name in names:
        values = _bias(_bias_encoding(name), distance, query)[head]
        values = values - values[0]  # only differences change a softmax
        axes.plot(distance.numpy(), values, color=method_colour(name), linewidth=1.8, label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(-12, 2)
    axes.axvline(ROTARY.trained_length, color=QUIET, linewidth=1)
    axes.annotate(
        f"trained window, {format_length(ROTARY.trained_length)}", (ROTARY.trained_length, 1), (-4, -10),
        xycoords=axes.get_xaxis_transform(), textcoords="offset points", color=QUIET, fontsize=9, ha="right",
    )  # fmt: skip
    axes.set_xlabel("distance from query to key, tokens", color=INK)
    axes.set_ylabel("bias, relative to the nearest key", color=INK)
    axes.legend(frameon=False, fontsize=9.5)
    return save(figure, path)


def draw_decay(path: Path) -> Path:
    """The similarity of an equal query and key by distance, after rotation, and the weight left by biases."""
    figure, (upper, lower) = new_panels("Attention by distance", rows=2, height=5.6)
    near = torch.arange(0, 512)
    for schedule in _schedules(("none", "linear", "yarn", "nope")):
        colour = method_colour(schedule.name)
        similarity = torch.cos(near[:, None] * schedule.inv_freq(ROTARY)).mean(dim=1).numpy()
        upper.plot(near.numpy(), similarity, color=colour, linewidth=1.8, label=str(schedule))
    upper.set_ylabel("mean cosine over pairs", color=INK)
    upper.legend(frameon=False, fontsize=9, ncols=4, loc="upper right")
    for name in ("alibi", "kerple", "t5_bias"):
        colour = method_colour(name)
        values = _bias(_bias_encoding(name), near, near)
        for head, dash in ((1, "-"), (5, (0, (4, 2)))):
            label = f"{name}, head {head + 1}"
            lower.plot(
                near.numpy(), np.exp(values[head]), color=colour, linewidth=1.8, linestyle=dash, label=label
            )
    lower.set_ylabel("weight, relative to distance 0", color=INK)
    lower.set_xlabel("distance from query to key, tokens", color=INK)
    lower.legend(frameon=False, fontsize=9, ncols=3)
    return save(figure, path)


def _frequencies(names: Sequence[str], title: str) -> Callable[[Path], Path]:
    def draw(path: Path) -> Path:
        return plot_frequencies(_schedules(names), ROTARY, path, seq_len=TARGET, title=title)

    return draw


_REMAPS = ("self_extend", "rerope", "jet_long", "near_far", "dual_chunk", "string", "sinks")


def draw_distances(path: Path, names: Sequence[str] = _REMAPS) -> Path:
    """The distance that each method gives to the last token of a text and all tokens before it.

    A method with other frequencies for distant tokens gives each channel pair a distance of its own: the
    fastest and the slowest are drawn. `rerope` is drawn with a leak as well.
    """
    figure, panels = new_panels("Distances given to distant tokens", columns=4, rows=2, height=4.8)
    drawn: list[tuple[str, dict[str, float]]] = [(name, {}) for name in names]
    drawn.insert(2, ("rerope", {"leak": 16.0}))
    for axes, (name, parameters) in zip(panels, drawn, strict=False):
        length = 3 * ROTARY.trained_length // 2 if name == "string" else TARGET  # its reach is shorter
        method = rotary_method(name).for_target(ROTARY, length, **parameters)
        assert isinstance(method, RemapEncoding)
        for pair, dash in ((0, "-"), (-1, (0, (3, 1.5)))):
            given = given_distances(method, length, pair)
            axes.plot(given, color=method_colour(name), linewidth=1.8, linestyle=dash)
        axes.axhline(ROTARY.trained_length, color=QUIET, linewidth=1, linestyle=(0, (4, 2)))
        axes.set_ylim(0, 1.15 * ROTARY.trained_length)
        title = ", ".join([name, *(f"{key} {value:g}" for key, value in parameters.items())])
        axes.set_title(title, fontsize=9.5, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    for axes in panels[::4]:
        axes.set_ylabel("distance given", color=INK)
    for axes in panels[4:]:
        axes.set_xlabel("true distance, tokens", color=INK)
    return save(figure, path)


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


_SLOWED = ("none", "linear", "ntk", "ntk_by_parts", "ntk_mixed", "yarn", "llama3")
_CUT = ("none", "p_rope", "clipped", "power", "truncated", "resonance")

EXHIBITS = (
    Exhibit(
        "sinusoidal", "Sinusoidal vectors",
        "Every position has its own pattern, one row of this picture, which is added to the token at that "
        "position. Channels on the left change quickly from token to token. Channels on the right change so "
        "slowly that they distinguish the beginning of a text from its end.",
        ("sinusoidal",), draw_vectors,
    ),
    Exhibit(
        "clocks", "RoPE's clocks",
        "Rotary encoding rotates pairs of channels like the hands of clocks, each pair at its own speed. "
        "Queries and keys are compared after rotation. Only the angle between them matters, and it depends "
        "on their distance.",
        ("none",), draw_clocks,
    ),
    Exhibit(
        "wavelengths-slowed", "Wavelengths: schedules that slow the clocks down",
        "A clock that never completed a turn in training shows new angles when the text gets longer. These "
        "schedules slow such clocks down. They differ in how many of the fast clocks they leave unchanged; "
        "those distinguish neighbouring tokens.",
        _SLOWED, _frequencies(_SLOWED, "Wavelengths: slowed down"),
    ),
    Exhibit(
        "wavelengths-cut", "Wavelengths: schedules that stop or round some clocks",
        "These schedules do not slow the slow clocks down. They stop them, fade them out, or round every "
        "clock to whole tokens. A stopped clock carries no information about position, but no wrong "
        "information either.",
        _CUT, _frequencies(_CUT, "Wavelengths: stopped, faded or rounded"),
    ),
    Exhibit(
        "spectra", "Frequencies before and after an extension",
        "Each stroke is one clock; fast ones are on the right. Clocks to the left of a dashed line complete "
        "less than one turn in that window. An extension moves strokes to the left: all of them equally, or "
        "only the slow ones.",
        ("none", "linear", "ntk", "yarn", "llama3"), draw_spectra,
    ),
    Exhibit(
        "distances", "Distances given to distant tokens",
        "These methods need no training: near tokens keep their distance, and distant ones are given one "
        "that occurred in training, below the dashed line. The pictures show the last token of a text and "
        "all tokens before it. Attention sinks drop the tokens in the gap. `near_far` gives distant tokens "
        "other frequencies, with which the slowest channel pair (dashed) reaches no unseen distance.",
        _REMAPS, draw_distances,
    ),
    Exhibit(
        "alibi", "ALiBi's bias",
        "ALiBi does not rotate. It subtracts from the logit of a key in proportion to the key's distance. "
        "Some heads only see their neighbourhood, others see the whole text.",
        ("alibi",), lambda path: draw_matrices(path, "alibi", "ALiBi's bias"),
    ),
    Exhibit(
        "t5_bias", "T5's bias",
        "Distances are sorted into ranges, narrow for neighbours and wider further out. Each head learns one "
        "number per range. All keys beyond the last range have the same bias, so a longer text adds nothing "
        "new. The picture shows the initial numbers.",
        ("t5_bias",), lambda path: draw_matrices(path, "t5_bias", "T5's bias, as it starts", tokens=192),
    ),
    Exhibit(
        "biases", "Biases by distance",
        "Five shapes of the same idea: a straight line, steps, a logarithm, a small learned network, and a "
        "sum of cosines. The straight line is bent here, because the axis of distances is logarithmic. "
        "Learned biases are shown with their initial parameters.",
        ("alibi", "t5_bias", "kerple", "fire", "sandwich"), draw_biases,
    ),
    Exhibit(
        "decay", "Attention by distance",
        "The upper panel shows the similarity of an equal query and key after rotation. With RoPE it falls "
        "with distance, in waves; slower clocks stretch the waves. The lower panel shows the weight that a "
        "bias leaves to a key at each distance, in a strict head and in a lenient one.",
        ("none", "linear", "yarn", "nope", "alibi", "kerple", "t5_bias"), draw_decay,
    ),
)  # fmt: skip
"""The pictures, in the order of the page."""
