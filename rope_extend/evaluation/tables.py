"""Tables that are written once and shown twice: as Markdown and as HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TwoLines(NamedTuple):
    """A cell with something beneath it in small letters, which Markdown leaves out."""

    text: str
    small: str


Line = Sequence["str | TwoLines"]


@dataclass(frozen=True)
class Section:
    """A table under a heading, with what one must know to read it.

    Attributes:
        heading: what it shows.
        lines: the head, then the rows; the first cell of each names it.
        notes: one sentence each.
    """

    heading: str
    lines: Sequence[Line]
    notes: Sequence[str] = ()

    def markdown(self, *, heading: bool = True) -> str:
        """The heading as a sentence, the table, and the notes as a list."""
        parts = [f"{self.heading}:"] if heading else []
        parts.append(markdown_table(self.lines))
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts)


def markdown_table(lines: Sequence[Line]) -> str:
    """A table whose columns are aligned in the text as well: names to the left, numbers to the right."""
    texts = [[cell.text if isinstance(cell, TwoLines) else cell for cell in line] for line in lines]
    widths = [max(2, *(len(line[column]) for line in texts)) for column in range(len(texts[0]))]
    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
        for line in (texts[0], rule, *texts[1:])
    )


def number(value: float | None) -> str:
    """A perplexity in three to five digits: 9.87, 98.7, 987, 9,877."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{2 if value < 20 else 1 if value < 200 else 0}f}"


def interval(low: float | None, high: float | None, form: str = "+.4f") -> str:
    """Both ends of an interval, or a dash where there is none."""
    return "–" if low is None or high is None else f"{signed(low, form)} … {signed(high, form)}"


def signed(value: float, form: str = "+.4f") -> str:
    """A difference with its sign; what rounds to nothing is no negative zero."""
    text = f"{value:{form}}"
    return text.replace("-", "+") if float(text) == 0 else text
