"""External links are of known kinds and well formed. They are opened by hand, with tools/check_links.py.

Links between pages are checked by test_readme.py, and those of the site by test_site.py.
"""

from __future__ import annotations

import re

import check_links

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
    assert "docs/choose.md" in LINKS["https://github.com/dvlab-research/LongLoRA"]


def test_links_are_of_known_kinds() -> None:
    unknown = [url for url in LINKS if not any(re.fullmatch(pattern, url) for pattern in KINDS.values())]
    assert not unknown, unknown


def test_sources_that_look_like_arxiv_ids_are_some() -> None:
    """And every one is linked from the page of its method."""
    papers = {encoding_class(name).paper for name in encoding_names()}
    ids = {paper for paper in papers if re.fullmatch(r"[\d.]+", paper)}
    assert len(ids) >= 20
    assert all(re.fullmatch(ARXIV_ID, paper) for paper in ids)
    assert {f"https://arxiv.org/abs/{paper}" for paper in ids} <= set(LINKS)
