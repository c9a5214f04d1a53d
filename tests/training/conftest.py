"""Fixtures of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from runs import Action, AtStep, settings
from transformers import AutoModelForCausalLM

from rope_extend.training.finetune import Recipe, finetune
from rope_extend.training.trainer import RopeTrainer


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    return Recipe(**settings(work), output_dir=str(tmp_path / "run"))


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> AtStep:
    """Run an action during one step; the returned list gets the number of every step that is computed."""
    original = RopeTrainer.training_step

    def install(step: int, action: Action) -> list[int]:
        computed: list[int] = []

        def training_step(trainer: RopeTrainer, *args: Any, **options: Any) -> Any:
            number = trainer.state.global_step + 1
            if number not in computed[-1:]:
                computed.append(number)
                if number == step:
                    action()
            return original(trainer, *args, **options)

        monkeypatch.setattr(RopeTrainer, "training_step", training_step)
        return computed

    return install


@pytest.fixture(scope="module")
def finished(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the recipe. Tests compare theirs with it, and change only copies of it."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", work / "cache")
        finetune(Recipe(**(settings(work) | {"output_dir": str(directory)})))
    return directory


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if weights are loaded: refusals must come before."""

    loading = Mock(side_effect=AssertionError("the weights were loaded"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loading)
