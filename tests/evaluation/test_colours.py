"""Each method has one colour everywhere, and every colour can be seen on a light and on a dark page."""

from __future__ import annotations

from itertools import combinations

import pytest

from rope_extend.method_names import method_names
from rope_extend.plots import gallery
from rope_extend.plots.style import PALETTE, method_colour
from rope_extend.plots.style import PLAIN as PLAIN_LINE
from rope_extend.report.chart import looks_of_rows
from rope_extend.report.colours import HUE_OF, HUES, NIGHT, PAPER, PLAIN, contrast, heat, look

OFTEN_TOGETHER = ("none", "linear", "ntk", "yarn", "dynamic_ntk", "dynamic_yarn", "longrope", "llama3", "abf")


def test_contrast_is_that_of_the_standard() -> None:
    """Published values of WCAG 2: black on white, and the lightest grey that reaches 4.5:1."""
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#FFFFFF", "#FFFFFF") == 1
    assert contrast("#767676", "#FFFFFF") == pytest.approx(4.54, abs=0.005)


def test_colours_can_be_seen_on_light_and_dark_pages() -> None:
    names = [*method_names(), "unknown", "another(yarn)"]
    looks = [look(name).shaded(step) for name in names for step in range(5)]
    for found in looks:
        assert contrast(found.light, PAPER) >= 3, found
        assert contrast(found.dark, NIGHT) >= 3, found
    for light, dark in (*HUES, PLAIN):
        assert contrast(light, PAPER) >= 3
        assert contrast(dark, NIGHT) >= 3


def test_texts_on_a_heat_map_are_legible() -> None:
    for share in range(101):
        colour, text = heat(share / 100)
        assert contrast(text, colour) >= 4.5, share


def test_every_method_has_a_look_of_its_own() -> None:
    assert set(HUE_OF) == set(method_names()) - {"none"}
    looks = [look(name) for name in method_names()]
    assert len(set(looks)) == len(looks)
    assert len({look(name).light for name in OFTEN_TOGETHER}) == len(OFTEN_TOGETHER)
    assert look("resonance(yarn)") == look("resonance")
    assert look("no such method") == look("no such method")


@pytest.mark.parametrize("exhibit", gallery.EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_methods_of_one_picture_have_different_colours(exhibit: gallery.Exhibit) -> None:
    groups = [exhibit.methods]
    if exhibit.name == "decay":  # its two panels show different kinds of encodings
        groups = [exhibit.methods[:4], exhibit.methods[4:]]
    for group in groups:
        assert len({look(name).light for name in group}) == len(group)


def test_pictures_and_pages_have_the_same_colours() -> None:
    assert method_colour("yarn") == look("yarn").light == PALETTE[2]
    assert method_colour("none") == PLAIN_LINE == look("none").light


def test_rows_of_one_method_and_kind_have_different_shades() -> None:
    rows = [("yarn", "untrained"), ("yarn", "fine-tuned"), ("yarn", "fine-tuned"), ("none", "fine-tuned")]
    first, trained, second, plain = looks_of_rows(rows)
    assert first == trained == look("yarn")  # their dashes differ
    assert len({found.light for found in (trained, second, plain)}) == 3
    assert all(a.marker != b.marker for a, b in combinations((trained, second), 2))
