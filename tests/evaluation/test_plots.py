"""Pictures show the measured numbers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from PIL import Image
from test_report import TRAINED, row, several_rows

import rope_extend as rx
from rope_extend.evaluation.evaluation_config import METHODS
from rope_extend.evaluation.results import RetrievalResult, Scores
from rope_extend.plots import curves as plots
from rope_extend.plots.retrieval_maps import plot_accuracy, plot_heat_map
from rope_extend.plots.style import Canvas, method_colour
from rope_extend.units import format_length

SAVE = Canvas.save


@pytest.fixture
def rows() -> list[rx.EvaluationRow]:
    return several_rows()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Canvas]:
    """All pictures that were saved. They are laid out and not written, which takes as long again."""
    pictures: list[Canvas] = []

    def save(self: Canvas) -> Path:
        pictures.append(self)
        self.figure.draw_without_rendering()
        return self.path

    monkeypatch.setattr(Canvas, "save", save)
    return pictures


def lines(axes: Axes) -> dict[str, matplotlib.lines.Line2D]:
    return {line.get_label().strip(): line for line in axes.lines if not line.get_label().startswith("_")}


def test_perplexity_is_drawn_as_measured(rows, drawn, tmp_path: Path) -> None:
    """But a control that scored some of the targets beyond its window."""
    some = {32: 93, 64: 100, 128: 200, 256: 300}
    rows.append(row("some", None, 2.2, protocol="cropped", window=32, blocks=2, tokens=some))
    path = plots.plot_perplexity(rows, tmp_path / "deep" / "perplexity.png")
    axes = drawn[0].axes
    assert axes.get_title(loc="left") == "Perplexity by length"
    assert lines(axes).keys() == {r.label for r in rows[:-1]}
    for r in rows[:-1]:
        x, y = lines(axes)[r.label].get_data()
        assert dict(zip(x, y, strict=True)) == r.result.levels
    assert rows[-1].result.levels.keys() == {32} < rows[0].result.levels.keys()
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["32", "64", "128", "256"]
    assert any(list(line.get_xdata()) == [TRAINED, TRAINED] for line in axes.lines)
    assert path == tmp_path / "deep" / "perplexity.png"
    with Image.open(SAVE(drawn[0])) as image:
        assert image.width == 1160
        assert len(image.convert("RGB").getcolors(2**20)) > 100
    (legend,), figure = drawn[0].figure.legends, drawn[0].figure
    figure.draw_without_rendering()
    assert legend.get_window_extent().y1 <= axes.get_tightbbox().y0 + 1  # below the axes, on no line


def test_colours_and_dashes_distinguish_methods_and_training(rows, drawn, tmp_path: Path) -> None:
    plots.plot_perplexity(rows, tmp_path / "a.png")
    found = lines(drawn[0].axes)
    colour = {label: to_hex(line.get_color()) for label, line in found.items()}
    assert colour["linear"] == colour["linear + LoRA"]
    assert colour["YaRN"] == colour["YaRN + LoRA"]
    assert len({colour[label] for label in ("plain RoPE", "linear", "YaRN", "short")}) == 4
    assert (found["YaRN + LoRA"].get_linestyle(), found["YaRN"].get_linestyle()) == ("-", "--")
    assert found["linear"].get_marker() == found["linear + LoRA"].get_marker() != found["YaRN"].get_marker()
    assert found["LoRA, cropped"].get_linestyle() == ":"
    # Rows that dashes cannot distinguish have different shades, and methods of one colour other markers.
    several = [row("yarn (one)", "yarn", 2.0), row("yarn (two)", "yarn", 2.1), row("linear", "linear", 3.0)]
    several += [row(method, method, 2.5) for method in ("dynamic_yarn", "self_extend")]
    plots.plot_perplexity(several, tmp_path / "b.png")
    styles = {(to_hex(line.get_color()), line.get_marker()) for line in lines(drawn[1].axes).values()}
    assert len(styles) == 5
    assert len({colour for colour, _ in styles}) == 5


def test_the_methods_of_a_report_have_colours_that_the_colour_blind_distinguish() -> None:
    """Without the difference of red and green, or of blue and yellow (Viénot 1999, Machado 2009)."""
    colours = np.array([to_rgb(method_colour(method)) for method in METHODS])
    for blind in (
        [[0.1122, 0.8878, 0], [0.1122, 0.8878, 0], [0.004, -0.004, 1]],
        [[0.2928, 0.7072, 0], [0.2928, 0.7072, 0], [-0.0223, 0.0223, 1]],
        [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
    ):
        seen = np.clip(colours**2.2 @ np.transpose(blind), 0, 1) ** (1 / 2.2)
        apart = np.linalg.norm(seen[:, None] - seen[None], axis=-1) + np.eye(len(METHODS))
        assert apart.min() > 0.1


def test_values_that_are_not_finite_leave_a_gap(drawn, tmp_path: Path) -> None:
    bad = row("bad", "ntk", 1.0, ppl={32: 10.0, 64: math.inf, 128: math.nan})
    worse = row("worse", "yarn", 1.0, block_nll=np.full((3, 256), math.nan))
    worse = replace(worse, result=replace(worse.result, ppl={32: math.nan, 256: math.nan}))
    plots.plot_perplexity([bad, worse], tmp_path / "a.png")
    assert list(lines(drawn[0].axes)["bad"].get_xdata()) == [32]
    assert [*lines(drawn[0].axes)] == ["bad"]
    control = replace(worse, label="c", encoding=None)
    control = replace(control, result=replace(control.result, protocol="cropped", window=32))
    for some in ([bad, worse], [worse, control], [row("good", "ntk", 1.0, ppl=worse.result.ppl), control]):
        plots.plot_loss_by_position(some, tmp_path / "b.png")


def test_loss_by_position_is_the_mean_of_each_group(drawn, tmp_path: Path) -> None:
    losses = np.where(np.arange(256) < 64, 2.0, 5.0) * (np.arange(256) > 0)
    steps = row("steps", "yarn", 1.0, block_nll=np.tile(losses, (3, 1)))
    plots.plot_loss_by_position([steps], tmp_path / "a.png")
    assert drawn[0].axes.get_xlabel() == "position in the document, tokens"
    x, y = lines(drawn[0].axes)["steps"].get_data()
    assert (np.diff(x) > 0).all()
    assert (y[x < 64] == 2).all()
    assert (y[x >= 64] == 5).all()
    assert len(x) == 16


def test_loss_by_position_says_what_a_longer_context_gives(drawn, tmp_path: Path) -> None:
    """With a control: the change of perplexity in percent. A row of another text has none."""
    shape = np.tile(5.0 * (np.arange(256) > 0), (3, 1))
    spread = np.outer([0.01, 0.0, -0.01], np.arange(256) > 127)

    def at(label: str, nats: float, method: str = "yarn", **changes: Any) -> rx.EvaluationRow:
        return row(label, method, 1.0, block_nll=shape + nats * (np.arange(256) > 127) + spread, **changes)

    control = at("cropped", 0.0, "none", protocol="cropped", window=32)
    control = replace(control, result=replace(control.result, block_nll=shape))
    better, failed = at("better", -0.1), at("failed", 9.0, "linear")
    other = at("other", 0, "ntk", data="f" * 16)
    plots.plot_loss_by_position([control, better, failed, other], tmp_path / "b.png")
    axes = drawn[0].axes
    assert [*lines(axes)] == ["better", "failed (partly above)"]  # the control is the line of no change
    x, y = lines(axes)["better"].get_data()
    np.testing.assert_allclose(y, np.where(x > 128, 100 * math.expm1(-0.1), 0), atol=1e-9)
    # 128 of the 224 targets beyond the window have the gain.
    gain = 100 * -math.expm1(-0.1 * 128 / 224)
    assert axes.get_title(loc="left") == f"better: {gain:.1f} % lower perplexity beyond 32"
    low, high = axes.get_ylim()
    assert low < 100 * math.expm1(-0.1) < 0 < high < 20  # what fails leaves the picture, and a gain fills it
    assert lines(axes)["better"].get_linewidth() > lines(axes)["failed (partly above)"].get_linewidth()
    # A row with an adapter: from the control that was trained too, as in the tables.
    trained = replace(control, label="trained", adapter="a")
    trained = replace(trained, result=replace(trained.result, block_nll=better.result.block_nll))
    plots.plot_loss_by_position([control, trained, replace(better, adapter="b")], tmp_path / "c.png")
    assert not lines(drawn[1].axes)["better"].get_ydata().any()
    assert drawn[1].axes.get_title(loc="left") == "No row clearly has lower perplexity beyond 32"
    # The largest gain may be unclear where a smaller one is clear: that one is named.
    unclear = at("unclear", -0.3)
    wide = unclear.result.block_nll + 60 * spread
    unclear = replace(unclear, result=replace(unclear.result, block_nll=wide))
    plots.plot_loss_by_position([control, unclear, better], tmp_path / "e.png")
    assert drawn.pop().axes.get_title(loc="left").startswith("better: ")
    # A gain over the weak control of earlier versions is no finding.
    weak = replace(control, result=replace(control.result, protocol="cropped-half"))
    plots.plot_loss_by_position([weak, better], tmp_path / "f.png")
    assert drawn.pop().axes.get_title(loc="left") == "Perplexity by position"
    # As in the verdict: without a trained control, the gain has that of training in it.
    alone = replace(better, adapter="b")
    plots.plot_loss_by_position([control, alone], tmp_path / "g.png")
    axes = drawn.pop().axes
    assert axes.get_title(loc="left") == "Perplexity by position"
    (said,) = (" ".join(text.get_text().split()) for text in axes.texts if "context" in text.get_text())
    assert said == (
        "compared with a cropped context before training; 3 documents; thick line: better; a gain may be "
        "that of its training alone"
    )
    plots.plot_loss_by_position(
        [control, alone, replace(at("less", -0.05), label="less")], tmp_path / "h.png"
    )
    assert drawn.pop().axes.get_title(loc="left").startswith("less: ")
    # The row that is nearest to its control is in the picture, and one far above is named as such.
    above = replace(failed, result=replace(failed.result, block_nll=shape + 9))
    plots.plot_loss_by_position([control, above, at("near", 0.4)], tmp_path / "d.png")
    assert "failed (above)" in lines(drawn[2].axes)
    assert drawn[2].axes.get_ylim()[1] > max(lines(drawn[2].axes)["near"].get_ydata()) > 40
    # That is an extended row, also where plain RoPE is nearer, and if all are far.
    plots.plot_loss_by_position([control, at("plain", 1, "none"), at("far", 3), above], tmp_path / "i.png")
    axes = drawn.pop().axes
    assert any("thick line: far" in text.get_text() for text in axes.texts)
    assert axes.get_ylim()[1] > max(lines(axes)["far"].get_ydata()) > 1900
    # Beside rows without training, it is the row that was trained.
    tuned = replace(at("tuned", 0.2), adapter="b")
    plots.plot_loss_by_position([control, trained, tuned, at("gain", -0.1)], tmp_path / "j.png")
    axes = drawn.pop().axes
    (said,) = (" ".join(text.get_text().split()) for text in axes.texts if "thick" in text.get_text())
    assert said == "each compared with its own control; 3 documents; thick line: tuned"
    assert axes.get_title(loc="left") == "tuned: 18.7 % higher perplexity beyond 32"


def test_pictures_of_retrieval_show_the_rates(drawn, tmp_path: Path) -> None:
    cells = [
        Scores("passkey", 1000, depth, tuple(float(n < solved) for n in range(10)))
        for depth, solved in ((0.7, 2), (0.8, 5), (0.9, 10))
    ]
    longer = [replace(cell, length=2048) for cell in cells]
    one = rx.EvaluationRow("one", trained_length=256, retrieval=RetrievalResult(tuple(cells)))
    plot_heat_map(one, "passkey", tmp_path / "map.png")
    assert drawn[0].axes.images[0].get_array().tolist() == [[20], [50], [100]]  # from shallow to deep
    shares = {
        text.get_text(): text.get_position() for text in drawn[0].axes.texts if text.get_text().isdigit()
    }
    assert shares == {"20": (0, 0), "50": (0, 1), "100": (0, 2)}
    plot_accuracy([one, replace(one, label="two")], "passkey", tmp_path / "line.png")
    (length,), (rate,) = drawn[1].axes.lines[0].get_data()
    assert rate == pytest.approx(170 / 3)
    (next_to_it,), _ = drawn[1].axes.lines[1].get_data()
    assert length < 1000 < next_to_it < 1.5 * length  # so that neither hides the other
    none = rx.EvaluationRow("none", retrieval=RetrievalResult((replace(cells[0], scores=(0.0,) * 10),)))
    plot_accuracy([one, none], "passkey", tmp_path / "one.png")
    plot_accuracy([none], "passkey", tmp_path / "none.png")
    titles = [picture.axes.get_title(loc="left") for picture in drawn[-2:]]
    assert titles == ["Retrieval against length: passkey", "passkey: no row solves any trial"]
    plot_heat_map(replace(one, retrieval=RetrievalResult((*cells, *longer))), "passkey", tmp_path / "two.png")
    axes = drawn[-1].axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [format_length(1000), "2k"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["70 %", "80 %", "90 %"]
