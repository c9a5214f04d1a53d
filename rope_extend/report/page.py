"""A report as Markdown, and as one HTML page that needs no other file, no script and no network."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rope_extend.report.tables import Code, Section, markdown_text, writable
from rope_extend.report.versions import versions

TEXT, PAGE = "report.md", "report.html"


@dataclass(frozen=True)
class Picture:
    """A picture of a report; on the page it is an SVG drawing, which a dark page inverts.

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
        # The background is that of the page. It is drawn first, for the figure and for the axes.
        text = text.replace('style="fill: #ffffff"', 'style="fill: none"', 2)
        # Names such as `axes_1` would stand on a page as often as it has pictures.
        return re.sub(r' id="[a-z0-9]+_\d+"', "", text[text.index("<svg") :])


Part = Section | Picture | Code | str
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
    kinds = [(type(part).__name__, part) for part in parts]
    text = environment.get_template("page.html").render(title=title, parts=kinds, versions=versions())
    return writable(text + "\n")


def write_pages(directory: Path, title: str, parts: Sequence[Part]) -> list[str]:
    """Write `report.md`, `report.html` and the pictures that have a name; returns all names."""
    pictures = {part.file: part for part in parts if isinstance(part, Picture) and part.file is not None}
    for name, picture in pictures.items():
        picture.draw(directory / name)
    (directory / TEXT).write_text(
        f"# {writable(markdown_text(title))}\n\n{markdown(parts)}", encoding="utf-8"
    )
    (directory / PAGE).write_text(page(title, parts), encoding="utf-8")
    return [TEXT, PAGE, *pictures]
