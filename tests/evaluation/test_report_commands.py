"""Reports show the commands that made them: a copied line has the same settings, and no local path."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rope_extend.cli.main import parse
from rope_extend.cli.measure import model_config
from rope_extend.evaluation.commands import command_words, commands_part, how_it_was_made
from rope_extend.evaluation.evaluation_config import EvaluationConfig, ModelConfig, RetrievalConfig
from rope_extend.report.tables import Code
from rope_extend.study.study_config import StudyConfig

CONFIGS: list[tuple[str, type[ModelConfig], dict[str, Any]]] = [
    ("evaluate", EvaluationConfig, {"data": "books/*.txt"}),
    ("evaluate", EvaluationConfig, {
        "data": ["a b", "c"], "lengths": "4k,8k", "methods": ["none", "yarn(beta_fast=32,beta_slow=1)"],
        "cropped": False, "retrieval": 2, "retrieval_lengths": [8192], "samples": 1, "budget": "90min",
        "max_documents": 3, "limit_memory": "20GB", "attention": "eager", "trained_length": 4096,
        "output": "it's here",
    }),
    ("evaluate", EvaluationConfig, {"adapters": ["runs/a", "runs/b"], "save_losses": True}),
    ("evaluate", EvaluationConfig, {"adapters": ["runs/a"], "protocol": "sliding", "stride": 512}),
    ("retrieve", RetrievalConfig, {
        "tasks": ["passkey", "needle"], "depths": [0, 0.25, 1], "chat": False, "controls": False,
    }),
    ("report", StudyConfig, {"target_length": "32k", "tasks": [], "budget": 5400.5, "data": "books"}),
    ("evaluate", EvaluationConfig, {"data": ["-b", "c"], "max_documents": None}),
    ("evaluate", EvaluationConfig, {
        "data": "b", "adapters": ["-x", "y"], "text_column": "/t", "cropped": False,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("command", "cls", "values"), CONFIGS)
def test_a_copied_command_has_the_same_settings(
    command: str, cls: type[ModelConfig], values: dict[str, Any]
) -> None:
    config = cls.from_dict({"model": "owner/model", **values})
    line, file = how_it_was_made(command, config)
    name, *words = shlex.split(line.text)
    assert name == "rope-extend"
    assert model_config(cls, parse(words)) == config
    assert cls.from_dict(yaml.safe_load(file.text)) == config


def test_a_mapping_is_given_by_a_file() -> None:
    config = EvaluationConfig(model="owner/model", device_map={"": "cpu"})
    line, file = how_it_was_made("evaluate", config)
    assert line.text == "rope-extend evaluate settings.yaml"
    assert EvaluationConfig.from_dict(yaml.safe_load(file.text)) == config


@pytest.mark.parametrize("methods", [[], ["none", "a,b/encoding.json"]])
def test_methods_that_no_flag_can_name_are_given_by_a_file(
    methods: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a,b").mkdir()
    Path("a,b/encoding.json").write_text("{}")
    values = {"model": "owner/model", "adapters": ["runs/a"], "methods": methods, "target_length": "32k"}
    config = StudyConfig.from_dict(values)
    line, file = how_it_was_made("report", config)
    assert line.text == "rope-extend report settings.yaml"
    assert StudyConfig.from_dict(yaml.safe_load(file.text)) == config


def test_a_device_of_torch_is_written_by_its_name() -> None:
    config = EvaluationConfig(model="owner/model", device_map={"": torch.device("cpu"), "model.norm": 0})
    assert config.device_map == {"": "cpu", "model.norm": 0}
    _, file = how_it_was_made("evaluate", config)
    assert EvaluationConfig.from_dict(yaml.safe_load(file.text)) == config


def test_paths_are_those_seen_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home")
    config = EvaluationConfig(
        model=str(tmp_path / "home" / "model"), data=str(tmp_path / "elsewhere" / "books"), output="report"
    )
    line, file = how_it_was_made("evaluate", config)
    assert line.text.splitlines() == [
        "# books stands for a path in another directory: put yours",
        "rope-extend evaluate model --data books --output report",
    ]
    assert str(tmp_path) not in file.text
    assert file.text.splitlines()[1] == "# books stands for a path in another directory: put yours"
    assert command_words(config)[0] == str(tmp_path / "home" / "model")  # for the terminal
    several = commands_part([["card", "runs/a"], ["push", "runs/a", "owner/name"]])
    assert several.text == "rope-extend card runs/a\nrope-extend push runs/a owner/name"


def test_paths_with_one_last_part_stay_apart_and_those_of_methods_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "jane/searched"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    searched = tmp_path / "jane" / "searched"
    (searched / "encoding.json").write_text("{}")
    config = EvaluationConfig(
        model="owner/model",
        data=("/data/pg19/test", "/data/arxiv/test", str(Path.cwd() / ".." / "private" / "books")),
        adapters=("../runs/a/final", "../runs/b/final"),
        methods=("none", str(searched)),
    )
    for part in how_it_was_made("evaluate", config):
        assert "jane" not in part.text
        assert "private" not in part.text
        notes = [line.split()[1] for line in part.text.splitlines() if "stands for" in line]
        assert notes == ["a/final", "b/final", "searched", "pg19/test", "arxiv/test", "books"]
    (demo,) = [commands_part([["evaluate", "m", "--methods", f"yarn(a=1,b=2),{searched}"]])]
    assert demo.text.splitlines()[1] == "rope-extend evaluate m --methods 'yarn(a=1,b=2),searched'"


def test_no_line_ends_a_block_of_code() -> None:
    fences = [line for line in Code("Text", "a\n````\nb").markdown().splitlines() if line.startswith("`")]
    assert fences == ["`````", "````", "`````"]
