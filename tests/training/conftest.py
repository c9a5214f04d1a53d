"""Fixtures of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import Action, AtStep, settings
from transformers import AutoModelForCausalLM

from rope_extend.training import loop
from rope_extend.training.finetune import Recipe, finetune


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    return Recipe(**settings(work), output_dir=str(tmp_path / "run"))


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> AtStep:
    """Run an action during one step; the returned list gets the number of every step that is computed."""
    original = loop.TrainingRun._batch

    def install(step: int, action: Action) -> list[int]:
        computed: list[int] = []

        def batch(run: Any, forward: int) -> Any:
            if forward == 0:
                computed.append(run.state.step + 1)
                if computed[-1] == step:
                    action()
            return original(run, forward)

        monkeypatch.setattr(loop.TrainingRun, "_batch", batch)
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

    def loading(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loading)
