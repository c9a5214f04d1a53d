"""External links are of known kinds and well formed. They are opened by hand, with tools/check_links.py.

Links between pages are checked by test_readme.py, and those of the site by test_site.py.
"""

from __future__ import annotations

import re
import urllib.error
from email.message import Message
from pathlib import Path
from typing import Any

import check_links
import pytest

from rope_extend.encodings import encoding_class, encoding_names

LINKS = check_links.links(check_links.pages())
ARXIV_ID = r"\d{2}(?:0[1-9]|1[0-2])\.\d{5}"
"""Year, month and number, as since 2015; all our sources have this form."""
KINDS = {
    "a paper": rf"https://arxiv\.org/abs/{ARXIV_ID}",
    "a repository": r"https://github\.com/[\w.-]+/[\w.-]+(?:/(?:releases/tag|blob|tree|issues|pull)/[\w./-]+)?",
    "a page of transformers": r"https://huggingface\.co/docs/[\w/.-]+",
    "a model": r"https://huggingface\.co/[\w-]+/[\w.-]+",
}
"""The kinds of links that pages may have."""


def test_links_are_found() -> None:
    assert len(LINKS) >= 30
    assert "docs/peers.md" in LINKS["https://github.com/dvlab-research/LongLoRA"]


@pytest.mark.parametrize("url", LINKS)
def test_a_link_is_of_a_known_kind(url: str) -> None:
    kinds = [kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, url)]
    assert kinds, f"{url} in {LINKS[url]} is none of: {', '.join(KINDS)}"


def test_sources_that_look_like_arxiv_ids_are_some() -> None:
    """And every one is linked from the page of its method."""
    papers = {encoding_class(name).paper for name in encoding_names()}
    ids = {paper for paper in papers if re.fullmatch(r"[\d.]+", paper)}
    assert len(ids) >= 20
    assert all(re.fullmatch(ARXIV_ID, paper) for paper in ids)
    assert {f"https://arxiv.org/abs/{paper}" for paper in ids} <= set(LINKS)


@pytest.mark.parametrize(
    "url", ["https://arxiv.org/abs/2313.00071", "https://arxiv.org/abs/2309.0007", "http://arxiv.org/abs/2309.00071",
            "https://example.com/", "https://github.com/someone"],
)  # fmt: skip
def test_a_wrong_link_is_noticed(url: str) -> None:
    assert not any(re.fullmatch(pattern, url) for pattern in KINDS.values())


def test_links_are_opened_and_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without a network: the three ways in which a link can answer."""

    class Opened:
        status = 200

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def urlopen(request: Any, timeout: float) -> Opened:
        if "gone" in request.full_url:
            raise urllib.error.HTTPError(request.full_url, 404, "Not Found", Message(), None)
        if "nowhere" in request.full_url:
            raise urllib.error.URLError("no such host")
        return Opened()

    monkeypatch.setattr(check_links.urllib.request, "urlopen", urlopen)
    page = tmp_path / "page.md"
    page.write_text(
        "[a](https://a.b/good), <https://a.b/gone>. See https://nowhere.b/x.\n[a](https://a.b/good)"
    )
    assert check_links.report(check_links.links([page]), check_links.answer) == 2
    assert capsys.readouterr().out == (
        "WRONG https://a.b/gone: status 404; in page.md\n"
        "ok    https://a.b/good\n"
        "WRONG https://nowhere.b/x: no such host; in page.md\n"
        "\n2 of 3 links are wrong\n"
    )
