"""The trackers and the memory of a run, and the report at its end."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState, tracking
from accelerate.tracking import GeneralTracker
from cases import TRAINED
from runs import TARGET, metrics, settings

from rope_extend import RopeExtendError
from rope_extend.plots import training_curves as plots
from rope_extend.report.tables import number
from rope_extend.training.finetune import Recipe, finetune, plan
from rope_extend.training.metrics import check_trackers
from rope_extend.training.run_report import RunLog, write_training_report


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    return Recipe(**{**settings(work), "steps": 4, "save_every": 0}, output_dir=str(tmp_path / "run"))


class Recorder(GeneralTracker):
    """A tracker that records what it receives."""

    name = "recorder"
    requires_logging_directory = False
    seen: list[tuple[str, Any, Any]]

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.seen.append(("start", run_name, None))

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.seen.append(("config", values, None))

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.seen.append(("log", values, step))

    def finish(self) -> None:
        self.seen.append(("finish", None, None))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    """A tracker that is registered like those of accelerate."""
    Recorder.seen = []
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    return Recorder


def test_every_tracker_gets_every_line(recipe: Recipe, work: Path, recorder: type[Recorder]) -> None:
    recipe = replace(recipe, trackers=("tensorboard", "recorder"), eval_data=str(work / "data"), eval_every=2)
    finetune(recipe)
    kinds = [kind for kind, *_ in recorder.seen]
    assert kinds == ["start", "config", *["log"] * 7, "finish"]
    assert recorder.seen[0][1] == "rope_extend"
    assert recorder.seen[1][1]["target_length"] == str(TARGET)
    logged = [(step, values) for kind, values, step in recorder.seen if kind == "log"]
    assert [step for step, _ in logged] == [0, 1, 2, 2, 3, 4, 4]
    for (step, values), line in zip(logged, metrics(recipe.output_dir), strict=True):
        curve = {f"perplexity/{length}": value for length, value in line.pop("perplexity", {}).items()}
        line.pop("eval_data", None)
        assert {"step": step, **values} == line | curve
    assert list(Path(recipe.output_dir, "tensorboard").glob("events.*"))


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboard"), ("comet_ml", "comet-ml")])
def test_a_missing_tracker_is_named_before_an_accelerator_exists(
    name: str, package: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then accelerate cannot log, and its own check logs."""
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr(tracking, "_available_trackers", [])
    message = rf"tracker {name} is missing; pip install {package}"
    with pytest.raises(RopeExtendError, match=message):
        check_trackers([name])
    for run in (plan, finetune):
        with pytest.raises(RopeExtendError, match=message):
            run(replace(recipe, trackers=(name,)))
    assert not Path(recipe.output_dir).exists()
    # Planned for another machine, which may have it.
    assert plan(replace(recipe, trackers=(name,)), limit_memory=10**9, elsewhere=True)


def test_a_tracker_that_does_not_start_is_one_clear_error(
    recipe: Recipe, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Recorder) -> None:
        raise ConnectionError("no such server")

    monkeypatch.setattr(recorder, "start", fail)
    with pytest.raises(
        RopeExtendError, match=r"tracker recorder does not start: no such server.*leave it out"
    ):
        finetune(replace(recipe, trackers=("recorder",)))


def test_trackers_are_known_by_name() -> None:
    required = {"model": "m", "data": "d", "output_dir": "o", "target_length": 64}
    for given in (["wandb", "tensorboard"], "wandb,tensorboard", ("wandb", "wandb", "tensorboard")):
        assert Recipe(**required, trackers=given).trackers == ("wandb", "tensorboard")
    with pytest.raises(RopeExtendError, match=r"trackers must be .*mlflow.*wandb.*; got 'wandbb'"):
        Recipe(**required, trackers=["wandbb"])


def test_metrics_have_memory(recipe: Recipe) -> None:
    finetune(replace(recipe, steps=2))
    lines = metrics(recipe.output_dir)
    assert len(lines) == 2
    assert all(line["peak_memory_bytes"] > 2**20 for line in lines)


@pytest.fixture(scope="module")
def reported(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with evaluations and its report. Tests change only copies of it."""
    directory = tmp_path_factory.mktemp("reported") / "run"
    changes = {"steps": 4, "save_every": 0, "eval_data": str(work / "data"), "eval_every": 2,
               "eval_documents": 1, "output_dir": str(directory)}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", work / "cache")
        finetune(Recipe(**{**settings(work), **changes}))
    return directory


@pytest.fixture
def run(reported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(reported, tmp_path / "run")


def cells(markdown: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.slow
def test_the_report_has_the_measurements(run: Path) -> None:
    assert sorted(path.name for path in (run / "report").iterdir()) == [
        "perplexity.png", "report.html", "report.md", "training.png",
    ]  # fmt: skip
    text = (run / "report" / "report.md").read_text()
    rows = cells(text)
    lines = metrics(run)
    curves = {line["step"]: line["perplexity"] for line in lines if "perplexity" in line}
    assert list(curves) == [0, 2, 4]
    for step, name in ((0, "before training"), (2, "after step 2"), (4, "after step 4")):
        shown = [float(cell.replace(",", "")) for cell in rows[name]]
        assert shown == pytest.approx(list(curves[step].values()), rel=5e-3)
    ratios = [curves[4][length] / curves[0][length] for length in curves[0]]
    assert [float(cell) for cell in rows["ratio, last to first"]] == pytest.approx(ratios, abs=5e-4)
    assert rows["steps"] == ["4"]
    assert rows["tokens"] == [f"{4 * 2 * TARGET:,}"]
    steps = [line for line in lines if "loss" in line]
    assert rows["norm of the gradient, largest"] == [f"{max(line['grad_norm'] for line in steps):.3g}"]
    html = (run / "report" / "report.html").read_text()
    assert html.count('role="img"') == 2
    for shown_in in (text, html):  # by the name of the recipe, because the run lies elsewhere
        assert "rope-extend finetune recipe.yaml --output-dir run-again" in shown_in
        assert str(run) not in shown_in
    assert not re.search(r'(src|href)="(?!data:|#)', html)
    assert "after step 4" in html
    card = (run / "README.md").read_text()
    assert list(cells(card)["before training, extended"]) == [number(v) for v in curves[0].values()]


@pytest.mark.slow
def test_perplexities_of_different_texts_are_not_compared(recipe: Recipe, work: Path) -> None:
    """A resumed run may be evaluated on other documents; what was measured before does not count then."""
    recipe = replace(
        recipe, data=str(work / "data" / "a.txt"), eval_data=str(work / "data" / "b.txt"), save_every=1
    )
    finetune(replace(recipe, steps=2))
    directory = Path(recipe.output_dir)
    other = replace(recipe, eval_data=str(work / "data" / "c.txt"), eval_every=1)
    result = finetune(replace(other, steps=4), resume=True)
    curves = {line["step"]: line["perplexity"] for line in metrics(directory) if "perplexity" in line}
    assert list(curves) == [0, 2, 3, 4]
    assert {str(length): value for length, value in result.perplexity.items()} == curves[4]
    card = cells((directory / "README.md").read_text())
    assert list(card["after training"]) == [number(value) for value in curves[4].values()]
    assert "before training, extended" not in card
    text = (directory / "report" / "report.md").read_text()
    assert {"after step 3", "after step 4"} <= cells(text).keys()
    assert not {"before training", "after step 2"} & cells(text).keys()
    assert "2 earlier evaluations on other text are left out" in text

    back = finetune(replace(recipe, steps=4), resume=directory / "checkpoints" / "step-3")
    before = cells((back.output_dir / "README.md").read_text())["before training, extended"]
    assert before == [number(value) for value in curves[0].values()]


@pytest.mark.slow
def test_the_same_text_at_other_lengths_is_compared(recipe: Recipe, work: Path) -> None:
    recipe = replace(recipe, data=str(work / "data" / "a.txt"), eval_data=str(work / "data" / "b.txt"))
    first = finetune(replace(recipe, steps=1)).perplexity
    for steps in (1, 2):  # finished, and continued
        result = finetune(replace(recipe, steps=steps, eval_lengths=(40, 64)), resume=True)
        assert set(result.perplexity) == {40, 64}
        rows = cells((result.output_dir / "README.md").read_text())
        curves = {
            line["step"]: line["perplexity"] for line in metrics(result.output_dir) if "perplexity" in line
        }
        assert rows["before training, extended"] == ["–", number(curves[0]["64"])]
        text = (result.output_dir / "report" / "report.md").read_text()
        assert {"before training", "after step 1"} <= cells(text).keys()
        assert "left out" not in text
    again = finetune(replace(recipe, steps=1), resume=result.output_dir / "checkpoints" / "step-1")
    assert first.items() <= again.perplexity.items()


@pytest.mark.slow
def test_evaluation_on_training_text_is_said(
    recipe: Recipe, work: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = work / "data"
    recipe = replace(recipe, steps=1, max_tokens=200, data=(str(data / "a.txt"), str(data / "b.txt")))
    finetune(replace(recipe, eval_data=str(data)))
    assert "2 of the 3 documents of eval_data are also training data" in caplog.text
    run = Path(recipe.output_dir)
    for file in (run / "README.md", run / "report" / "report.md"):
        assert "2 of the documents are also training data, so the text is not held out" in file.read_text()
        assert "on held-out text" not in file.read_text()
    caplog.clear()
    held_out = replace(recipe, eval_data=str(data / "c.txt"), output_dir=str(tmp_path / "held-out"))
    finetune(held_out)
    assert "also training data" not in caplog.text
    assert "on held-out text" in Path(held_out.output_dir, "README.md").read_text()


def test_a_report_replaces_the_one_before_whole_or_not_at_all(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in (run / "report").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("rope_extend.report.page.page", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_training_report(run, trained_length=TRAINED)
    assert {path.name: path.read_bytes() for path in (run / "report").iterdir()} == before
    (run / "report" / "old.txt").write_text("of an earlier run")
    assert write_training_report(run, trained_length=TRAINED) == run / "report"
    assert sorted(path.name for path in (run / "report").iterdir()) == sorted(before)
    assert not list(run.glob(".report*"))


def test_a_report_that_fails_does_not_fail_the_run(
    recipe: Recipe, work: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plots, "plot_training", lambda *_: 1 / 0)
    result = finetune(replace(recipe, eval_data=str(work / "data"), eval_documents=1))
    assert result.steps == 4
    assert "cannot write the training report" in caplog.text
    assert (result.output_dir / "adapter_model.safetensors").exists()
    assert not list(result.output_dir.glob("*report*"))


def test_an_incomplete_log_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(RopeExtendError, match="cannot read the metrics"):
        RunLog.read(path)
    path.write_text('{"step": 1, "skipped": 1}\n{"step": 2, "lo')
    with pytest.raises(RopeExtendError, match="no line of a step"):
        RunLog.read(path)
    lines = [{"step": 0, "perplexity": {"32": math.inf}}, {"step": 1, "loss": 2.0}, {"step": 2, "skipped": 1}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    log = RunLog.read(path)
    assert (log.values("loss"), log.curves, log.skipped) == ([2.0], {0: {32: math.inf}}, 1)
