"""A report as one HTML page that needs no other file, no script and no network."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rope_extend.report.tables import Code, Section, Sentences, TwoLines, writable


@dataclass(frozen=True)
class Picture:
    """An SVG drawing inside the page, which follows the reader's light or dark theme.

    Attributes:
        heading: what it shows.
        svg: the `<svg>` element.
    """

    heading: str
    svg: str


def picture(heading: str, draw: Callable[..., object], *arguments: Any) -> Picture:
    """A drawing of `rope_extend.plots`.

    Args:
        heading: what it shows.
        draw: takes the arguments and the path of an SVG file to write.
        arguments: what it draws.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "picture.svg"
        draw(*arguments, path)
        text = path.read_text(encoding="utf-8")
    # Names such as `axes_1` would stand on a page as often as it has pictures.
    return Picture(heading, re.sub(r' id="[a-z0-9]+_\d+"', "", text[text.index("<svg") :]))


Part = Section | Sentences | Picture | Code | str
"""What a page is made of; a `str` is a paragraph."""


def page(title: str, lead: Sequence[str], parts: Sequence[Part], versions: Mapping[str, str]) -> str:
    """Write the page as HTML.

    Args:
        title: heading of the page.
        lead: paragraphs below the heading.
        parts: tables, pictures and paragraphs, in order.
        versions: versions of the software, by name.
    """
    kinds = [(type(part).__name__, part, _best(part)) for part in parts]
    return writable(_template().render(title=title, lead=lead, parts=kinds, versions=versions) + "\n")


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html")


def _best(part: Part) -> set[tuple[int, int]]:
    """Row and column of the best numbers of each column; empty if the rows do not compete."""
    if not isinstance(part, Section) or part.best is None or len(part.lines) < 3:
        return set()
    choose = min if part.best == "lowest" else max
    found = set()
    for column in range(1, len(part.lines[0])):
        values = {row: _number(line[column]) for row, line in enumerate(part.lines[1:], start=1)}
        known = {value for value in values.values() if value is not None}
        if len(known) > 1:
            found |= {(row, column) for row, value in values.items() if value == choose(known)}
    return found


def _number(cell: str | TwoLines) -> float | None:
    """The number at the start of a cell; None for a dash and the like."""
    match = re.match(r"[-+]?[\d,]*\.?\d+", cell.text if isinstance(cell, TwoLines) else cell)
    return float(match[0].replace(",", "")) if match else None
