"""The rows of a method in the tables of measurements, for its page on the site.

The site takes them from the pages when it is built, so they are those of the pages.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("results.md", "training_free.md", "alternatives.md")
"""Pages with a table of perplexities, each with its controls."""


def measured(name: str) -> str:
    """The tables of a method: the controls, and its own rows; without a row, a sentence that says so."""
    parts = []
    for page in PAGES:
        title, head, rule, rows = first_table((DOCS / page).read_text(encoding="utf-8"))
        ours = [row for row in rows if re.search(rf"\b{name}\b", label(row)) and not is_control(row)]
        if ours or name == "none":
            table = [head, rule, *(row for row in rows if is_control(row)), *ours]
            parts.append(f"Perplexity, from [{title}](../{page}):\n\n" + "\n".join(table))
    return "\n\n".join(parts) or "It has no row in the tables of perplexities yet."


def first_table(text: str) -> tuple[str, str, str, list[str]]:
    """The headings above the first table whose first column has no name, then its heading, rule and rows."""
    found = re.search(r"^\|\s+\|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    assert found is not None, "the page has no table whose first column has no name"
    above = re.findall(r"^(#+) (.*)$", text[: found.start()], re.MULTILINE)
    title = ": ".join(dict.fromkeys([above[0][1], above[-1][1]]))
    head, rule, *rows = found[0].splitlines()
    return title, head, rule, rows


def label(row: str) -> str:
    """The first cell."""
    return row.split("|")[1].strip()


def is_control(row: str) -> bool:
    """Whether the row is plain RoPE, or that with a cropped context."""
    return label(row) == "none" or label(row).startswith("none, cropped")
