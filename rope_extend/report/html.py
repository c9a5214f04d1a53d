"""A report as one HTML page that needs no other file, no script and no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rope_extend.report.tables import Line, Section, Sentences, TwoLines

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; overflow-wrap: normal; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #e4e4e4; }
th, td { vertical-align: top; white-space: nowrap; font-weight: normal; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 1px solid #777; font-weight: bold; }
small { color: #666; display: block; }
img { max-width: 100%; height: auto; }
li { margin: .2rem 0; }
"""


@dataclass(frozen=True)
class Picture:
    """A PNG file to embed in the page, and a description of it."""

    path: Path
    description: str


def page(
    title: str,
    lead: Sequence[str],
    parts: Sequence[Section | Sentences | Picture | str],
    versions: Mapping[str, str],
) -> str:
    """Write the page as HTML.

    Args:
        title: heading of the page.
        lead: paragraphs below the heading.
        parts: tables, pictures and paragraphs, in order.
        versions: versions of the software, by name.
    """
    body = [f"<h1>{escape(title)}</h1>", *map(_paragraph, lead), *map(_part, parts)]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style>\n'
        "</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<p><small>{escape(software)}</small></p>\n</body>\n</html>\n"
    )


def _part(part: Section | Sentences | Picture | str) -> str:
    if isinstance(part, str):
        return _paragraph(part)
    if isinstance(part, Sentences):
        items = "".join(f"<li>{escape(item)}</li>" for item in part.items)
        return f"<h2>{escape(part.heading)}</h2>\n<ul>{items}</ul>"
    if isinstance(part, Picture):
        return f'<p><img alt="{escape(part.description)}" src="{_data(part.path)}"></p>'
    head = "".join(f'<th scope="col">{_cell(cell)}</th>' for cell in part.lines[0])
    body = "\n".join(map(_row, part.lines[1:]))
    notes = "".join(f"<li>{escape(note)}</li>" for note in part.notes)
    return (
        f'<h2>{escape(part.heading)}</h2>\n<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>" + (f"\n<ul>{notes}</ul>" if notes else "")
    )


def _row(line: Line) -> str:
    name, *cells = map(_cell, line)
    return f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _cell(cell: str | TwoLines) -> str:
    if isinstance(cell, TwoLines):
        return f"{escape(cell.text)}<small>{escape(cell.small)}</small>"
    return escape(cell)


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _data(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
