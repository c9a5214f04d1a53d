"""Pictures on pages show what the code draws now, and what the table next to them says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from rope_extend.errors import RopeExtendError
from rope_extend.plots import curves, gallery, style
from rope_extend.plots.contents import contents, differences, written

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MEASURED = {
    "docs/perplexity.png": "rope-extend demo",
    "docs/alternatives/perplexity.png": "python scripts/compare_alternatives.py",
    "docs/training_free.png": "rope-extend plot perplexity, from the results that its page describes",
    "docs/interpolation_curve.png": "python benchmarks/run_benchmarks.py interpolation-curve --pictures docs",
}
"""Pictures of measurements, and what draws them again. Their numbers are not computed in a test."""


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would be written."""
    found: list[Figure] = []

    def write(figure: Figure, path: Path, *_: object) -> None:
        found.append(figure)
        path.touch()

    for module in (style, gallery):
        monkeypatch.setattr(module, "write_figure", write)
    return found


@pytest.mark.parametrize("exhibit", gallery.EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_the_gallery_is_what_the_code_draws(
    exhibit: gallery.Exhibit, figures: list[Figure], tmp_path: Path
) -> None:
    exhibit.draw(tmp_path / "picture.png")
    (figure,) = figures
    for suffix in gallery.SUFFIXES:
        found = differences(written(DOCS / "gallery" / f"{exhibit.name}{suffix}"), contents(figure))
        assert not found, f"run python scripts/draw_gallery.py: {found[:3]}"


def test_a_changed_picture_is_noticed(figures: list[Figure], tmp_path: Path) -> None:
    gallery.draw_spectra(tmp_path / "a.png")
    gallery.draw_spectra(tmp_path / "b.png", ("none", "linear", "yarn"))
    gallery.draw_decay(tmp_path / "c.png")
    before = contents(figures[0])
    assert not differences(before, contents(figures[0]))
    assert differences(before, contents(figures[1]))
    decay = contents(figures[2])
    for axes in figures[2].axes:
        line = axes.lines[0]
        line.set_ydata(np.asarray(line.get_ydata()) * 1.01)
    assert len(differences(decay, contents(figures[2]))) >= 2
    axes.lines[0].set_color("#123456")
    assert any("#123456" in text for text in differences(decay, contents(figures[2])))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_file_says_what_it_shows(suffix: str, tmp_path: Path) -> None:
    path, files = tmp_path / f"picture{suffix}", []
    for _ in range(2):
        canvas = style.Canvas(path, "A <title> & more", "below")
        canvas.axes.plot([1, 2], [3.0, np.nan], color="#0072B2")
        canvas.save()
        files.append(path.read_bytes())
    assert written(path) == contents(canvas.figure)
    assert written(path)[0]["texts"] == ["A <title> & more", "below"]
    assert written(path)[0]["lines"] == [["#0072b2", [1.0, 2.0], [3.0, None]]]
    assert files[0] == files[1]  # an equal figure makes an equal file


def test_pictures_on_pages_are_known() -> None:
    """A new picture is of the gallery, is listed above, or lies in a folder with its own test."""
    exhibits = {
        f"docs/gallery/{exhibit.name}{suffix}" for exhibit in gallery.EXHIBITS for suffix in gallery.SUFFIXES
    }
    for path in (*DOCS.glob("*.png"), *DOCS.glob("*.svg"), *(DOCS / "gallery").iterdir()):
        name = path.relative_to(ROOT).as_posix()
        if name in exhibits or name in MEASURED:
            continue
        written(path)  # says what it shows, so that its page can be compared with it


def test_a_picture_of_another_project_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text("<svg/>")
    with pytest.raises(RopeExtendError, match="does not say what it shows; draw it again"):
        written(tmp_path / "a.svg")


@dataclass(frozen=True)
class Row:
    """A row of a page's table of perplexities."""

    label: str
    method: str
    adapter: str | None
    trained_length: int
    result: Any


def rows_of_table(page: str) -> list[Row]:
    """The rows of the first table of perplexities on a page; lengths as in `4k`."""
    head, _, *lines = re.search(r"^\|\s+\|.*\n(?:\|.*\n)+", page, re.MULTILINE)[0].splitlines()  # type: ignore[index]
    lengths = [
        int(cell[:-1]) * 1024 if cell.endswith("k") else int(cell)
        for cell in (part.strip() for part in head.split("|")[2:-1])
    ]
    rows = []
    for line in lines:
        label, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
        ppl = dict(zip(lengths, map(float, cells), strict=True))
        result = SimpleNamespace(ppl=ppl, cropped="cropped" in label)
        adapter = "runs" if "LoRA" in label else None
        rows.append(Row(label, re.split(r"[ ,]", label)[0], adapter, 256, result))
    return rows


def test_the_picture_of_the_demonstration_is_that_of_the_table(figures: list[Figure], tmp_path: Path) -> None:
    """Redrawn from the rounded numbers of the table next to it."""
    page = (DOCS / "measuring.md").read_text("utf-8")
    assert "(perplexity.svg)" in page
    shown = written(DOCS / "perplexity.svg")
    assert shown == written(DOCS / "perplexity.png")
    curves.plot_perplexity(rows_of_table(page), 256, tmp_path / "a.png", title=shown[0]["texts"][0])
    (drawn,) = contents(figures[0])
    assert drawn["texts"] == shown[0]["texts"]
    assert len(drawn["lines"]) == len(shown[0]["lines"])
    for ours, theirs in zip(drawn["lines"], shown[0]["lines"], strict=True):
        assert ours[:2] == theirs[:2]  # colour and lengths
        assert ours[2] == pytest.approx(theirs[2], rel=6e-3)
