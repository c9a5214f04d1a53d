"""Each method has one colour everywhere, and every colour can be seen on a light and on a dark page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb

from rope_extend.method_names import method_names
from rope_extend.plots.palette import (
    HUE_OF,
    HUES,
    NIGHT,
    PAPER,
    PLAIN,
    dark_colour,
    look,
    with_dark_colours,
)
from rope_extend.plots.style import PALETTE, method_colour
from rope_extend.plots.style import PLAIN as PLAIN_LINE

OFTEN_TOGETHER = ("none", "linear", "ntk", "yarn", "dynamic_ntk", "dynamic_yarn", "longrope", "llama3", "abf")
PICTURES = sorted((Path(__file__).parents[2] / "docs").rglob("*.svg"))
STYLE = re.compile(r"\n@media \(prefers-color-scheme: dark\) \{\n.*?\n\}\n(?=</style>)", re.DOTALL)


def contrast(colour: str, background: str) -> float:
    """The contrast ratio of two colours, from 1 to 21, by the formula of WCAG 2."""

    def luminance(one: str) -> float:
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(one)]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    light, dark = sorted((luminance(colour), luminance(background)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_seen_on_light_and_dark_pages() -> None:
    for name in [*method_names(), "unknown", "another(yarn)"]:
        for step in range(5):
            found = look(name).shaded(step)
            assert contrast(found.colour, PAPER) >= 3, found
            assert contrast(dark_colour(found.colour), NIGHT) >= 3, found
    for light, dark in (*HUES, PLAIN):
        assert contrast(light, PAPER) >= 3
        assert contrast(dark, NIGHT) >= 3
        assert dark_colour(light) == dark


def test_every_method_has_a_look_of_its_own() -> None:
    assert set(HUE_OF) == set(method_names()) - {"none"}
    looks = [look(name) for name in method_names()]
    assert len(set(looks)) == len(looks)
    assert len({look(name).colour for name in OFTEN_TOGETHER}) == len(OFTEN_TOGETHER)
    assert look("resonance(yarn)") == look("resonance")
    assert method_colour("yarn") == look("yarn").colour == PALETTE[2]
    assert method_colour("none") == PLAIN_LINE == look("none").colour


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_every_picture_has_a_dark_colour_for_each_colour(path: Path) -> None:
    written = path.read_text("utf-8")
    light = STYLE.sub("", written)
    assert light != written, "no style for dark pages"
    assert with_dark_colours(light) == written
    for colour in set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", light)):
        if contrast(colour, PAPER) >= 3:  # lines and texts, and not grids and backgrounds
            assert contrast(dark_colour(colour), NIGHT) >= 3, colour
        else:
            assert contrast(dark_colour(colour), NIGHT) < 3, colour
