"""The gallery: a picture of what each kind of position encoding does, drawn from its own code.

No model and no results: every picture follows from an encoding and the numbers of a typical small model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from torch import Tensor

from rope_extend.data import format_length
from rope_extend.encodings import (
    AbsoluteEncoding,
    BiasEncoding,
    ModelShape,
    RopeEncoding,
    RopeShape,
    encoding,
    encoding_class,
    rotary_method,
)
from rope_extend.errors import RopeExtendError
from rope_extend.plots import INK, PALETTE, PLAIN, QUIET, plot_frequencies

ROTARY = RopeShape(dim=64, theta=10_000.0, trained_length=2048)
MODEL = ModelShape(heads=8, hidden_size=64, trained_length=2048)
TARGET = 16_384
"""The window that schedules are drawn for, in tokens."""
SUFFIX = ".png"
_DPI = 110


@dataclass(frozen=True)
class Exhibit:
    """One picture.

    Attributes:
        name: of its file, without a suffix.
        title: heading.
        text: two sentences for somebody who sees such a thing for the first time.
        methods: the encodings that it shows, whose papers are named with it.
        draw: draws it into a file.
    """

    name: str
    title: str
    text: str
    methods: tuple[str, ...]
    draw: Callable[[Path], Path]

    @property
    def papers(self) -> list[str]:
        """Where the encodings come from, each source once."""
        return list(dict.fromkeys(encoding_class(name).paper for name in self.methods))


def draw_gallery(directory: str | Path, *, overwrite: bool = False) -> list[Path]:
    """Draw every picture into a directory, which is made if missing; returns the files.

    Raises:
        RopeExtendError: one of the files exists and is not to be replaced, or cannot be written.
    """
    directory = Path(directory)
    files = [directory / f"{exhibit.name}{SUFFIX}" for exhibit in EXHIBITS]
    for path in files:
        if path.exists() and not overwrite:
            raise RopeExtendError(f"{path} exists; choose another directory, or overwrite it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [exhibit.draw(path) for exhibit, path in zip(EXHIBITS, files, strict=True)]
    except OSError as error:
        raise RopeExtendError(f"cannot write into {directory}: {error}") from error


def page(pictures: str) -> str:
    """The gallery in Markdown; `pictures` is where the files lie, seen from the page."""
    parts = [
        "# What position encodings do",
        "<!-- written by scripts/gallery.py -->",
        "Attention by itself does not know in which order tokens come. A position encoding tells it. Each "
        "picture here is drawn from the code that patches a model, for heads of "
        f"{ROTARY.dim} channels, a base of {ROTARY.theta:,.0f}, a trained window of "
        f"{ROTARY.trained_length:,} tokens and, where something is extended, a new one of {TARGET:,}; "
        "`rope-extend plot encodings --output DIR` draws them.",
    ]
    for exhibit in EXHIBITS:
        names = ", ".join(f"`{name}`" for name in exhibit.methods)
        links = ", ".join(_linked(paper) for paper in exhibit.papers)
        parts += [
            f"## {exhibit.title}",
            f"![{exhibit.title}]({pictures}/{exhibit.name}{SUFFIX})",
            exhibit.text,
            f"Methods: {names}. Sources: {links}.",
        ]
    return "\n\n".join(parts) + "\n"


def _linked(paper: str) -> str:
    number = paper.replace(".", "")
    return f"[arXiv {paper}](https://arxiv.org/abs/{paper})" if number.isdigit() else paper


# ---------------------------------------------------------------------------------------------------------
# Pictures


def _figure(title: str, columns: int = 1, rows: int = 1, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(8, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color(QUIET)
        one.tick_params(colors=INK, labelsize=9)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=_DPI)
    return path


def _bias(made: BiasEncoding, distance: Tensor, query: Tensor) -> np.ndarray:
    return made.bias(MODEL, distance, query, made.initial(MODEL)).numpy()


def _bias_encoding(name: str) -> BiasEncoding:
    made = encoding(name)
    assert isinstance(made, BiasEncoding)
    return made


def draw_vectors(path: Path, positions: int = 128) -> Path:
    """Sinusoidal vectors as a heat map, positions down and channels across."""
    made = encoding("sinusoidal")
    assert isinstance(made, AbsoluteEncoding)
    figure, (axes,) = _figure("Sinusoidal vectors", height=4.6)
    values = made.vectors(MODEL, torch.arange(positions), {}).numpy()
    image = axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_xlabel("channel", color=INK)
    axes.set_ylabel("position", color=INK)
    figure.colorbar(image, ax=axes, label="what is added to the embedding")
    return _save(figure, path)


def draw_clocks(path: Path, pairs: Sequence[int] = (0, 8, 16, 24), positions: int = 9) -> Path:
    """Rotary channel pairs as clocks: a row for each pair, a dial for each position."""
    figure, (axes,) = _figure("RoPE's clocks", height=4.2)
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
    return _save(figure, path)


def _schedules(names: Sequence[str]) -> list[RopeEncoding]:
    return [rotary_method(name).for_target(ROTARY, TARGET) for name in names]


def draw_spectra(path: Path, names: Sequence[str] = ("none", "linear", "ntk", "yarn", "llama3")) -> Path:
    """The frequencies of each schedule as a row of strokes, and the one that turns once in the window."""
    figure, (axes,) = _figure("Frequencies before and after an extension", height=3.6)
    for row, made in enumerate(_schedules(names)):
        table = made.inv_freq(ROTARY).numpy()
        colour = PLAIN if row == 0 else PALETTE[(row - 1) % len(PALETTE)]
        axes.vlines(table, -row - 0.35, -row + 0.35, color=colour, linewidth=1.6)
    axes.set_yticks([-row for row in range(len(names))], [str(made) for made in _schedules(names)])
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("radians per token", color=INK)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    for length, what in ((ROTARY.trained_length, "the trained window"), (TARGET, "the new one")):
        axes.axvline(2 * np.pi / length, color=QUIET, linewidth=1, linestyle=(0, (4, 2)))
        axes.annotate(
            f"one turn in\n{what}, {format_length(length)}", (2 * np.pi / length, 1), (3, -2),
            xycoords=axes.get_xaxis_transform(), textcoords="offset points", color=QUIET, fontsize=8,
            va="bottom",
        )  # fmt: skip
    return _save(figure, path)


def draw_matrices(path: Path, name: str, title: str, tokens: int = 96) -> Path:
    """The bias of four heads as matrices, queries down and keys across, later keys left white."""
    made = _bias_encoding(name)
    heads = [0, 2, 4, 6]
    figure, panels = _figure(title, columns=len(heads), height=2.9)
    query = torch.arange(tokens)[:, None]
    distance = query - torch.arange(tokens)
    values = np.where(distance.numpy() < 0, np.nan, _bias(made, distance.clamp(min=0), query))
    lowest = float(np.nanmin(values[heads]))
    for axes, head in zip(panels, heads, strict=True):
        image = axes.imshow(np.ma.masked_invalid(values[head]), cmap="cividis", vmin=lowest, vmax=0)
        axes.set_title(f"head {head + 1} of {MODEL.heads}", fontsize=9.5, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        axes.set_xlabel("key", color=INK)
    panels[0].set_ylabel("query", color=INK)
    figure.colorbar(image, ax=panels, shrink=0.8, label="added to the logit")
    return _save(figure, path)


def draw_biases(
    path: Path, names: Sequence[str] = ("alibi", "t5_bias", "kerple", "fire", "sandwich"), head: int = 3
) -> Path:
    """The bias of one head by distance, as each encoding starts."""
    figure, (axes,) = _figure(f"Biases by distance, head {head + 1} of {MODEL.heads}", height=4.2)
    distance = torch.unique(torch.logspace(0, np.log10(TARGET), 300).long())
    query = torch.full_like(distance, TARGET)
    for name, colour in zip(names, PALETTE, strict=False):
        values = _bias(_bias_encoding(name), distance, query)[head]
        values = values - values[0]  # a softmax feels differences alone
        axes.plot(distance.numpy(), values, color=colour, linewidth=1.8, label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(-12, 2)
    axes.axvline(ROTARY.trained_length, color=QUIET, linewidth=1)
    axes.annotate(
        f"trained window, {format_length(ROTARY.trained_length)}", (ROTARY.trained_length, 1), (-4, -10),
        xycoords=axes.get_xaxis_transform(), textcoords="offset points", color=QUIET, fontsize=9, ha="right",
    )  # fmt: skip
    axes.set_xlabel("distance from query to key, tokens", color=INK)
    axes.set_ylabel("bias, against that of the nearest key", color=INK)
    axes.legend(frameon=False, fontsize=9.5)
    return _save(figure, path)


def draw_decay(path: Path) -> Path:
    """How much a query and a key that are alike have in common by distance: rotated, and biased."""
    figure, (upper, lower) = _figure("What distance does to attention", rows=2, height=5.6)
    near = torch.arange(0, 512)
    for made, colour in zip(_schedules(("none", "linear", "yarn", "nope")), (PLAIN, *PALETTE), strict=False):
        shared = torch.cos(near[:, None] * made.inv_freq(ROTARY)).mean(dim=1).numpy()
        upper.plot(near.numpy(), shared, color=colour, linewidth=1.8, label=str(made))
    upper.set_ylabel("mean cosine over pairs", color=INK)
    upper.legend(frameon=False, fontsize=9, ncols=4, loc="upper right")
    for name, colour in zip(("alibi", "kerple", "t5_bias"), PALETTE, strict=False):
        values = _bias(_bias_encoding(name), near, near)
        for head, dash in ((1, "-"), (5, (0, (4, 2)))):
            label = f"{name}, head {head + 1}"
            lower.plot(
                near.numpy(), np.exp(values[head]), color=colour, linewidth=1.8, linestyle=dash, label=label
            )
    lower.set_ylabel("weight, against distance 0", color=INK)
    lower.set_xlabel("distance from query to key, tokens", color=INK)
    lower.legend(frameon=False, fontsize=9, ncols=3)
    return _save(figure, path)


def _frequencies(names: Sequence[str], title: str) -> Callable[[Path], Path]:
    def draw(path: Path) -> Path:
        return plot_frequencies(_schedules(names), ROTARY, path, seq_len=TARGET, title=title)

    return draw


_SLOWED = ("none", "linear", "ntk", "ntk_by_parts", "ntk_mixed", "yarn", "llama3")
_CUT = ("none", "p_rope", "clipped", "power", "truncated", "resonance")

EXHIBITS = (
    Exhibit(
        "sinusoidal", "Sinusoidal vectors",
        "Every position gets a pattern of its own, a row of this picture, which is added to the token "
        "that stands there. Channels on the left change from token to token like a second hand, those on "
        "the right so slowly that they tell the beginning of a text from its end.",
        ("sinusoidal",), draw_vectors,
    ),
    Exhibit(
        "clocks", "RoPE's clocks",
        "Rotary encoding turns pairs of channels like the hands of clocks, each pair at its own speed. A "
        "query and a key are compared after both have turned, so that only the angle between them counts,"
        " which is how far apart they are.",
        ("none",), draw_clocks,
    ),
    Exhibit(
        "wavelengths-slowed", "Wavelengths: schedules that slow the clocks down",
        "A clock that never completed a turn in training shows times that the model has never seen when "
        "the text gets longer; these schedules slow such clocks down. They differ in how much of the fast"
        " ones, which tell neighbours apart, they leave alone.",
        _SLOWED, _frequencies(_SLOWED, "Wavelengths: slowed down"),
    ),
    Exhibit(
        "wavelengths-cut", "Wavelengths: schedules that stop or round some clocks",
        "Instead of slowing the slow clocks down, these stop them, let them fade out, or round every "
        "clock to whole tokens. A clock that stands still says nothing of position, and nothing wrong "
        "either.",
        _CUT, _frequencies(_CUT, "Wavelengths: stopped, faded or rounded"),
    ),
    Exhibit(
        "spectra", "Frequencies before and after an extension",
        "Each stroke is one clock, fast ones to the right; to the left of the dashed line, clocks did not"
        " turn once in the trained window. An extension moves strokes to the left, all of them alike or "
        "the slow ones alone.",
        ("none", "linear", "ntk", "yarn", "llama3"), draw_spectra,
    ),
    Exhibit(
        "alibi", "ALiBi's bias",
        "Here nothing turns: the further a key is behind, the more is taken off its logit, in proportion "
        "to the distance. Some heads are strict and see their neighbourhood alone, others let the whole "
        "text in.",
        ("alibi",), lambda path: draw_matrices(path, "alibi", "ALiBi's bias"),
    ),
    Exhibit(
        "t5_bias", "T5's bias",
        "Distances are sorted into ranges, narrow ones for neighbours and wide ones further out, and each"
        " head learns one number for each range. Beyond the last range all keys are alike, so that a "
        "longer text brings nothing new; the numbers shown are those that training starts from.",
        ("t5_bias",), lambda path: draw_matrices(path, "t5_bias", "T5's bias, as it starts", tokens=192),
    ),
    Exhibit(
        "biases", "Biases by distance",
        "The same idea in five shapes: a straight line (which bends here, because distances are drawn by "
        "their logarithm), steps, a logarithm, a small learned network, and a sum of cosines. Those with "
        "something to learn are shown as they start, and move from there with the model.",
        ("alibi", "t5_bias", "kerple", "fire", "sandwich"), draw_biases,
    ),
    Exhibit(
        "decay", "What distance does to attention",
        "Above, how much of a query and a key that are exactly alike is left after both were turned: RoPE"
        " forgets likeness over distance in waves, and slowing the clocks down stretches the waves. "
        "Below, the weight that a bias leaves to a key at each distance, in a strict and in a lenient "
        "head.",
        ("none", "linear", "yarn", "nope", "alibi", "kerple", "t5_bias"), draw_decay,
    ),
)  # fmt: skip
"""The pictures, in the order of the page."""
