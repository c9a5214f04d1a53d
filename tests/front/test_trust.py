"""docs/trust.md: each promise names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in (ROOT / "docs" / "trust.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| Promise")
]


def test_there_are_promises() -> None:
    assert len(ROWS) > 20
    assert all(len(row) == 2 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_promise_names_tests_that_exist(row: tuple[str, str]) -> None:
    paths = re.findall(r"`((?:tests/)?[\w/]*(?:\.py|/))`", row[1])
    assert paths
    directory = ROOT
    for path in paths:
        full = ROOT / path if path.startswith("tests/") else directory / path
        assert full.exists(), path
        assert full.is_file() or list(full.glob("test_*.py"))
        directory = full.parent
