"""What a figure shows, as plain values that are stored in its file.

So a test can compare a picture on disk with what the code draws now, without comparing pixels, which differ
between versions of fonts and libraries.
"""

from __future__ import annotations

import json
import math
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from rope_extend.errors import RopeExtendError

KEY = "Contents"
"""The key of the text in a PNG file; an SVG file has it in its description."""
MOST_POINTS = 16
"""Number of values that are stored of a longer line."""


def contents(figure: Figure) -> list[dict[str, Any]]:
    """For each axes of a figure, its texts, and samples of its lines, strokes and images.

    Returns:
        a list of dicts with `texts`, `lines` (colour, x and y), `strokes` (colour and ends) and `images`.
    """
    return [
        {
            "texts": [
                text
                for text in (
                    axes.get_title("left"), axes.get_title(), axes.get_xlabel(), axes.get_ylabel(),
                    *(text.get_text() for text in axes.texts),
                )
                if text
            ],
            "lines": [
                [to_hex(line.get_color()), _sample(line.get_xdata()), _sample(line.get_ydata())]
                for line in axes.lines
            ],
            "strokes": [
                [
                    [to_hex(colour) for colour in collection.get_edgecolor()[:1]],
                    _sample(np.concatenate([path.vertices for path in collection.get_paths()] or [[]])),
                ]
                for collection in axes.collections
            ],
            "images": [_sample(image.get_array()) for image in axes.images],
        }
        for axes in figure.axes
    ]  # fmt: skip


def written(path: Path) -> list[dict[str, Any]]:
    """The contents that a picture file says it shows.

    Raises:
        RopeExtendError: the file is no PNG or SVG file of this project.
    """
    text = None
    if path.suffix == ".png":
        from PIL import Image

        with Image.open(path) as image:
            text = image.info.get(KEY)
    elif match := re.search(r"<dc:description>(.*?)</dc:description>", path.read_text("utf-8"), re.DOTALL):
        text = unescape(match[1])
    if text is None:
        raise RopeExtendError(f"{path} does not say what it shows; draw it again")
    found: list[dict[str, Any]] = json.loads(text)
    return found


def differences(first: Any, second: Any, place: str = "picture") -> list[str]:
    """Where two contents differ by more than a thousandth; empty if they agree."""
    if isinstance(first, int | float) and isinstance(second, int | float):
        same = math.isclose(first, second, rel_tol=1e-3, abs_tol=1e-6)
        return [] if same else [f"{place}: {first} and {second}"]
    if isinstance(first, dict) and isinstance(second, dict):
        keys = sorted({*first, *second})
        return [
            text for key in keys for text in differences(first.get(key), second.get(key), f"{place}, {key}")
        ]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [text for number, (a, b) in pairs for text in differences(a, b, f"{place} {number}")]
    return [] if first == second else [f"{place}: {first!r} and {second!r}"]


def _sample(values: Any) -> list[float | None]:
    """At most `MOST_POINTS` values, evenly spaced, with five digits; None where a value is not finite."""
    array = np.ma.filled(np.ma.asarray(values, dtype=np.float64), np.nan).ravel()
    if len(array) > MOST_POINTS:
        array = array[np.linspace(0, len(array) - 1, MOST_POINTS).round().astype(int)]
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in array]
