"""The comparison of encodings that replace RoPE: one budget, and a page that shows the measured results."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import alternatives_page as pages
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from pretrain_corpus import CorpusReport, PretrainingCorpus

from rope_extend import RopeExtendError
from rope_extend.data.bundled import python_files, standard_library_dir
from rope_extend.encodings import AbsoluteEncoding, BiasEncoding, KernelEncoding, encoding_names
from rope_extend.plots import style
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
    recipes = [script.recipe_of(row, script.CONFIG, Path("runs")) for row in script.ROWS]
    long = [
        script.recipe_of(row, script.LONG_CONFIG, Path("runs"))
        for row in script.ROWS
        if row.label in script.LONG_ROWS
    ]
    assert len(long) == len(script.LONG_ROWS)
    assert {one.steps for one in long} == {2000}
    assert len({one.batch_size * one.gradient_accumulation * one.length for one in long}) == 1
    budgets = {(one.steps, one.batch_size * one.gradient_accumulation * one.length) for one in recipes}
    assert len(budgets) == 1
    assert len({one.output_dir for one in recipes}) == len(recipes)
    trained = [(one.lora_targets, one.train_norm_embed, one.learning_rate) for one in recipes]
    assert trained == [("all-linear", True, 3e-3)] * (len(recipes) - 1) + [("attention", False, 3e-3)]
    kinds = (AbsoluteEncoding, BiasEncoding, KernelEncoding)
    replaced = {name for kind in kinds for name in encoding_names(kind)}
    assert {one.method for one in recipes} == replaced | {"none", "yarn", "nope", "drope"}


def test_the_page_shows_the_measured_results(script: Any) -> None:
    short, long = (script.read(DOCS, name) for name in (script.SHORT_RESULTS, script.LONG_RESULTS))
    assert [one["label"] for one in short] == [row.label for row in script.ROWS]
    assert (DOCS / "alternatives.md").read_text(encoding="utf-8") == pages.page(short, long)
    with (DOCS / "alternatives" / "results.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == pages.table(short)
    assert len({one["tokens"] for one in short}) == 1
    assert len({(one["tokens"], one["text"], one["recipe"]["learning_rate"]) for one in long}) == 1
    assert imread(DOCS / "alternatives" / "perplexity.png").shape[1] > 600


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_pictures_show_the_measured_results(
    script: Any, suffix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Figure] = []

    def write(figure: Figure, path: Path, *_: Any, **__: Any) -> None:
        drawn.append(figure)
        path.touch()

    for module in (pages, style):
        monkeypatch.setattr(module, "write_figure", write)
    pages.draw(script.read(DOCS, script.SHORT_RESULTS), tmp_path / f"perplexity{suffix}")
    pages.draw_long(script.read(DOCS, script.LONG_RESULTS), tmp_path / f"long{suffix}")
    for name, figure in zip(("perplexity", "long"), drawn, strict=True):
        found = differences(written(DOCS / "alternatives" / f"{name}{suffix}"), contents(figure))
        assert not found, f"run python scripts/compare_alternatives.py --page: {found[:3]}"


def test_what_the_page_says_of_long_rows() -> None:
    def row(label: str, curve: dict[str, float]) -> dict[str, Any]:
        first, *_, last = curve.values()
        of = [{"256": value + 1, "2048": value} for value in (first, last)]
        by_step = {step: {"256": value + 1, "2048": value} for step, value in curve.items()}
        rate = {"yarn": 3000.0, "alibi": 2000.0, "nope": 4000.0, "none": 3000.0}[label]
        return {
            "label": label, "before": of[0], "after": of[1], "curve": by_step, "steps": 20,
            "tokens_per_second": rate,
        }  # fmt: skip

    yarn = row("yarn", {"0": 12.0, "10": 10.0, "20": 9.0})
    alibi, nope = row("alibi", {"0": 60.0, "20": 11.0}), row("nope", {"0": 170.0, "20": 40.0})
    said = " ".join(pages.long_says([yarn, alibi, nope]).split())
    assert "Not measured yet: `none`, `drope`, `t5_bias`, `kerple`, `fire`, `sandwich`." in said
    assert "`alibi`: 11.0, where `yarn` has 9.0 after the same training and 12.0 before." in said
    assert "At 256 tokens it is `alibi`: 12.0, where `yarn` has 10.0." in said
    assert "`alibi` reaches 11.0 at 2k after 20 steps; `yarn` was below that after 10." in said
    assert "Plain RoPE" not in said
    assert "With `nope`, a step takes 0.75 times as long as with `yarn`, and with `alibi` 1.50 times." in said
    early = row("alibi", {"0": 60.0, "20": 15.0})
    said = " ".join(pages.long_says([yarn, early, row("none", {"0": 80.0, "20": 9.5})]).split())
    assert "`yarn` was below that before any training." in said
    assert "Plain RoPE, `none`, has 9.5 and 10.5." in said
    assert "With `alibi`, a step takes 1.50 times as long as with `yarn`." in said
    table = pages.long_table([{**one, "tokens_per_second": 2034.6} for one in (yarn, alibi)])
    assert [line[-2:] for line in table] == [["1.00", "2,035"], ["1.22", "2,035"]]


@pytest.fixture
def small(script: Any, work: Path, tmp_path: Path, private_cache: None) -> list[str]:
    """The arguments that run the script on a tiny model."""
    config = tmp_path / "small.yaml"
    config.write_text(
        f"model: {work / 'model'}\ndata: {work / 'data'}\noutput_dir: unused\ntarget_length: 128\n"
        f"steps: 5\nbatch_size: 1\ngradient_accumulation: 1\nsave_every: 1\nlora_rank: 2\n"
        f"eval_data: {work / 'data'}\neval_lengths: [32, 128]\n"
    )
    script.CONFIG = config
    return ["--runs", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs")]


@pytest.mark.slow
def test_rows_are_trained_once_and_written(
    script: Any, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*small, "--rows", "none,alibi,nope"]
    script.main(arguments)
    shown = capsys.readouterr().out
    assert "[3/3] nope" in shown
    results = script.read(tmp_path / "docs", script.SHORT_RESULTS)
    assert [one["label"] for one in results] == ["none", "alibi", "nope"]
    for one in results:
        lines = (
            (tmp_path / "runs" / one["label"].replace(" ", "-") / "metrics.jsonl").read_text().splitlines()
        )
        measured = [values for line in lines if "perplexity" in (values := json.loads(line))]
        assert one["before"] == measured[0]["perplexity"]
        assert one["after"] == measured[-1]["perplexity"]
        assert (one["steps"], one["tokens"]) == (5, 5 * 128)
    assert len({one["before"]["128"] for one in results}) == len(results)
    assert np.ptp(imread(tmp_path / "docs" / "alternatives" / "perplexity.png")[..., :3]) > 0.5
    page = (tmp_path / "docs" / "alternatives.md").read_text()
    assert f"{results[1]['after']['128']:.1f}" in page

    again = tmp_path / "docs" / "alternatives.md"
    again.unlink()
    (tmp_path / "runs" / "alibi" / "rope_extend.json").unlink()  # an interrupted run has none
    shutil.rmtree(tmp_path / "runs" / "alibi" / "checkpoints" / "step-5")
    script.main(arguments)
    assert capsys.readouterr().out.count("already done") == 2
    timeless = [{**one, "seconds": 0} for one in script.read(tmp_path / "docs", script.SHORT_RESULTS)]
    assert timeless == [{**one, "seconds": 0} for one in results]
    assert again.read_text() == page
    again.unlink()
    script.main([*small, "--page"])
    assert again.read_text() == page

    shutil.rmtree(tmp_path / "runs")
    script.main([*small, "--rows", "alibi"])  # the others are kept
    assert [one["label"] for one in script.read(tmp_path / "docs", script.SHORT_RESULTS)] == [
        "none", "alibi", "nope",
    ]  # fmt: skip


@pytest.mark.slow
def test_long_rows_are_trained_once_on_one_text(
    script: Any, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each is known from the results of the page, also where its run is not there."""
    script.LONG_CONFIG = tmp_path / "long.yaml"
    script.LONG_CONFIG.write_text(script.CONFIG.read_text() + "eval_every: 2\n")
    long = ["--runs", str(tmp_path / "long"), *small[2:], "--long"]
    with pytest.raises(SystemExit):
        script.main([*long])
    assert "train them first, without --long" in capsys.readouterr().err
    script.main([*small, "--rows", "none"])
    with monkeypatch.context() as patch:
        patch.setattr(script, "pretraining_corpus", lambda: PretrainingCorpus((), CorpusReport()))
        with pytest.raises(RopeExtendError, match="long runs need 30,000,000; install the extras"):
            script.main([*long])
    assert not (tmp_path / "long" / "text").exists()
    files = tuple(path for path in python_files(standard_library_dir()) if path.parent.name == "json")
    monkeypatch.setattr(script, "pretraining_corpus", lambda: PretrainingCorpus(files, CorpusReport()))
    monkeypatch.setattr(script, "TEXT_BYTES", 20_000)
    for rows in ("yarn", "none,yarn"):
        script.main([*long, "--rows", rows])
    written_files = sorted((tmp_path / "long" / "text").iterdir())
    assert all(len(path.read_text()) >= 8_000 for path in written_files)
    assert 20_000 <= sum(path.stat().st_size for path in written_files) < 40_000
    assert capsys.readouterr().out.count("already measured") == 1
    results = script.read(tmp_path / "docs", script.LONG_RESULTS)
    assert [one["label"] for one in results] == ["none", "yarn"]
    for one in results:
        assert list(one["curve"]) == ["0", "2", "4", "5"]
        assert one["curve"]["5"] == one["after"] != one["curve"]["4"]
        assert one["text"] == script.text_identity(tmp_path / "long" / "text")
    shutil.rmtree(tmp_path / "long" / "yarn")
    script.main([*long, "--rows", "yarn"])
    assert not (tmp_path / "long" / "yarn").exists()
    written_files[0].write_text("other = 1\n" * 2_000)
    with pytest.raises(
        RopeExtendError, match="holds 'none' of another recipe or text, which differ in text;"
    ):
        script.main([*long, "--rows", "yarn"])


def test_results_of_another_recipe_are_refused(script: Any, small: list[str], tmp_path: Path) -> None:
    """Also of earlier versions, which have no recipe; before anything is trained."""
    recipe = script.recipe_of(script.ROWS[0], script.CONFIG, tmp_path)
    line = {
        "label": "none", "steps": 5, "block": 128, "documents": recipe.eval_documents,
        "after": {"32": 3.0, "128": 4.0}, "recipe": script.recipe_settings(recipe),
    }  # fmt: skip
    file = script.results_file(tmp_path / "docs", script.SHORT_RESULTS)
    recipes = {"none": recipe}
    script.check_known([line], recipes, "", file)
    script.check_known([{**line, "recipe": json.loads(json.dumps(line["recipe"]))}], recipes, "", file)
    for changes, name in (
        ({"recipe": {**line["recipe"], "learning_rate": 1.0}}, "learning_rate"),
        ({"recipe": {**line["recipe"], "lora_rank": 3}}, "lora_rank"),
        ({"after": {"32": 3.0, "64": 4.0}}, "lengths"),
        ({"text": "other"}, "text"),
    ):
        with pytest.raises(
            RopeExtendError, match=f"'none' of another recipe or text, which differ in {name};"
        ):
            script.check_known([{**line, **changes}], recipes, "", file)
    without = {name: value for name, value in line.items() if name != "recipe"}
    script.check_known([without], recipes, "", file)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({**without, "steps": 6}) + "\n")
    with pytest.raises(RopeExtendError, match="differ in steps"):
        script.main([*small, "--rows", "alibi"])
    file.write_text(json.dumps(without)[:-5] + "\n")
    with pytest.raises(RopeExtendError, match=r"line 1 of '.*results\.jsonl' is damaged"):
        script.main([*small, "--page"])
    file.unlink()
    with pytest.raises(RopeExtendError, match="there are no results"):
        script.main([*small, "--page"])


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
    with pytest.raises(RopeExtendError, match="which differ in learning_rate;"):
        script.main([*small, "--rows", "none", "--steps", "1"])
    small[-1] += "-other"
    with pytest.raises(RopeExtendError, match=r"learning_rate was 0.0002 and is 1.0"):
        script.main([*small, "--rows", "none", "--steps", "1"])
