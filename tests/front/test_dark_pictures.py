"""SVG pictures can be read on a light and on a dark page, without another file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rope_extend.plots.dark import dark_colour, with_dark_colours
from rope_extend.plots.style import Canvas
from rope_extend.report.colours import HUES, NIGHT, PAPER, PLAIN, contrast

ROOT = Path(__file__).parents[2]
PICTURES = sorted((ROOT / "docs").rglob("*.svg"))
STYLE = re.compile(r"\n@media \(prefers-color-scheme: dark\) \{\n.*?\n\}\n(?=</style>)", re.DOTALL)


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


def test_methods_have_the_dark_colours_of_reports() -> None:
    for light, dark in (*HUES, PLAIN):
        assert dark_colour(light.lower()) == dark.lower()
    assert dark_colour("#ffffff") == NIGHT.lower()
    assert dark_colour("#000000") == "#ffffff"


def test_a_picture_that_is_drawn_now_has_the_style(tmp_path: Path) -> None:
    canvas = Canvas(tmp_path / "a.svg", "title")
    canvas.axes.plot([1, 2], [1, 2], color=HUES[0][0])
    text = canvas.save().read_text("utf-8")
    assert len(STYLE.findall(text)) == 1
    assert f'[style*="stroke: {HUES[0][0].lower()}"] {{stroke: {HUES[0][1].lower()} !important}}' in text


def test_pages_show_the_svg_where_there_is_one() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\.png\)", page.read_text("utf-8")):
            assert not (page.parent / f"{name}.svg").exists(), f"{page.name} shows {name}.png"
