"""docs/search.md: every figure of its tables and pictures is that of a line of docs/search/."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from results_lines import Line, read_lines
from search_page import draw, found_row, searches_of, section

from rope_extend.plots import style
from rope_extend.plots.contents import contents, differences, written
from rope_extend.searching.search_config import GENETIC, HELD_OUT_TABLES, PAPER_EVALUATIONS, RACE, RACE_SHARE

DOCS = Path(__file__).parents[2] / "docs"
FILES = sorted((DOCS / "search").glob("*.jsonl"))


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def measured(request: pytest.FixtureRequest) -> tuple[str, list[Line]]:
    """The name and the lines of a setting."""
    return request.param.stem, read_lines(request.param)


def test_the_page_shows_the_lines(measured: tuple[str, list[Line]]) -> None:
    name, lines = measured
    page = (DOCS / "search.md").read_text("utf-8")
    assert section(name, lines) in page, "run python scripts/measure_searches.py --page"


def test_pictures_show_the_lines(
    measured: tuple[str, list[Line]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, lines = measured
    drawn: list[tuple[str, Figure]] = []

    def write(figure: Figure, path: Path, *_: object) -> None:
        drawn.append((path.name, figure))
        path.touch()

    monkeypatch.setattr(style, "write_figure", write)
    draw(name, lines, tmp_path)
    assert len(drawn) == 4
    for file, (_, figure) in zip(
        sorted(tmp_path.iterdir()), sorted(drawn, key=lambda one: one[0]), strict=True
    ):
        found = differences(written(DOCS / "search" / file.name), contents(figure))
        assert not found, f"run python scripts/measure_searches.py --page: {found[:3]}"


def test_what_the_searches_cost(measured: tuple[str, list[Line]]) -> None:
    """LongRoPE's search has all of its evaluations, and the race a twentieth of their tokens."""
    searches = searches_of(measured[1])
    genetic, race = searches[GENETIC], searches[RACE]
    paper = PAPER_EVALUATIONS * genetic["documents"]
    held_out = genetic["cost"]["passes"] - paper
    assert 0 < held_out <= HELD_OUT_TABLES * len(found_row(genetic)["by_document"])
    assert race["cost"]["passes"] * RACE_SHARE <= paper


def test_scores_are_means_over_the_held_out_documents(measured: tuple[str, list[Line]]) -> None:
    for search in searches_of(measured[1]).values():
        for row in search["rows"]:
            assert row["score"] == pytest.approx(sum(row["by_document"]) / len(row["by_document"]), rel=1e-12)
            assert all(
                1 <= low <= high for low, high in zip(row["divisors"], row["divisors"][1:], strict=False)
            )
