"""The comparison of encodings that replace RoPE: one budget, and a page that shows the measured results."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from rope_extend import RopeExtendError
from rope_extend.encodings import AbsoluteEncoding, BiasEncoding, KernelEncoding, encoding_names
from rope_extend.plots.contents import contents, differences, written

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "scripts" / "compare_alternatives.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_has_the_same_budget_and_no_encoding_is_left_out(script: Any) -> None:
    recipes = [script.recipe_of(row, Path("runs")) for row in script.ROWS]
    budgets = {(one.steps, one.batch_size * one.gradient_accumulation * one.length) for one in recipes}
    assert len(budgets) == 1
    assert len({one.output_dir for one in recipes}) == len(recipes)
    trained = [(one.lora_targets, one.train_norm_embed, one.learning_rate) for one in recipes]
    assert trained == [("all-linear", True, 3e-3)] * (len(recipes) - 1) + [("attention", False, 3e-3)]
    kinds = (AbsoluteEncoding, BiasEncoding, KernelEncoding)
    replaced = {name for kind in kinds for name in encoding_names(kind)}
    assert {one.method for one in recipes} == replaced | {"none", "yarn", "nope", "drope"}


def test_the_page_shows_the_measured_results(script: Any) -> None:
    results = script.read(DOCS)
    assert [one["label"] for one in results] == [row.label for row in script.ROWS]
    assert (DOCS / "alternatives.md").read_text(encoding="utf-8") == script.page(results)
    with (DOCS / "alternatives" / "results.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == script.table(results)
    assert len({one["tokens"] for one in results}) == 1
    assert imread(DOCS / "alternatives" / "perplexity.png").shape[1] > 600


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_shows_the_measured_results(
    script: Any, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(script, "write_figure", lambda figure, *_, **__: drawn.append(figure))
    script.draw(script.read(DOCS), Path(f"perplexity{suffix}"))
    found = differences(written(DOCS / "alternatives" / f"perplexity{suffix}"), contents(drawn[0]))
    assert not found, f"run python scripts/compare_alternatives.py --page: {found[:3]}"


@pytest.fixture
def small(script: Any, work: Path, tmp_path: Path, private_cache: None) -> list[str]:
    """The arguments that run the script on a tiny model."""
    config = tmp_path / "small.yaml"
    config.write_text(
        f"model: {work / 'model'}\ndata: {work / 'data'}\noutput_dir: unused\ntarget_length: 128\n"
        f"steps: 5\nbatch_size: 1\ngradient_accumulation: 1\nsave_every: 1\nanneal_steps: 0\nlora_rank: 2\n"
        f"eval_data: {work / 'data'}\neval_lengths: [32, 128]\n"
    )
    script.CONFIG = config
    return ["--runs", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs")]


@pytest.mark.slow
def test_rows_are_trained_once_and_written(
    script: Any, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*small, "--rows", "none,alibi,alibi annealed"]
    script.main(arguments)
    shown = capsys.readouterr().out
    assert "[3/3] alibi annealed" in shown
    results = script.read(tmp_path / "docs")
    assert [one["label"] for one in results] == ["none", "alibi", "alibi annealed"]
    assert [one["anneal_steps"] for one in results] == [0, 0, 1]
    for one in results:
        lines = (
            (tmp_path / "runs" / one["label"].replace(" ", "-") / "metrics.jsonl").read_text().splitlines()
        )
        measured = [values for line in lines if "perplexity" in (values := json.loads(line))]
        assert one["before"] == measured[0]["perplexity"]
        assert one["after"] == measured[-1]["perplexity"]
        assert (one["steps"], one["tokens"]) == (5, 5 * 128)
    assert results[1]["before"] == results[2]["before"] != results[0]["before"]
    assert results[1]["after"] != results[2]["after"]
    assert np.ptp(imread(tmp_path / "docs" / "alternatives" / "perplexity.png")[..., :3]) > 0.5
    page = (tmp_path / "docs" / "alternatives.md").read_text()
    assert f"{results[1]['after']['128']:.1f}" in page

    again = tmp_path / "docs" / "alternatives.md"
    again.unlink()
    (tmp_path / "runs" / "alibi" / "rope_extend.json").unlink()  # an interrupted run has none
    shutil.rmtree(tmp_path / "runs" / "alibi" / "checkpoints" / "step-5")
    script.main(arguments)
    assert capsys.readouterr().out.count("already done") == 2
    timeless = [{**one, "seconds": 0} for one in script.read(tmp_path / "docs")]
    assert timeless == [{**one, "seconds": 0} for one in results]
    assert again.read_text() == page
    again.unlink()
    script.main([*small, "--page"])
    assert again.read_text() == page


@pytest.mark.slow
def test_a_wrong_row_or_another_recipe_is_refused(
    script: Any, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main([*small, "--rows", "alibbi"])
    assert "--rows takes labels from this list: none,yarn,alibi" in capsys.readouterr().err
    script.main([*small, "--rows", "none", "--steps", "1"])
    text = script.CONFIG.read_text()
    script.CONFIG.write_text(text + "learning_rate: 1.0\n")
    with pytest.raises(RopeExtendError, match=r"learning_rate was 0.0002 and is 1.0"):
        script.main([*small, "--rows", "none", "--steps", "1"])
