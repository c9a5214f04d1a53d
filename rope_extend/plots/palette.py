"""The colours of methods: each has one colour and one marker in every picture and page of the project.

The hues follow Okabe and Ito, and colour-blind readers can tell the first five apart. Each has a shade for
white and one for a dark page, with a contrast of at least 3:1. Colour is never the only distinction: lines
have names, dashes and markers.
"""

from __future__ import annotations

import re
from collections import Counter
from colorsys import hls_to_rgb, rgb_to_hls
from typing import Any, NamedTuple

from matplotlib.colors import to_hex, to_rgb

PAPER, NIGHT = "#ffffff", "#14171c"
"""The backgrounds of a light and of a dark page."""
HUES = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff8a3d"),
    ("#009e73", "#2fcb9c"),
    ("#cc79a7", "#e59ac4"),
    ("#b07a00", "#e6a817"),
    ("#6f4ba8", "#b79be6"),
    ("#00707a", "#4cc3cf"),
    ("#8a4b2d", "#d39b7c"),
)
"""Each hue on white and on a dark page."""
PLAIN = ("#5f5f5f", "#a9afb8")
"""The colour of plain RoPE and of models that were not changed."""
MARKERS = ("o", "s", "^", "D", "v", "P")
"""Markers, by matplotlib's names."""
HUE_OF = {
    "linear": 0, "ntk": 1, "yarn": 2, "dynamic_ntk": 3, "dynamic_yarn": 4, "longrope": 5, "llama3": 6,
    "abf": 7, "short_original": 6, "dynamic_linear": 7, "ntk_by_parts": 4, "ntk_mixed": 7, "nope": 3,
    "drope": 5, "p_rope": 0, "clipped": 1, "power": 3, "truncated": 4, "resonance": 5, "logn": 7, "xpos": 6,
    "self_extend": 0, "rerope": 1, "jet_long": 2, "dual_chunk": 3, "sinks": 4, "string": 5, "near_far": 6,
    "alibi": 0, "t5_bias": 1, "kerple": 2, "fire": 3, "sandwich": 4, "shaw": 5, "linear_attention": 6,
    "sinusoidal": 7, "learned": 2,
}  # fmt: skip
"""The hue of each method. Methods that are often compared have different ones."""
_DARK = dict((*HUES, PLAIN))
_COLOURS = re.compile(r"(fill|stroke): (#[0-9a-f]{6})")


class Look(NamedTuple):
    """How the lines of a method look: a colour on white, and a marker by matplotlib's name."""

    colour: str
    marker: str

    def shaded(self, step: int) -> Look:
        """The same hue, darker with each step, for further rows of one method."""
        marker = (MARKERS.index(self.marker) + step) % len(MARKERS)
        part = 1 - min(step, 3) / 5
        return Look(to_hex([part * channel for channel in to_rgb(self.colour)]), MARKERS[marker])


def _assigned() -> dict[str, Look]:
    """A look for each method; methods of one hue have different markers."""
    seen: Counter[int] = Counter()
    looks = {}
    for name, hue in HUE_OF.items():
        looks[name] = Look(HUES[hue][0], MARKERS[(hue + seen[hue]) % len(MARKERS)])
        seen[hue] += 1
    return looks


_LOOKS = _assigned()


def look(method: str) -> Look:
    """The look of a method, or of a composition by its outer method, such as `resonance(yarn)`."""
    return _LOOKS.get(method.partition("(")[0].strip(), Look(PLAIN[0], MARKERS[0]))


def looks_of_rows(rows: list[tuple[str, Any]]) -> list[Look]:
    """The look of each row, given as its method and dashes: equal ones get other shades."""
    seen: Counter[tuple[str, Any]] = Counter()
    looks = []
    for row in rows:
        looks.append(look(row[0]).shaded(seen[row]))
        seen[row] += 1
    return looks


def dark_colour(light: str) -> str:
    """The colour on a dark page of a colour on white, both as `#rrggbb` in lower case.

    Others than those of methods keep their hue, and their lightness is turned around: white becomes the dark
    page, and black becomes white.
    """
    if light in _DARK:
        return _DARK[light]
    hue, lightness, saturation = rgb_to_hls(*to_rgb(light))
    darkest = rgb_to_hls(*to_rgb(NIGHT))[1]
    return to_hex(hls_to_rgb(hue, 1 - (1 - darkest) * lightness, saturation)) if lightness < 1 else NIGHT


def with_dark_colours(svg: str) -> str:
    """An SVG file of matplotlib with a style for dark pages. Heat maps in it do not change."""
    found = sorted(set(_COLOURS.findall(svg)))
    rules = [
        f'[style*="{name}: {light}"] {{{name}: {dark_colour(light)} !important}}' for name, light in found
    ]
    style = "\n".join(["@media (prefers-color-scheme: dark) {", "svg {fill: #ffffff}", *rules, "}"])
    return svg.replace("</style>", f"\n{style}\n</style>", 1)
