"""The rows of a method in the tables of measurements, for its page on the site.

The site takes them from the pages when it is built, so they are those of the pages.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
SECTIONS = (
    ("results.md", "On source code"),
    ("results.md", "On books"),
    ("results.md", "More methods"),
    ("training_free.md", "What they reach"),
    ("results.md", "Encodings instead of RoPE"),
)
"""Pages and their sections that begin with a table of perplexities, each with its controls."""


def measured(name: str) -> str:
    """The tables of a method: the controls, and its own rows; without a row, a sentence that says so."""
    parts, pattern = [], rf"\b({'longrope|searched.json' if name == 'longrope' else name})\b"
    for page, section in SECTIONS:
        title, head, rule, rows = first_table((DOCS / page).read_text(encoding="utf-8"), section)
        ours = [row for row in rows if re.search(pattern, label(row)) and not is_control(row)]
        if ours or name == "none":
            trained = any("LoRA" in label(row) for row in ours)
            controls = [row for row in rows if is_control(row) and (trained or "LoRA" not in label(row))]
            table = [head, rule, *controls, *ours]
            anchor = section.lower().replace(" ", "-")
            parts.append(f"Perplexity, from [{title}](../{page}#{anchor}):\n\n" + "\n".join(table))
    return "\n\n".join(parts) or "It has no row in the tables of perplexities yet."


def first_table(text: str, section: str) -> tuple[str, str, str, list[str]]:
    """The titles of page and section; heading, rule and rows of the first table without a first name."""
    found = re.search(r"^\|\s+\|.*\n(?:\|.*\n)+", text[text.index(f"\n## {section}\n") :], re.MULTILINE)
    assert found is not None, "the section has no table whose first column has no name"
    title = f"{text.removeprefix('# ').splitlines()[0]}: {section}"
    head, rule, *rows = found[0].splitlines()
    return title, head, rule, rows


def label(row: str) -> str:
    """The first cell."""
    return row.split("|")[1].strip()


def is_control(row: str) -> bool:
    """Whether the row is plain RoPE, trained or not, or that with a cropped context."""
    return re.match(r"none($|, cropped| \+ LoRA)", label(row)) is not None
