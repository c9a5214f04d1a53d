"""A whole search: its files, its result in other commands and stock transformers, resuming, mistakes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import TRAINED

import rope_extend as rx
from rope_extend.cli.main import main
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.journal import only_writer
from rope_extend.searching.evaluations import LOG, Evaluator
from rope_extend.searching.run_search import plan_search

TARGET = 2 * TRAINED
pytestmark = pytest.mark.usefixtures("private_cache")


def settings(work: Path, output: Path | None, **values: Any) -> rx.SearchConfig:
    return rx.SearchConfig(
        **{
            "model": str(work / "model"), "data": str(work / "data"), "target_length": TARGET, "documents": 1,
            "holdout": 2, "output": None if output is None else str(output), **values,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def searched(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small search."""
    output = tmp_path_factory.mktemp("search") / "out"
    rx.search(settings(work, output), progress=False)
    return output


def test_the_command_writes_an_encoding_and_a_log(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["search", str(work / "model"), "--target-length", str(TARGET), "--data", str(work / "data"),
               "--documents", "1", "--holdout", "2", "--output", str(tmp_path / "out")]  # fmt: skip
    main([*command, "--plan"])
    assert "at most 67 forward passes, 4,288 forward tokens" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    main(command)
    printed = capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "encoding.json", "evaluations.jsonl", "search.json",
    }  # fmt: skip
    summary = json.loads((tmp_path / "out" / "search.json").read_text())
    lines = (tmp_path / "out" / LOG).read_text().splitlines()[1:]
    assert summary["cost"]["evaluations"] == len(lines)
    counts = [len(json.loads(line)["losses"]) for line in lines]
    assert summary["cost"]["passes"] == sum(counts) <= 67
    assert summary["cost"]["forward_tokens"] == TARGET * summary["cost"]["passes"]
    scores = [row["score"] for row in summary["rows"]]
    assert scores == sorted(scores)
    assert {"linear", "ntk", "yarn", "llama3"} <= {row["label"] for row in summary["rows"]}
    assert not set(summary["documents"]) & set(summary["holdout"])
    assert summary["rows"][0]["label"] in printed


def test_other_commands_take_the_directory(work: Path, searched: Path) -> None:
    """And measure the loss by which it won."""
    config = EvaluationConfig(
        model=str(work / "model"), data=str(work / "data"), methods=("yarn", str(searched)),
        lengths=(TARGET,), retrieval=0, cropped=False, max_documents=1,
    )  # fmt: skip
    rows = rx.evaluate(config, progress=False)
    assert [row.label for row in rows] == ["yarn", searched.name]
    assert rows[1].encoding == rx.encoding(str(searched)).to_dict()


def unlike_time(output: Path) -> list[dict[str, Any]]:
    """The lines of a log, without their seconds."""
    lines = [json.loads(line) for line in (output / LOG).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_an_interrupted_search_loses_one_evaluation_and_ends_the_same(
    work: Path, searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, original, calls = tmp_path / "out", Evaluator._measure, []

    def measure(self: Evaluator, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(Evaluator, "_measure", measure)
    config = settings(work, output)
    with pytest.raises(KeyboardInterrupt):
        rx.search(config, progress=False)
    assert len(unlike_time(output)) == 8  # the first line, and seven evaluations
    assert [path.name for path in output.iterdir()] == [LOG]
    with pytest.raises(rx.RopeExtendError, match="holds an interrupted search; give resume=True"):
        rx.search(config, progress=False)
    with pytest.raises(rx.RopeExtendError, match=r"differ in seed \(0 there, 1 here\)"):
        rx.search(settings(work, output, seed=1), resume=True, progress=False)
    others = [str(work / "data" / f"{name}.txt") for name in "cba"]
    with pytest.raises(rx.RopeExtendError, match=r"differ in documents \("):
        rx.search(replace(config, data=others), resume=True, progress=False)
    rx.search(config, resume=True, progress=False)
    assert unlike_time(output) == unlike_time(searched)
    assert (output / "encoding.json").read_bytes() == (searched / "encoding.json").read_bytes()
    total = len(calls)
    with pytest.raises(rx.RopeExtendError, match=r"already holds .*overwrite=True"):
        rx.search(config, progress=False)
    again = rx.search(config, resume=True, progress=False)  # a finished one measures nothing
    assert len(calls) == total
    written = json.loads((searched / "search.json").read_text())
    assert json.loads(json.dumps(again.to_dict()["rows"])) == written["rows"]


def test_a_held_out_document_is_no_copy_of_a_searched_one(work: Path, tmp_path: Path) -> None:
    for name in "abc":
        shutil.copy(work / "data" / "a.txt", tmp_path / f"{name}.txt")
    with pytest.raises(rx.RopeExtendError, match="the data has 1, without copies"):
        rx.search(settings(work, None, data=str(tmp_path)), progress=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_length": TRAINED}, "target_length must exceed the trained window of 32 tokens"),
        ({"documents": 2}, "2 documents and 2 held-out ones of 64 tokens are needed, and the data has 3,"),
        ({"data": None}, "data is not set"),
        ({"holdout": 5}, "nothing is left of the budget"),
        ({"model": "no/model/here"}, "no/model/here"),
    ],
)  # fmt: skip
def test_mistakes_get_one_clear_error(values: dict[str, Any], message: str, work: Path) -> None:
    with pytest.raises(rx.RopeExtendError, match=message):
        rx.search(settings(work, None, **values), progress=False)


def test_nothing_is_overwritten_unless_asked(work: Path, searched: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(searched, output)
    (output / "mine.txt").write_text("mine")
    config = settings(work, output, seed=5)
    with pytest.raises(rx.RopeExtendError, match="choose one of them"):
        rx.search(config, resume=True, overwrite=True, progress=False)
    with pytest.raises(rx.RopeExtendError, match="target_length must exceed"):
        rx.search(settings(work, output, target_length=8), overwrite=True, progress=False)
    with only_writer(output, "search"), pytest.raises(rx.RopeExtendError, match="another search is writing"):
        rx.search(config, overwrite=True, progress=False)
    assert unlike_time(output) == unlike_time(searched)  # a mistake removes nothing
    rx.search(config, overwrite=True, progress=False)
    assert json.loads((output / "search.json").read_text())["config"]["seed"] == 5
    assert (output / "mine.txt").read_text() == "mine"
    other = tmp_path / "other"
    other.mkdir()
    (other / "search.json").write_text("mine")  # not of a search: there is no log
    with pytest.raises(rx.RopeExtendError, match=r"already holds search.json"):
        rx.search(settings(work, other), resume=True, progress=False)


def test_configs_are_complete_and_plans_need_no_data(work: Path) -> None:
    for file in sorted(Path(__file__).parents[2].glob("configs/search/*.yaml")):
        config = rx.SearchConfig.from_yaml(file, {"model": str(work / "model")})
        assert rx.SearchConfig.from_dict(config.to_dict()) == config
        assert plan_search(config).passes > 0
