"""External links are of known kinds and well formed. They are opened by hand, with tools/check_links.py.

Links between pages are checked by test_readme.py, and those of the site by test_site.py.
"""

from __future__ import annotations

import re

import check_links

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


ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in (check_links.ROOT / "docs" / "trust.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| Promise")
]
"""Each promise of docs/trust.md, and its tests."""


def test_promises_name_tests_that_exist() -> None:
    assert len(ROWS) > 20
    for _, tests in ROWS:
        paths = re.findall(r"`((?:tests/)?[\w/]*(?:\.py|/))`", tests)
        assert paths, tests
        directory = check_links.ROOT
        for path in paths:
            full = (check_links.ROOT if path.startswith("tests/") else directory) / path
            assert full.is_file() or list(full.glob("test_*.py")), path
            directory = full.parent
