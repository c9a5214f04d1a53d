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
from rope_extend.plots import curves, gallery, retrieval_maps, style
from rope_extend.plots.contents import contents, differences, written

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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
        assert not found, f"run python tools/draw_gallery.py: {found[:3]}"


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


FOLDERS = {"gallery", "methods/pictures", "alternatives", "results", "search", "."}
"""The folders of `docs/` with pictures."""


def test_every_picture_says_what_it_shows() -> None:
    pictures = {path for path in DOCS.rglob("*") if path.suffix in (".png", ".svg")}
    assert {path.parent.relative_to(DOCS).as_posix() for path in pictures} == FOLDERS
    own = {path.stem for path in DOCS.glob("*.png")}
    named = {"perplexity", "training_free", "training_free_passkeys"}
    assert own == named  # each has a test below
    for path in pictures:
        assert written(path), path


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
    page = (DOCS / "measuring.md").read_text("utf-8")
    assert "(perplexity.svg)" in page
    shown = written(DOCS / "perplexity.svg")
    assert shown == written(DOCS / "perplexity.png")
    compare_with_table(shown, rows_of_table(page), figures, tmp_path)


def test_the_picture_of_methods_without_training_is_that_of_the_table(
    figures: list[Figure], tmp_path: Path
) -> None:
    """It shows some of the rows: the control, and those that are not far above it."""
    page = (DOCS / "training_free.md").read_text("utf-8")
    shown = written(DOCS / "training_free.svg")
    assert shown == written(DOCS / "training_free.png")
    rows = [row for row in rows_of_table(page) if row.label in shown[0]["texts"]]
    assert len(rows) >= 6
    compare_with_table(shown, rows, figures, tmp_path)


def test_the_picture_of_passkeys_is_that_of_the_table(figures: list[Figure], tmp_path: Path) -> None:
    """Shares and their intervals, in whole percent on the page."""
    page = (DOCS / "training_free.md").read_text("utf-8").split("Passkeys found, of 20 prompts")[1]
    head, _, *lines = re.search(r"^\|\s+\|.*\n(?:\|.*\n)+", page, re.MULTILINE)[0].splitlines()  # type: ignore[index]
    lengths = [1024 * int(cell[:-1]) if "k" in cell else int(cell) for cell in head.replace("|", " ").split()]
    shown, rows = written(DOCS / "training_free_passkeys.png"), []
    for line in lines:
        label = line.split("|")[1].strip()
        shares = [[int(n) / 100 for n in each] for each in re.findall(r"(\d+)% \((\d+)–(\d+)\)", line)]
        rates = {
            n: SimpleNamespace(mean=a, low=b, high=c) for n, (a, b, c) in zip(lengths, shares, strict=True)
        }
        if label in shown[0]["texts"]:
            rows.append(
                SimpleNamespace(
                    label=label, method=label, adapter=None, trained_length=256, crop=None, tasks=["passkey"],
                    lengths=lambda task, found=rates: list(found),
                    rate=lambda task, length, found=rates: found[length],
                )
            )  # fmt: skip
    assert len(rows) >= 6
    retrieval_maps.plot_accuracy(rows, "passkey", tmp_path / "a.png", title=shown[0]["texts"][0])
    (drawn,) = contents(figures[0])
    assert drawn["texts"] == shown[0]["texts"]
    for kind in ("lines", "strokes"):
        assert len(drawn[kind]) == len(shown[0][kind]) >= 6
        for ours, theirs in zip(drawn[kind], shown[0][kind], strict=True):
            assert ours[0] == theirs[0]
            assert ours[1:] == [pytest.approx(numbers, abs=0.51) for numbers in theirs[1:]]


def compare_with_table(
    shown: list[dict[str, Any]], rows: list[Row], figures: list[Figure], folder: Path
) -> None:
    """A picture shows the rounded numbers of a table: half a unit of the third digit is 5e-3 of 1.00."""
    curves.plot_perplexity(rows, 256, folder / "a.png", title=shown[0]["texts"][0])
    (drawn,) = contents(figures[0])
    assert drawn["texts"] == shown[0]["texts"]
    assert len(drawn["lines"]) == len(shown[0]["lines"])
    for ours, theirs in zip(drawn["lines"], shown[0]["lines"], strict=True):
        assert ours[:2] == theirs[:2]  # colour and lengths
        assert ours[2] == pytest.approx(theirs[2], rel=6e-3)
