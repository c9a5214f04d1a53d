"""Parts of a report that can be shown as Markdown and as HTML: tables, sentences and code."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

Line = Sequence[str]
"""The cells of a line of a table."""


@dataclass(frozen=True)
class Section:
    """A table with a heading and notes, or notes alone.

    Attributes:
        heading: what the table shows.
        lines: the head, then the rows; the first cell of a row is its name. Empty for notes alone.
        notes: what a reader must know, one sentence each.
        lead: what the table says, before it; the first sentence is a paragraph of its own.
    """

    heading: str
    lines: Sequence[Line] = ()
    notes: Sequence[str] = ()
    lead: str = ""

    @property
    def paragraphs(self) -> list[str]:
        """The first sentence of the lead, and the others."""
        return [part for part in re.split(r"(?<=\.) ", self.lead, maxsplit=1) if part]

    def markdown(self, *, heading: bool = True) -> str:
        """The heading with a colon, the lead, the table, and the notes as a list."""
        texts = [[*map(markdown_text, line)] for line in self.lines]
        parts = [f"{markdown_text(self.heading)}:"] if heading else []
        parts += map(markdown_text, self.paragraphs)
        parts += [markdown_table(texts)] if texts else []
        parts += ["\n".join(f"- {markdown_text(note)}" for note in self.notes)] if self.notes else []
        return "\n\n".join(parts)


@dataclass(frozen=True)
class Code:
    """Lines of code, or of text that was generated, with a heading."""

    heading: str
    text: str

    def markdown(self) -> str:
        """The heading with a colon, and the lines in a block that none of them ends."""
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", self.text)), default=0))
        return f"{markdown_text(self.heading)}:\n\n{fence}\n{self.text}\n{fence}"


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: names to the left, numbers to the right."""
    widths = [max(2, *(len(line[column]) for line in lines)) for column in range(len(lines[0]))]
    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def markdown_text(value: object, longest: int = 1000) -> str:
    """A value as plain text of one line in Markdown, whatever it holds.

    Every value of a file that somebody else may have written goes through here, or through `markdown_code`:
    it starts no heading, line, link, picture, tag or code, and ends no cell of a table.
    """
    return re.sub(r"([\\`*\[\]<>|~]|^#)", r"\\\1", _one_line(value, longest))


def markdown_code(value: object, longest: int = 1000) -> str:
    """A value as code within a line of Markdown; a quote stands for a backtick, and a slash for a bar."""
    text = _one_line(value, longest).replace("`", "'").replace("|", "/")
    return f"`{text}`" if text else ""


def _one_line(value: object, longest: int) -> str:
    text = str(value)
    text = f"{text[:longest]}…" if len(text) > longest else text
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def writable(text: str) -> str:
    """A text that UTF-8 can hold: a question mark for each byte of a file's name that is not UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def number(value: float | None) -> str:
    """A perplexity with at least three digits: 9.87, 98.7, 987, 9,877; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{2 if value < 20 else 1 if value < 200 else 0}f}"


def interval(low: float | None, high: float | None, form: str = "+.4f") -> str:
    """Both ends of an interval, or a dash for None."""
    return "–" if low is None or high is None else f"{signed(low, form)} … {signed(high, form)}"


def signed(value: float, form: str = "+.4f") -> str:
    """A difference with its sign; zero is written as +0."""
    text = f"{value:{form}}"
    return text.replace("-", "+") if float(text) == 0 else text
