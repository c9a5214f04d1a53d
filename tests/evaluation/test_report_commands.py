"""Reports show the settings that made them: a copied file has the same settings, and no local path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rope_extend.evaluation.evaluate import how_it_was_made
from rope_extend.evaluation.evaluation_config import (
    EvaluationConfig,
    ModelConfig,
    RetrievalConfig,
    StudyConfig,
)

CONFIGS: list[tuple[type[ModelConfig], dict[str, Any]]] = [
    (EvaluationConfig, {
        "data": ["a b", "c"], "lengths": "4k,8k", "methods": ["none", "yarn(beta_fast=32,beta_slow=1)"],
        "cropped": False, "retrieval": 2, "retrieval_lengths": [8192], "budget": "90min",
        "max_documents": 3, "limit_memory": "20GB", "attention": "eager", "trained_length": 4096,
        "output": "it's here",
    }),
    (EvaluationConfig, {"adapters": ["runs/a"], "protocol": "sliding", "stride": 512}),
    (EvaluationConfig, {"data": ["-b", "c"], "max_documents": None, "device_map": {"": "cpu"}}),
    (RetrievalConfig, {
        "tasks": ["passkey", "needle"], "depths": [0, 0.25, 1], "chat": False, "cropped": False,
    }),
    (StudyConfig, {"target_length": "32k", "tasks": [], "budget": 5400.5, "data": "books"}),
    (StudyConfig, {"target_length": "32k", "adapters": ["runs/a"], "methods": []}),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "values"), CONFIGS)
def test_a_copied_file_has_the_same_settings(cls: type[ModelConfig], values: dict[str, Any]) -> None:
    config = cls.from_dict({"model": "owner/model", **values})
    text = how_it_was_made(config).text
    assert text.startswith(f"# rope-extend {cls.command} settings.yaml\n")
    assert cls.from_dict(yaml.safe_load(text)) == config


def test_a_device_of_torch_is_written_by_its_name() -> None:
    config = EvaluationConfig(model="owner/model", device_map={"": torch.device("cpu"), "model.norm": 0})
    assert config.device_map == {"": "cpu", "model.norm": 0}
    assert EvaluationConfig.from_dict(yaml.safe_load(how_it_was_made(config).text)) == config


def test_paths_of_the_author_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in the working directory are as seen from there; of others, the last part is shown."""
    for name in ("here/model", "jane/searched"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    searched = tmp_path / "jane" / "searched"
    (searched / "encoding.json").write_text("{}")
    config = EvaluationConfig(
        model=str(tmp_path / "here" / "model"),
        data=("/data/pg19/test", "/data/arxiv/test", str(Path.cwd() / ".." / "private" / "books")),
        adapters=("../runs/a/final", "../runs/b/final"),
        methods=("none", str(searched)),
    )
    text = how_it_was_made(config).text
    values = yaml.safe_load(text)
    assert values["model"] == "model"
    assert not any(name in text for name in (str(tmp_path), "/data", ".."))
    assert values["data"] == ["test", "test", "books"]
    notes = [line.split()[1] for line in text.splitlines() if "stands for" in line]
    assert notes == [*values["adapters"], values["methods"][1], *values["data"]]
