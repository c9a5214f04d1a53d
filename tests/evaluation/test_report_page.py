"""The page of a report: charts show the numbers where they belong, with and without a script."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rope_extend.report.chart import Chart, Curve, Point
from rope_extend.report.colours import look
from rope_extend.report.html import HeatMap, page
from rope_extend.report.svg import NARROW, WIDE, can_be_logarithmic, drawings
from rope_extend.report.tables import Code, Section
from rope_extend.report.ticks import length_ticks, value_range, value_ticks

LENGTHS = (128, 256, 512, 1024)


def curve(name: str, values: tuple[float, ...], *, shown: bool = True, kind: str = "untrained") -> Curve:
    points = [Point(n, y, y - 0.5, y + 0.5) for n, y in zip(LENGTHS, values, strict=True)]
    return Curve(name, points, look("yarn"), kind, shown)


def chart(**changes: object) -> Chart:
    curves = [
        curve("a & <b>", (10, 20, 40, 80)),
        curve("flat", (20, 20, 20, 20)),
        curve("far", (5000, 6000, 7000, 8000), shown=False),
    ]
    made = Chart("Perplexity", curves, "length, tokens", "perplexity", logarithmic=True, window=256)
    return replace(made, **changes)


def elements(made: Chart) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(f"<page>{drawings(made, 'one')}</page>"))


def points(drawing: ElementTree.Element, row: str) -> list[tuple[float, float]]:
    (group,) = (g for g in drawing.iter("g") if g.get("data-row") == row and "curve" in g.get("class", ""))
    line = next(path for path in group.iter("path") if path.get("class") == "line")
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", line.get("d", ""))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_a_chart_is_drawn_for_two_widths_and_two_axes() -> None:
    found = [drawing.get("class", "").split() for drawing in elements(chart())]
    assert found == [["drawing", width, axis] for width in ("wide", "narrow") for axis in ("log", "linear")]
    assert [drawing.get("class") for drawing in elements(chart(limits=(0.0, 1.0)))] == [
        "drawing wide linear", "drawing narrow linear",
    ]  # fmt: skip
    assert not can_be_logarithmic(chart(curves=[curve("zero", (0, 1, 2, 3))]))


@pytest.mark.parametrize("index", range(4))
def test_equal_steps_of_the_axis_are_equal_distances(index: int) -> None:
    """Values that double at lengths that double: a straight line on logarithmic axes, not on linear ones."""
    drawing = elements(chart())[index]
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = points(drawing, "a & <b>")
    frame = (WIDE, NARROW)[index // 2]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11) == pytest.approx(x3 - x2, abs=0.11)
    assert frame.left <= x0 < x3 <= frame.width - frame.right
    assert frame.top <= y3 < y0 <= frame.height - frame.bottom
    steps = (y0 - y1, y1 - y2, y2 - y3)
    if index % 2 == 0:
        assert steps[0] == pytest.approx(steps[1], abs=0.11) == pytest.approx(steps[2], abs=0.11)
    else:
        assert steps[1] == pytest.approx(2 * steps[0], abs=0.2)
        assert steps[2] == pytest.approx(4 * steps[0], abs=0.3)
    assert {y for _, y in points(drawing, "flat")} == {y1}  # the value of the other curve at 256


def test_points_carry_their_values_for_readers_and_for_the_script() -> None:
    wide = elements(chart())[0]
    marks = [g for g in wide.iter("g") if g.get("class") == "point"]
    assert len(marks) == 12
    assert (marks[0].get("data-at"), marks[0].get("data-value")) == ("128", "10 (9.5 to 10.5)")
    assert marks[3].findtext("title") == "a & <b>, 1k: 80 (79.5 to 80.5)"


def test_hidden_curves_do_not_set_the_range() -> None:
    wide = elements(chart())[0]
    labels = [text.text for text in wide.iter("text") if text.get("text-anchor") == "end"]
    assert "50" in labels
    assert "5,000" not in labels
    assert [g.get("class") for g in wide.iter("g") if g.get("data-row") == "far"] == ["curve off"]


def test_values_that_are_not_finite_are_left_out() -> None:
    broken = Curve("broken", [Point(128, math.nan), Point(256, 7.0), Point(512, math.inf)], look("ntk"))
    drawing = elements(chart(curves=[broken]))[0]
    assert len(points(drawing, "broken")) == 1
    text = page("Title", [], [chart(curves=[replace(broken, points=broken.points[:1])])], {})
    assert "No value of it is finite" in text
    assert "<svg" not in text


def test_ticks_are_round_and_inside() -> None:
    assert value_ticks(8, 120, logarithmic=True) == [10, 20, 50, 100]
    assert value_ticks(0.8, 1.2, logarithmic=False) == [0.8, 0.9, 1.0, 1.1, 1.2]
    assert value_ticks(0, 1.02, logarithmic=False) == [0, 0.5, 1.0] or len(
        value_ticks(0, 1.02, logarithmic=False)
    ) in (5, 6)
    for low, high in ((0.001, 5e6), (2.9, 3.1), (1e-9, 1e-8), (-3.0, 4.0)):
        ticks = value_ticks(low, high, logarithmic=low > 0)
        assert 2 <= len(ticks) <= 6
        assert all(low <= tick <= high for tick in ticks)
    assert length_ticks([4000, 4096, 8192], 6) == [4096, 8192]


def test_the_best_number_of_a_column_is_marked() -> None:
    lines = [["", "512", "1k", "same"], ["a", "1,200", "3.5", "7"], ["b", "87.5", "–", "7"]]
    text = page("Title", [], [Section("Table", lines, best="lowest")], {})
    assert re.findall(r"<td class=best>([^<]*)", text) == ["87.5"]
    assert "class=best" not in page("Title", [], [Section("Table", lines)], {})


def test_heat_maps_and_commands_are_shown() -> None:
    found = HeatMap("passkey", ["depth", "1k", "2k"], [("0 %", [1.0, 0.25]), ("100 %", [None, 0.0])], "note")
    text = page("Title", [], [found, Code("Commands", "rope-extend <x>")], {"torch": "2"})
    assert re.findall(r'<td class="cell"[^>]*>([^<]*)', text) == ["100", "25", "–", "0"]
    assert "rope-extend &lt;x&gt;" in text
    assert "<script" not in text  # nothing to interact with


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """
const said = [];
const figure = document.querySelector("figure.chart");
const shown = (element) => getComputedStyle(element).display !== "none";
const drawing = [...figure.querySelectorAll("svg.drawing")].filter(shown);
said.push("drawings " + drawing.map((d) => d.getAttribute("class")).join(","));
const box = drawing[0].getBoundingClientRect();
drawing[0].dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 60, clientY: box.top + 60}));
said.push("values " + figure.querySelector(".values").innerText.replace(/\\s+/g, " "));
const button = figure.querySelectorAll(".legend button")[2];
const far = drawing[0].querySelector('.curve[data-row="far"]');
said.push("far " + shown(far));
button.click();
said.push("far " + shown(far) + " " + button.getAttribute("aria-pressed"));
document.querySelector('tr[data-row="flat"]').click();
said.push("hit " + drawing[0].querySelectorAll("g.curve.hit").length);
figure.querySelector('input[value="linear"]').click();
const after = [...figure.querySelectorAll("svg.drawing")].filter(shown);
said.push("then " + after.map((d) => d.classList[2]).join(","));
said.push("overflow " + (document.documentElement.scrollWidth - document.documentElement.clientWidth));
document.body.textContent = said.join("\\n");
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")
@pytest.mark.parametrize(("width", "name"), [(1280, "wide"), (600, "narrow")])
def test_a_browser_shows_values_and_turns_curves_on(width: int, name: str, tmp_path: Path) -> None:
    lines = [["", "128"], ["a & <b>", "10"], ["flat", "20"], ["far", "5000"]]
    text = page("Title", [], [chart(), Section("Table", lines)], {})
    (tmp_path / "page.html").write_text(text.replace("</body>", f"<script>{PROBE}</script></body>"))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom",
        "--disable-background-networking", f"--window-size={width},900",
        f"--user-data-dir={tmp_path}/profile", (tmp_path / "page.html").as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    said = unescape(re.sub(r"<[^>]*>", "", dom.partition("<body>")[2])).strip().splitlines()
    assert said == [
        f"drawings drawing {name} log",
        "values 128 a & <b> 10 (9.5 to 10.5) flat 20 (19.5 to 20.5)",
        "far false",
        "far true true",
        "hit 1",
        "then linear",
        "overflow 0",
    ]


def test_the_range_of_the_axis_ends_at_the_largest_float() -> None:
    points = (Point(256.0, 1e-307), Point(512.0, math.exp(709)))
    chart = Chart("", (Curve("b", points, look("b")),), "length", "perplexity")
    low, high = value_range(chart, logarithmic=True)
    assert 0 < low <= 1e-307
    assert math.exp(709) < high < math.inf
    assert all(low <= tick <= high for tick in value_ticks(low, high, logarithmic=True))
