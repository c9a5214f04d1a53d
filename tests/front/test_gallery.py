"""The gallery: every picture shows the numbers of its encoding, and the page is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

import rope_extend as rx
from rope_extend.cli.main import main
from rope_extend.encodings import encoding_names
from rope_extend.plots import gallery

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    figures: list[Figure] = []
    save = gallery.save
    monkeypatch.setattr(gallery, "save", lambda made, path: figures.append(made) or save(made, path))
    return figures


def test_the_page_is_what_the_code_says() -> None:
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    assert text == gallery.page("gallery"), "run python tools/draw_gallery.py"
    for exhibit in gallery.EXHIBITS:
        assert (DOCS / "gallery" / f"{exhibit.name}.png").exists()
        assert 2 <= len(re.findall(r"[.](?= |$)", exhibit.text)) <= 4, exhibit.name
        assert exhibit.papers
        assert set(exhibit.methods) <= set(encoding_names())


@pytest.mark.slow
def test_the_command_draws_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plot", "encodings", "--output", str(tmp_path / "pictures")])
    drawn = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert drawn == sorted(
        f"{exhibit.name}{suffix}" for exhibit in gallery.EXHIBITS for suffix in gallery.SUFFIXES
    )
    assert capsys.readouterr().out.count("written:") == len(drawn)
    for name in (name for name in drawn if name.endswith(".png")):
        pixels = imread(tmp_path / "pictures" / name)
        assert pixels.shape[1] > 600
        assert np.ptp(pixels[..., :3]) > 0.5  # something is drawn
    with pytest.raises(SystemExit, match="2"):
        main(["plot", "encodings", "--output", str(tmp_path / "pictures")])
    assert "exists; choose another directory" in capsys.readouterr().err


def test_matrices_show_the_bias_of_earlier_keys_alone(tmp_path: Path, figure: list[Figure]) -> None:
    gallery.draw_matrices(tmp_path / "a.png", "alibi", "ALiBi", tokens=12)
    panels = [axes for axes in figure[0].axes if axes.images]
    assert len(panels) == 4
    for axes, head in zip(panels, (0, 2, 4, 6), strict=True):
        values = np.ma.asarray(axes.images[0].get_array())
        for i, j in ((0, 0), (5, 2), (11, 0)):
            assert values[i, j] == pytest.approx(-(2.0 ** -(head + 1)) * (i - j))
        assert values.mask[2, 5]


def test_clocks_stand_where_the_angles_are(tmp_path: Path, figure: list[Figure]) -> None:
    gallery.draw_clocks(tmp_path / "a.png", pairs=(0, 8), positions=3)
    hands = [line.get_xydata() for line in figure[0].axes[0].lines if len(line.get_xdata()) == 2]
    assert len(hands) == 6
    for (start, end), (pair, position) in zip(hands, [(p, n) for p in (0, 8) for n in range(3)], strict=True):
        angle = np.arctan2(*(end - start)[::-1])
        assert np.cos(angle - position * 10_000 ** (-2 * pair / 64)) == pytest.approx(1)


def test_vectors_are_those_of_the_encoding(tmp_path: Path, figure: list[Figure]) -> None:
    gallery.draw_vectors(tmp_path / "a.png", positions=20)
    drawn = torch.from_numpy(np.asarray(figure[0].axes[0].images[0].get_array()))
    made = rx.encoding("sinusoidal")
    assert torch.equal(drawn, made.vectors(gallery.MODEL, torch.arange(20), {}))  # type: ignore[attr-defined]
