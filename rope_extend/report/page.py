"""A report as Markdown, and as one HTML page that needs no other file, no script and no network."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_extend.report.tables import Code, Section, Sentences, TwoLines, markdown_text, writable
from rope_extend.report.versions import versions

TEXT, PAGE = "report.md", "report.html"


@dataclass(frozen=True)
class Picture:
    """A picture of a report. On the page it is an SVG drawing in the reader's light or dark theme.

    Attributes:
        heading: what it shows.
        draw: writes the picture into a file, in the format of its suffix.
        file: its name next to the report; None if only the page shows it.
    """

    heading: str
    draw: Callable[[Path], object]
    file: str | None = None

    def markdown(self) -> str:
        """A link to the file; empty without one."""
        return "" if self.file is None else f"![{markdown_text(self.heading)}]({self.file})"

    def svg(self) -> str:
        """The `<svg>` element."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "picture.svg"
            self.draw(path)
            text = path.read_text(encoding="utf-8")
        # Names such as `axes_1` would stand on a page as often as it has pictures.
        return re.sub(r' id="[a-z0-9]+_\d+"', "", text[text.index("<svg") :])


Part = Section | Sentences | Picture | Code | str
"""What a report is made of; a `str` is a paragraph."""


def markdown(parts: Sequence[Part]) -> str:
    """The parts as Markdown."""
    texts = [markdown_text(part) if isinstance(part, str) else part.markdown() for part in parts]
    return writable("\n\n".join(text for text in texts if text) + "\n")


def page(title: str, parts: Sequence[Part]) -> str:
    """The parts as an HTML page, with the versions of the software at its end."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    kinds = [(type(part).__name__, part, _best(part)) for part in parts]
    text = environment.get_template("page.html").render(title=title, parts=kinds, versions=versions())
    return writable(text + "\n")


def write_pages(directory: Path, title: str, parts: Sequence[Part]) -> list[str]:
    """Write `report.md`, `report.html` and the pictures that have a name; returns all names.

    Raises:
        OSError: a file cannot be written.
    """
    pictures = {part.file: part for part in parts if isinstance(part, Picture) and part.file is not None}
    for name, picture in pictures.items():
        picture.draw(directory / name)
    (directory / TEXT).write_text(
        f"# {writable(markdown_text(title))}\n\n{markdown(parts)}", encoding="utf-8"
    )
    (directory / PAGE).write_text(page(title, parts), encoding="utf-8")
    return [TEXT, PAGE, *pictures]


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


def _number(cell: Any) -> float | None:
    """The number at the start of a cell; None for a dash and the like."""
    match = re.match(r"[-+]?[\d,]*\.?\d+", cell.text if isinstance(cell, TwoLines) else cell)
    return float(match[0].replace(",", "")) if match else None
