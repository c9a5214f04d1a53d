"""CITATION.cff says what pyproject.toml says, and names no invented people."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_citation_agrees_with_the_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "type"} <= set(citation)
    assert (citation["title"], citation["version"], citation["license"]) == (
        project["name"], project["version"], project["license"],
    )  # fmt: skip
    assert citation["authors"] == [{"name": "The rope_extend authors"}]
