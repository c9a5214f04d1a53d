"""The page docs/alternatives.md, its results and its pictures, as `compare_alternatives.py` writes them."""

from __future__ import annotations

import csv
import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from rope_extend.errors import RopeExtendError
from rope_extend.files import write_text
from rope_extend.plots.style import (
    INK,
    PALETTE,
    PLAIN,
    QUIET,
    Canvas,
    draw_line,
    method_colour,
    name_ends,
    perplexity_axis,
    write_figure,
)
from rope_extend.report.tables import markdown_table
from rope_extend.units import format_length

NARROW = "alibi by attention alone"
SHORT_RESULTS, LONG_RESULTS = "results", "long"
"""Names of the files with the results of short and of long runs."""
LONG_ROWS = ("none", "yarn", "alibi", "nope", "drope", "t5_bias", "kerple", "fire", "sandwich")

Result = dict[str, Any]
"""What was measured of one row."""

PAGE = """\
# Encodings instead of RoPE, after the same training

<!-- written by scripts/compare_alternatives.py -->

The bundled model was trained with RoPE on 256 tokens. Each row replaces RoPE by another encoding and trains
for {steps} steps of {per_step:,} tokens ({tokens:,} in all) in blocks of {block:,}, with
`configs/demo_alternatives.yaml`: LoRA on all linear layers, norms and embeddings.

- `none` and `yarn` are the controls, trained in the same way.
- `drope` is recalibrated in blocks of 256, as in its paper, for the same number of tokens.
- In the last row, only LoRA on attention is trained.
- `sinusoidal` has a `scale` of 0.1. `learned` has a row for each position, which starts at zero.

Perplexity on {documents} held-out files, by length:

{table}

![perplexity inside and beyond the trained window](alternatives/perplexity.svg)

{says}
"""

LONG_PAGE = """
## Long training

    python scripts/compare_alternatives.py --long

The default recipe of encodings instead of RoPE has {steps:,} steps. Here each row trains for as many, with
`configs/demo_alternatives_long.yaml`: {tokens:,} tokens of the text that the model was pretrained on, none of
them twice. The digits `{text}` identify this text. Perplexity on {documents} held-out files, by length:

{table}

`2k / yarn` is the perplexity at 2k divided by that of `yarn`. Tokens a second are those of the fastest tenth
of the steps, on one CPU core, as other programs ran at the same time.

![perplexity at 2k tokens by step](alternatives/long.svg)

{says}
"""

SAYS = """\
After so short a training, no encoding instead of RoPE comes near the controls. The best of them, {best},
has {beyond:.1f} at {length} and {inside:.1f} inside the window; `yarn` has {yarn_beyond:.1f} and
{yarn_inside:.1f}. So this shows which of them start well, and not where long training ends. LoRA on
attention alone takes alibi to {narrow:.1f}.
"""


def says(results: list[Result]) -> str:
    """What the results show, in two sentences."""
    by_label = {one["label"]: one["after"] for one in results}
    short, *_, length = results[0]["after"]
    controls = {"none", "yarn"}
    replaced = {label: after for label, after in by_label.items() if label not in controls}
    if not controls | {NARROW} <= by_label.keys():
        return ""
    best = min(replaced, key=lambda label: replaced[label][length])
    text = SAYS.format(
        best=f"`{best}`", length=format_length(int(length)), inside=replaced[best][short],
        beyond=replaced[best][length], yarn_inside=by_label["yarn"][short],
        yarn_beyond=by_label["yarn"][length], narrow=by_label[NARROW][length],
    )  # fmt: skip
    return textwrap.fill(" ".join(text.split()), 110)


def long_says(results: list[Result]) -> str:
    """What long training shows; what is missing as long as rows are."""
    labels = [one["label"] for one in results]
    missing = [f"`{label}`" for label in LONG_ROWS if label not in labels]
    sentences = [f"Not measured yet: {', '.join(missing)}."] if missing else []
    by_label = {one["label"]: one for one in results}
    replaced = [one for one in results if one["label"] not in ("none", "yarn")]
    if replaced and "yarn" in by_label:
        short, *_, length = results[0]["after"]
        yarn = by_label["yarn"]
        best = min(replaced, key=lambda one: one["after"][length])
        inside = min(replaced, key=lambda one: one["after"][short])
        sentences += [
            f"At {format_length(int(length))}, the best encoding instead of RoPE is `{best['label']}`: "
            f"{best['after'][length]:.1f}, where `yarn` has {yarn['after'][length]:.1f} after the same "
            f"training and {yarn['before'][length]:.1f} before.",
            f"At {short} tokens it is `{inside['label']}`: {inside['after'][short]:.1f}, where `yarn` has "
            f"{yarn['after'][short]:.1f}.",
        ]
        if plain := by_label.get("none"):
            sentences.append(
                f"Plain RoPE, `none`, has {plain['after'][length]:.1f} and {plain['after'][short]:.1f}."
            )
        step = _first_below(yarn, best["after"][length], length)
        if step is not None:
            sentences.append(
                f"`{best['label']}` reaches {best['after'][length]:.1f} at {format_length(int(length))} "
                f"after {best['steps']:,} steps; `yarn` was below that {_after(step)}."
            )
        sentences.append(_cost(yarn, replaced))
    return textwrap.fill(" ".join(sentences), 110)


def _cost(yarn: Result, replaced: list[Result]) -> str:
    """The time of a step of the encodings instead of RoPE, compared with that of `yarn`."""
    times = {one["label"]: yarn["tokens_per_second"] / one["tokens_per_second"] for one in replaced}
    least, most = min(times, key=lambda label: times[label]), max(times, key=lambda label: times[label])
    said = f"With `{least}`, a step takes {times[least]:.2f} times as long as with `yarn`"
    return said + (f", and with `{most}` {times[most]:.2f} times." if most != least else ".")


def _after(step: int) -> str:
    return f"after {step:,}" if step else "before any training"


def _first_below(one: Result, limit: float, length: str) -> int | None:
    """The first evaluated step at which a row had a lower perplexity; None if it never had."""
    return next((int(step) for step, values in one["curve"].items() if values[length] < limit), None)


def table(results: list[Result]) -> list[list[str]]:
    lengths = list(results[0]["after"])
    return [
        ["", *(format_length(int(length)) for length in lengths), "untrained, 256", "untrained, 2k"],
        *(
            [one["label"], *(f"{one['after'][length]:.1f}" for length in lengths)]
            + [f"{one['before'][length]:,.0f}" for length in (lengths[0], lengths[-1])]
            for one in results
        ),
    ]


def long_table(results: list[Result]) -> list[list[str]]:
    *_, length = results[0]["after"]
    yarn = next((one["after"][length] for one in results if one["label"] == "yarn"), None)
    return [
        [
            *row,
            "–" if yarn is None else f"{one['after'][length] / yarn:.2f}",
            f"{one['tokens_per_second']:,.0f}",
        ]
        for row, one in zip(table(results)[1:], results, strict=True)
    ]


def page(results: list[Result], long: list[Result]) -> str:
    first = results[0]
    text = PAGE.format(
        steps=first["steps"], tokens=first["tokens"], per_step=first["tokens"] // first["steps"],
        block=first["block"], documents=first["documents"], table=markdown_table(table(results)).strip(),
        says=says(results),
    )  # fmt: skip
    if not long:
        return text
    first = long[0]
    head = [*table(long)[0], "2k / yarn", "tokens/s"]
    return text + LONG_PAGE.format(
        steps=first["steps"], tokens=first["tokens"], text=first["text"], documents=first["documents"],
        table=markdown_table([head, *long_table(long)]).strip(), says=long_says(long),
    )  # fmt: skip


def draw_long(results: list[Result], path: Path) -> None:
    """Draw the perplexity of each row at the longest length by step; .png or .svg."""
    *_, length = results[0]["after"]
    where = f"{format_length(int(length))} tokens, by step of training"
    canvas, ends = Canvas(path, f"Perplexity at {where}", "the bundled model, on held-out files"), []
    for one in results:
        steps = np.array([int(step) for step in one["curve"]], dtype=float)
        values = np.array([perplexities[length] for perplexities in one["curve"].values()])
        style = {"color": method_colour(one["label"]), "linewidth": 1.8, "marker": "o", "markersize": 4}
        ends += draw_line(canvas.axes, steps, values, one["label"], **style)
    perplexity_axis(canvas.axes)
    canvas.axes.set_xlabel("steps", color=INK)
    name_ends(canvas.axes, ends)
    canvas.save()


def draw(results: list[Result], path: Path) -> None:
    """Draw the perplexity of each row inside the trained window and at the longest length; .png or .svg."""
    ranked = sorted(results, key=lambda one: -list(one["after"].values())[-1])
    figure = Figure(figsize=(8, 1.4 + 0.3 * len(ranked)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for height, result in enumerate(ranked):
        inside, *_, beyond = result["after"].values()
        control = result["label"] in ("none", "yarn")
        axes.plot([inside, beyond], [height, height], color=QUIET, linewidth=1.5, zorder=1)
        axes.plot(inside, height, "o", color=PALETTE[0], markersize=6)
        axes.plot(beyond, height, "D", color=PALETTE[1], markersize=6)
        axes.annotate(
            result["label"], (0, height), (-8, 0), xycoords=axes.get_yaxis_transform(), ha="right",
            va="center", textcoords="offset points", color=PLAIN if control else INK, annotation_clip=False,
            style="italic" if control else "normal",
        )  # fmt: skip
    axes.set_xscale("log")
    values = [value for one in results for value in one["after"].values()]
    ticks = [tick for tick in (8, 10, 12, 15, 20, 30, 50, 100, 200, 500, 1000) if tick < 1.1 * max(values)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(NullLocator())
    axes.set_xlabel("perplexity (● at 256 tokens, the trained window; ◆ at 2,048)", color=INK)
    axes.set_title("After the same training", loc="left", color=INK, fontweight="bold")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#E4E4E4")
    write_figure(figure, path, path.suffix[1:], dpi=130)


def write(results: list[Result], long: list[Result], docs: Path) -> None:
    """Write the page, the results and the pictures."""
    folder = docs / "alternatives"
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in ((SHORT_RESULTS, results), (LONG_RESULTS, long)):
        if lines:
            write_text(results_file(docs, name), "".join(json.dumps(one) + "\n" for one in lines))
    with (folder / "results.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(table(results))
    for suffix in (".png", ".svg"):
        draw(results, folder / f"perplexity{suffix}")
        if long:
            draw_long(long, folder / f"long{suffix}")
    write_text(docs / "alternatives.md", page(results, long))


def results_file(docs: Path, name: str) -> Path:
    """The file of the results of short or long runs."""
    return docs / "alternatives" / f"{name}.jsonl"


def read(docs: Path, name: str) -> list[Result]:
    """The results of the page; none if there are none.

    Raises:
        RopeExtendError: a line is damaged.
    """
    path = results_file(docs, name)
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
        try:
            found.append(json.loads(text))
        except ValueError as error:
            raise RopeExtendError(
                f"line {number} of {str(path)!r} is damaged ({error}); restore the file, or delete the line"
            ) from error
    return found
