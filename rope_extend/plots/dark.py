"""Colours for a dark page, in an SVG file itself. Browsers follow them also where the file is an image."""

from __future__ import annotations

import re
from colorsys import hls_to_rgb, rgb_to_hls

from matplotlib.colors import to_hex, to_rgb

from rope_extend.report.colours import HUES, NIGHT, PLAIN

_PAIRS = {light.lower(): dark.lower() for light, dark in (*HUES, PLAIN)}
_COLOURS = re.compile(r"(fill|stroke): (#[0-9a-f]{6})")


def dark_colour(light: str) -> str:
    """The colour on a dark page of a colour on white, both as `#rrggbb` in lower case.

    Methods have the colours of `rope_extend.report.colours`. Others keep their hue, and their lightness is
    turned around: white becomes the dark page, and black becomes white.
    """
    if light in _PAIRS:
        return _PAIRS[light]
    hue, lightness, saturation = rgb_to_hls(*to_rgb(light))
    darkest = rgb_to_hls(*to_rgb(NIGHT))[1]
    return (
        to_hex(hls_to_rgb(hue, 1 - (1 - darkest) * lightness, saturation)) if lightness < 1 else NIGHT.lower()
    )


def with_dark_colours(svg: str) -> str:
    """An SVG file of matplotlib with a style for dark pages. Heat maps in it do not change."""
    found = sorted(set(_COLOURS.findall(svg)))
    rules = [
        f'[style*="{name}: {light}"] {{{name}: {dark_colour(light)} !important}}' for name, light in found
    ]
    style = "\n".join(["@media (prefers-color-scheme: dark) {", "svg {fill: #ffffff}", *rules, "}"])
    return svg.replace("</style>", f"\n{style}\n</style>", 1)
