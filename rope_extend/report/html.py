"""A report as one HTML page that needs no other file and no network.

Charts are SVG elements, with a short script for values under the pointer and for turning curves on and off.
Without scripts, the page shows the same charts and tables. Colours follow the reader's light or dark theme.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from rope_extend.report.chart import Chart, Curve
from rope_extend.report.colours import heat
from rope_extend.report.svg import can_be_logarithmic, drawings, names_of, swatch
from rope_extend.report.tables import Code, Line, Section, Sentences, TwoLines, writable

_MEDIA = {".png": "image/png", ".svg": "image/svg+xml"}
MOST_ROWS_WITHOUT_CONTENTS = 3
"""Number of headings above which a page begins with a list of its parts."""


@dataclass(frozen=True)
class Picture:
    """A PNG or SVG file to embed in the page, and a description of it."""

    path: Path
    description: str


@dataclass(frozen=True)
class HeatMap:
    """Shares by row and column, as a table of coloured cells.

    Attributes:
        heading: what it shows.
        columns: the head of each column; the first is that of the row names.
        rows: a name, and its shares from 0 to 1; None where nothing was measured.
        note: a sentence below it.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    note: str = ""


Part = Section | Sentences | Picture | Chart | HeatMap | Code | str
"""What a page is made of; a `str` is a paragraph."""


def page(title: str, lead: Sequence[str], parts: Sequence[Part], versions: Mapping[str, str]) -> str:
    """Write the page as HTML.

    Args:
        title: heading of the page.
        lead: paragraphs below the heading.
        parts: tables, charts, pictures and paragraphs, in order.
        versions: versions of the software, by name.
    """
    body = [f"<h1>{escape(title)}</h1>", *map(_paragraph, lead), *_contents(parts)]
    body += [_part(part, f"part-{number}") for number, part in enumerate(parts)]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    script = f"<script>\n{_file('page.js')}</script>\n" if any(map(_interactive, parts)) else ""
    return writable(
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_file('page.css')}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<p><small>{escape(software)}</small></p>\n{script}</body>\n</html>\n"
    )


@cache
def _file(name: str) -> str:
    """The text of the style sheet or of the script."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _interactive(part: Part) -> bool:
    return isinstance(part, Chart) and bool(names_of(part.curves))


def _contents(parts: Sequence[Part]) -> list[str]:
    """Links to the parts with a heading, if there are several."""
    headed = [
        (f"part-{number}", part.heading)
        for number, part in enumerate(parts)
        if not isinstance(part, Picture | HeatMap | str)
    ]
    if len(headed) <= MOST_ROWS_WITHOUT_CONTENTS:
        return []
    links = (f'<a href="#{anchor}">{escape(heading)}</a>' for anchor, heading in headed)
    return [f"<nav>{' · '.join(links)}</nav>"]


def _part(part: Part, anchor: str) -> str:
    if isinstance(part, str):
        return _paragraph(part)
    if isinstance(part, Picture):
        return f'<p><img alt="{escape(part.description)}" src="{_data(part.path)}"></p>'
    head = f'<h2 id="{anchor}">{escape(part.heading)}</h2>\n'
    if isinstance(part, HeatMap):
        return f'<div class="map">{head}{_heat_map(part)}</div>'
    if isinstance(part, Sentences):
        return head + _list(part.items)
    if isinstance(part, Code):
        return head + f"<pre><code>{escape(part.text)}</code></pre>"
    if isinstance(part, Chart):
        return head + _chart(part, anchor)
    return head + _table(part)


def _chart(chart: Chart, name: str) -> str:
    note = f"<figcaption>{escape(chart.note)}</figcaption>\n" if chart.note else ""
    drawn = names_of(chart.curves)
    if not drawn:
        return f"{note}<p>No value of it is finite.</p>"
    buttons = "".join(_button(curve) for curve in chart.curves if curve.name in drawn)
    return (
        f'<figure class="chart">\n{note}{_axis_choice(chart, name)}{drawings(chart, name)}\n'
        f'<ul class="legend">{buttons}</ul>\n</figure>'
    )


def _button(curve: Curve) -> str:
    """An entry of the legend, which turns the curve on and off."""
    name, pressed = escape(curve.name), str(curve.shown).lower()
    button = f'<button type="button" data-row="{name}" aria-pressed="{pressed}">'
    return f"<li>{button}{swatch(curve)}{name}</button></li>"


def _axis_choice(chart: Chart, name: str) -> str:
    """Two buttons for the vertical axis, if it can be logarithmic; the style sheet does the rest."""
    if not can_be_logarithmic(chart):
        return ""
    boxes = "".join(
        f'<label><input type="radio" name="{name}" value="{axis}"'
        f"{' checked' if chart.logarithmic == (axis == 'log') else ''}> {text}</label>"
        for axis, text in (("log", "logarithmic"), ("linear", "linear"))
    )
    return f"<fieldset>{boxes}</fieldset>\n"


def _heat_map(part: HeatMap) -> str:
    rows = []
    for name, shares in part.rows:
        cells = "".join(map(_share, shares))
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    note = f"\n<p><small>{escape(part.note)}</small></p>" if part.note else ""
    return _grid(part.columns, rows) + note


def _share(share: float | None) -> str:
    if share is None:
        return '<td class="cell">–</td>'
    colour, text = heat(share)
    style = f"--cell:{colour};background:{colour};color:{text}"
    return f'<td class="cell" style="{style}">{100 * share:.0f}</td>'


def _table(section: Section) -> str:
    best = _best(section)
    rows = [_row(line, best) for line in section.lines[1:]]
    return _grid(section.lines[0], rows) + (f"\n{_list(section.notes)}" if section.notes else "")


def _grid(head: Line, rows: Sequence[str]) -> str:
    cells = "".join(f'<th scope="col">{_cell(cell)}</th>' for cell in head)
    body = "\n".join([f"<thead><tr>{cells}</tr></thead>", "<tbody>", *rows, "</tbody>"])
    return f'<div class="wide"><table>\n{body}\n</table></div>'


def _best(section: Section) -> dict[int, float]:
    """The best number of each column, by its index; empty if the section does not compare rows."""
    if section.best is None or len(section.lines) < 3:
        return {}
    choose = min if section.best == "lowest" else max
    found = {}
    for column in range(1, len(section.lines[0])):
        values = [_number(line[column]) for line in section.lines[1:]]
        known = [value for value in values if value is not None]
        if len(set(known)) > 1:
            found[column] = choose(known)
    return found


def _number(cell: str | TwoLines) -> float | None:
    """The number at the start of a cell; None for a dash and the like."""
    match = re.match(r"[-+]?[\d,]*\.?\d+", cell.text if isinstance(cell, TwoLines) else cell)
    return float(match[0].replace(",", "")) if match else None


def _row(line: Line, best: Mapping[int, float]) -> str:
    name = line[0].text if isinstance(line[0], TwoLines) else line[0]
    cells = "".join(
        f"<td{' class=best' if column in best and _number(cell) == best[column] else ''}>{_cell(cell)}</td>"
        for column, cell in enumerate(line[1:], start=1)
    )
    return f'<tr data-row="{escape(name)}"><th scope="row">{_cell(line[0])}</th>{cells}</tr>'


def _cell(cell: str | TwoLines) -> str:
    if isinstance(cell, TwoLines):
        return f"{escape(cell.text)}<small>{escape(cell.small)}</small>"
    return escape(cell)


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _data(path: Path) -> str:
    return f"data:{_MEDIA[path.suffix.lower()]};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
