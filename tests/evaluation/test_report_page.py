"""The page of a report: one file with drawings and tables, in which no name can do harm."""

from __future__ import annotations

import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

from test_report import row

from rope_extend.plots.curves import plot_perplexity
from rope_extend.report.page import Picture, markdown, page
from rope_extend.report.tables import Code, Section

HOSTILE = '<script>alert("&\'")</script>{{ 7 * 7 }}'


class Tags(HTMLParser):
    """The elements of a page; fails if they are not properly nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        assert tag not in self.open or tag not in ("p", "table", "li", "h2")
        self.open += [] if tag == "meta" else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """As in SVG."""
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_no_name_can_leave_its_place(tmp_path: Path) -> None:
    rows = [row(HOSTILE, "yarn", 2.0)]
    parts = [
        Picture(HOSTILE, partial(plot_perplexity, rows)), HOSTILE, Section(HOSTILE, notes=[HOSTILE]),
        Code(HOSTILE, HOSTILE),
        Section(HOSTILE, [["", HOSTILE], [HOSTILE, HOSTILE]], [HOSTILE]),
    ]  # fmt: skip
    text = page(HOSTILE, parts)
    tags = Tags(text)
    assert "script" not in {tag for tag, _ in tags.found}
    assert "".join(tags.texts).count(HOSTILE) >= 11
    assert 'src="' not in text  # it needs no other file
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    for needed in ('<meta charset="utf-8">', "width=device-width, initial-scale=1", "max-width: 100%"):
        assert needed in text
    assert text.count("<table>") == text.count('<div class="wide"><table>') == 1  # wide tables scroll


def test_drawings_are_inside_and_have_no_name_twice(tmp_path: Path) -> None:
    rows = [row("a", "yarn", 2.0), row("b", "linear", 3.0)]
    text = page("t", [Picture("p", partial(plot_perplexity, rows))] * 2)
    assert text.count("<svg") == 2
    tags = Tags(text)
    names = [attributes["id"] for tag, attributes in tags.found if "id" in attributes]
    parts = [name for name in names if str(name).startswith("part-")]
    assert parts == ["part-1", "part-2"]
    assert not [name for name in names if re.fullmatch(r"[a-z0-9]+_\d+", str(name))]


def test_markdown_shows_every_text_as_it_is() -> None:
    fences = [line for line in Code("Text", "a\n````\nb").markdown().splitlines() if line.startswith("`")]
    assert fences == ["`````", "````", "`````"]
    text = markdown(
        [Section("[h](x)", [["", "a|b"], ["<c>", "\n# d"]], ["> e"]), Section("s", notes=["# f"]), "`g`"]
    )
    assert text == (
        "\\[h\\](x):\n\n|       | a\\|b |\n| ----- | ---: |\n| \\<c\\> | \\# d |\n\n- \\> e\n\n"
        "s:\n\n- \\# f\n\n\\`g\\`\n"
    )
