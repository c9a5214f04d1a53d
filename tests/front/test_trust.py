"""docs/trust.md: each promise names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in (ROOT / "docs" / "trust.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| Promise")
]


def test_promises_name_tests_that_exist() -> None:
    assert len(ROWS) > 20
    for _, tests in ROWS:
        paths = re.findall(r"`((?:tests/)?[\w/]*(?:\.py|/))`", tests)
        assert paths, tests
        directory = ROOT
        for path in paths:
            full = ROOT / path if path.startswith("tests/") else directory / path
            assert full.is_file() or list(full.glob("test_*.py")), path
            directory = full.parent
