"""The picture of the README: perplexity against length, from committed cells.

python tools/front_picture.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rope_extend.plots.style import Canvas, length_axis, mark_window, method_colour, perplexity_axis

DOCS = Path(__file__).parent.parent / "docs"
CELLS = DOCS / "results" / "code_32k" / "cells.jsonl"
FRONT = DOCS / "front.svg"
LINES = {"none": ("plain RoPE", 0), "jet_long": ("jet_long", 4), "yarn + LoRA": ("yarn + LoRA", -4)}
"""The rows that are drawn, the words at the ends of their lines, and how far these are raised, in points."""


def draw(path: Path = FRONT) -> Path:
    """Draw perplexity over the first N tokens of all documents, for N from 1k tokens on."""
    cells = [json.loads(line) for line in CELLS.open(encoding="utf-8")][1:]
    canvas = Canvas(path, "Beyond its window, plain RoPE fails;\nan extended model does not", room=16)
    for row, (words, raised) in LINES.items():
        results = [cell["result"] for cell in cells if cell["label"] == row]
        losses, targets = (
            np.sum([result[name][0] for result in results], axis=0).cumsum()
            for name in ("block_nll", "block_terms")
        )
        longest = max(map(int, results[0]["ppl"]))
        lengths = np.arange(1, len(losses) + 1) * (longest / len(losses))
        shown = lengths >= 1024
        values = np.exp(losses / targets)[shown]
        colour = method_colour(row.split()[0])
        canvas.axes.plot(lengths[shown], values, color=colour, linewidth=2.4, clip_on=False)
        canvas.axes.annotate(
            words, (longest, values[-1]), (6, raised), textcoords="offset points", va="center",
            color=colour, fontsize=10.5, annotation_clip=False,
        )  # fmt: skip
    perplexity_axis(canvas.axes)
    length_axis(canvas.axes, [1 << power for power in range(10, 16)], "tokens read")
    mark_window(canvas.axes, 8192)
    canvas.axes.set_xlim(1024, longest)
    return canvas.save()


if __name__ == "__main__":
    print(draw())
