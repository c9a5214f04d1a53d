"""The metrics of a run: what trackers and the card get, and which perplexities are compared."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import metrics
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from rope_extend import RopeExtendError
from rope_extend.report.tables import number
from rope_extend.training.finetune import Recipe, finetune
from rope_extend.training.step_plan import plan

SEEN: list[tuple[str, Any, Any]] = []


class Recorder(TrainerCallback):  # type: ignore[misc]
    """A tracker that records what it receives."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        SEEN.append(("start", args.run_name, None))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        SEEN.append(("log", dict(logs), state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        SEEN.append(("finish", None, None))


def test_the_metrics_end_with_the_run(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of later steps, which were lost with their checkpoint, are of no weights that are there."""
    directory = finetune(replace(recipe, steps=4, save_every=2)).output_dir
    written = metrics(directory)
    shutil.rmtree(directory / "checkpoints" / "checkpoint-4")
    monkeypatch.setattr("transformers.trainer_utils.logger.warning_once", pytest.fail)  # of other arguments
    assert finetune(replace(recipe, steps=2, save_every=2), resume=True).steps == 2
    assert metrics(directory) == written[:2]


def test_every_tracker_gets_every_line(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "recorder", Recorder)
    names = ("tensorboard", "recorder")
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", lambda: names)
    finetune(replace(recipe, trackers=names, eval_data=recipe.data, steps=4, eval_every=2))
    assert [kind for kind, *_ in SEEN] == ["start", *["log"] * 7, "finish"]
    assert SEEN[0][1] == "run"
    logged = [(step, values) for kind, values, step in SEEN if kind == "log"]
    assert [step for step, _ in logged] == [0, 1, 2, 2, 3, 4, 4]
    for (step, values), line in zip(logged, metrics(recipe.output_dir), strict=True):
        curve = {f"perplexity/{length}": value for length, value in line.pop("perplexity", {}).items()}
        line.pop("eval_data", None)
        assert curve or line["peak_memory_bytes"] > 2**20
        values.pop("epoch", None)
        assert {"step": step, **values} == line | curve
    assert list(Path(recipe.output_dir, "checkpoints", "runs").rglob("events.*"))


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboard"), ("comet_ml", "comet-ml")])
def test_a_missing_tracker_is_named(
    name: str, package: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", list)
    message = rf"tracker {name} is not installed; pip install {package}, or use one of .*mlflow.*wandb"
    for run in (plan, finetune):
        with pytest.raises(RopeExtendError, match=message):
            run(replace(recipe, trackers=(name,)))
    assert not Path(recipe.output_dir).exists()
    # Planned for another machine, which may have it.
    assert plan(replace(recipe, trackers=(name,)), limit_memory=10**9, elsewhere=True)


def cells(markdown: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows}


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

    shutil.rmtree(directory / "checkpoints" / "checkpoint-4")
    back = finetune(replace(recipe, steps=4, eval_lengths=(40, 64)), resume=True)
    assert set(back.perplexity) == {40, 64}
    before = cells((back.output_dir / "README.md").read_text())["before training, extended"]
    assert before == ["–", number(curves[0]["64"])]  # the same text, also at other lengths


@pytest.mark.slow
def test_evaluation_on_training_text_is_said(
    recipe: Recipe, work: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = work / "data"
    recipe = replace(recipe, steps=1, data=(str(data / "a.txt"), str(data / "b.txt")))
    finetune(replace(recipe, eval_data=str(data)))
    assert "2 of the 3 documents of eval_data are also training data" in caplog.text
    run = Path(recipe.output_dir)
    card = (run / "README.md").read_text()
    assert "2 of the documents are also training data, so the text is not held out" in card
    assert "on held-out text" not in card
    caplog.clear()
    held_out = replace(recipe, eval_data=str(data / "c.txt"), output_dir=str(tmp_path / "held-out"))
    finetune(held_out)
    assert "also training data" not in caplog.text
    assert "on held-out text" in Path(held_out.output_dir, "README.md").read_text()
