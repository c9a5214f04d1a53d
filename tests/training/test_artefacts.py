"""Whatever a run or a trainer resumes or reuses belongs to the same work; others are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import files_below, settings
from safetensors.torch import load_file, save_file

from rope_extend import RopeExtendError
from rope_extend.training.finetune import finetune
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import (
    CHECKPOINTS,
    VERSION,
    RunState,
    check_continues,
    checkpoints,
    read_state,
)
from rope_extend.training.sharding import Sharding


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    """A run of two steps, with a model and a text of its own."""
    shutil.copytree(work / "model", tmp_path / "model")
    shutil.copytree(work / "data", tmp_path / "data")
    changes = {"model": str(tmp_path / "model"), "data": str(tmp_path / "data"), "save_every": 1}
    run = Recipe(**{**settings(work), **changes}, output_dir=str(tmp_path / "run"))
    finetune(replace(run, steps=2))
    return replace(run, steps=3)


def one_bit(recipe: Recipe) -> None:
    file = Path(recipe.model) / "model.safetensors"
    stored = load_file(file)
    stored["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[0, 0] ^= 1
    save_file(stored, file, {"format": "pt"})


def config(name: str, value: Any) -> Any:
    def change(recipe: Recipe) -> None:
        file = Path(recipe.model) / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))

    return change


def other_text(recipe: Recipe) -> None:
    shutil.copy(Path(str(recipe.data)) / "a.txt", Path(str(recipe.data)) / "b.txt")


OTHERS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "weights": (one_bit, {}, r"of the run in weights \('\w+' there, '\w+' here\)"),
    "config": (config("rms_norm_eps", 1e-3), {}, r"of the run in config \("),
    "shape": (config("max_position_embeddings", 64), {}, r"of the run in encoding \(.*shape \("),
    "dtype": (None, {"dtype": "bfloat16"}, r"dtype \('torch.float32' there, 'torch.bfloat16' here\)"),
    "text": (other_text, {}, "of the run in documents"),
    "encoding": (None, {"method": "linear"}, r"method \('yarn' there, 'linear' here\)"),
    "settings": (None, {"lora_rank": 2}, r"lora_rank \(4 there, 2 here\)"),
}
"""By name, what changes on disk, in the recipe, and the error."""


@pytest.mark.slow
def test_a_run_of_other_work_is_not_resumed(recipe: Recipe, tmp_path: Path) -> None:
    kept = {name: files_below(tmp_path / name) for name in ("model", "data")}
    run = files_below(Path(recipe.output_dir))
    for change, changes, message in OTHERS.values():
        if change is not None:
            change(recipe)
        with pytest.raises(RopeExtendError, match=rf"(?s)cannot resume: .*{message}"):
            finetune(replace(recipe, keep_checkpoints=1, **changes), resume=True)
        assert files_below(Path(recipe.output_dir)) == run  # nothing is removed, and the recipe stays
        for files in kept.values():
            for path, content in files.items():
                path.write_bytes(content)
    finetune(replace(recipe, dtype="float32"), resume=True)  # the same dtype by another name
    assert read_state(checkpoints(Path(recipe.output_dir) / CHECKPOINTS)[-1]).step == 3


@pytest.mark.slow
def test_a_run_resumes_with_a_model_that_moved(recipe: Recipe, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    Path(recipe.model).rename(moved)
    finetune(replace(recipe, model=str(moved)), resume=True)
    assert read_state(checkpoints(Path(recipe.output_dir) / CHECKPOINTS)[-1]).step == 3


def test_configs_are_compared_under_one_version_of_transformers() -> None:
    """A new version may have new defaults; it does not change a weight."""
    before = {"config": "a", "weights": "b", VERSION: "5.17.0"}
    state = RunState(recipe={"steps": 1}, identity=before)
    check_continues(state, replace(state, identity={**before, "config": "c", VERSION: "5.23.0"}))
    for changed in ({"config": "c"}, {"weights": "c", VERSION: "5.23.0"}):
        with pytest.raises(RopeExtendError, match=r"cannot resume: .* differs from that of the run in"):
            check_continues(state, replace(state, identity={**before, **changed}))


@pytest.mark.slow
def test_a_run_resumes_only_with_as_many_processes(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sharding, "of", lambda *_: Sharding(ranks=2))
    with pytest.raises(RopeExtendError, match=r"processes \(1 there, 2 here\)\. .*launch"):
        finetune(recipe, resume=True)
    monkeypatch.setattr(Sharding, "of", lambda *_: Sharding(parts=2))
    with pytest.raises(RopeExtendError, match=r"parts of a sequence \(1 there, 2 here\).*same cp_size"):
        finetune(recipe, resume=True)
