"""Plain English: words of the project's old dialect stay away, and sentences on pages stay short.

`CONTRIBUTING.md` has the glossary with the words to use instead.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(
            page
            for folder in ("docs", "configs", "examples", "benchmarks", "rope_extend")
            for page in (ROOT / folder).rglob("*.md")
        ),
    }
)
PYTHON = [
    file
    for folder in ("rope_extend", "patches", "scripts", "tools", "benchmarks", "examples", "tests")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if file != Path(__file__)
]
CONFIGS = sorted(file for folder in ("configs", "rope_extend") for file in (ROOT / folder).rglob("*.yaml"))
LONGEST_SENTENCE = 40

# A name in code is searched too: `memory_lever` has the word `lever`.
BANNED = (
    "foretell", "foretells", "foretold", "foretelling", "to be had", "rehearse", "rehearses", "rehearsed",
    "rehearsal", "rehearsals", "lever", "levers", "by degrees", "gone on with", "goes on with",
    "without a word", "stands still", "stand still", "turns nothing", "in the place of rotation",
    "in place of rotation", "comes apart", "beside", "so many", "held against",
)  # fmt: skip
# Between two words: spaces, a line break with a comment mark, or the seam of two string literals.
GAP = r"""(?:[\s_#]|["']\s*[rf]*["'])+"""


def pattern(phrase: str) -> re.Pattern[str]:
    """The phrase as words of prose or as parts of an identifier, across line breaks."""
    return re.compile(rf"(?<![a-z]){GAP.join(map(re.escape, phrase.split()))}(?![a-z])", re.IGNORECASE)


PATTERNS = {phrase: pattern(phrase) for phrase in BANNED}


def banned_phrases(text: str) -> list[tuple[int, str]]:
    """`(line, phrase)` of each banned phrase in a text."""
    lower = text.lower()
    return [
        (text.count("\n", 0, match.start()) + 1, phrase)
        for phrase, regex in PATTERNS.items()
        if all(word in lower for word in phrase.split())  # much faster than the expression
        for match in regex.finditer(text)
    ]


def sentences(page: str) -> list[str]:
    """The sentences of a Markdown page: no code, no tables, no headings, and each bullet by itself."""
    page = re.sub(r"^---\n.*?^---\n", "", page, count=1, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"^ *```.*?^ *```", "\n", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"<!--.*?-->", "\n", page, flags=re.DOTALL)
    page = re.sub(r"^(?: {4}\S| *\||#).*$", "\n", page, flags=re.MULTILINE)
    page = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", page)
    page = re.sub(r"`[^`]*`", "code", page)
    blocks = re.split(r"\n\s*\n|^\s*(?:[-*>]|\d+\.)\s+", page, flags=re.MULTILINE)
    return [
        " ".join(sentence.split())
        for block in blocks
        for sentence in re.split(r"(?<=[.!?])[\"')*]*\s+|:\n", block)
        if sentence.strip()
    ]


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def folder(file: Path) -> str:
    """The folder that a file is searched with: the first two of its path."""
    return "/".join(file.relative_to(ROOT).parts[:-1][:2]) or "."


FILES = [*PAGES, *CONFIGS, *PYTHON]


@pytest.mark.parametrize("group", sorted({folder(file) for file in FILES}))
def test_no_word_of_the_old_dialect(group: str) -> None:
    found = []
    for file in FILES:
        if folder(file) == group:
            text = file.read_text(encoding="utf-8").replace('"levers"', '"key"')  # of earlier checkpoints
            found += [f"{name(file)}:{line}: {phrase!r}" for line, phrase in banned_phrases(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_sentences_are_short(page: Path) -> None:
    long = [
        text for text in sentences(page.read_text(encoding="utf-8")) if len(text.split()) > LONGEST_SENTENCE
    ]
    assert not long, "\n".join(f"{len(text.split())} words: {text}" for text in long)


def test_phrases_are_seen_across_lines_and_in_names() -> None:
    """The search itself works: a test that cannot fail proves nothing."""
    text = 'a = 1  # it is to\n# be had here\nb = ("by "\n     f"degrees")\nmemory_lever = 2\nleverage = 3\n'
    assert sorted(banned_phrases(text)) == [(1, "to be had"), (3, "by degrees"), (5, "lever")]
