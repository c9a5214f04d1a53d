"""Every kind of training data is equal in one process and in two; older checkpoints can be resumed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_finetune import launch

from rope_extend.training import resume
from rope_extend.training.finetune import Recipe, finetune
from rope_extend.training.resume import RunState, read_state

_RUN = """
import sys
from rope_extend.training.finetune import Recipe, finetune
finetune(Recipe.from_yaml(sys.argv[1]))
"""

WAYS: dict[str, dict[str, Any]] = {
    "packing": {"packing": "restart"},
    "mixing": {"data_weights": (2, 1, 1)},
    "curriculum": {"curriculum": [[32, 1], [64, 1]]},
    "streaming": {"streaming": True},
    "streaming and packing": {"streaming": True, "packing": "continue"},
    "shifted sparse": {"shifted_sparse": 32},
    "all that goes together": {
        "packing": "restart", "data_weights": (2, 1, 1), "curriculum": [[32, 1], [64, 1]],
    },
}  # fmt: skip


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    data = tuple(str(work / "data" / f"{name}.txt") for name in "abc")
    return Recipe(
        model=str(work / "model"), data=data, output_dir=str(tmp_path / "run"), target_length=128, steps=3,
        gradient_accumulation=2, learning_rate=1e-2, lora_rank=4, save_every=1, gradient_checkpointing=False,
    )  # fmt: skip


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(Path(recipe.output_dir) / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_read_the_same_as_one_in_twice_the_passes(
    recipe: Recipe, tmp_path: Path, way: str
) -> None:
    recipe = replace(recipe, **WAYS[way])
    finetune(recipe)
    other = replace(recipe, gradient_accumulation=1, output_dir=str(tmp_path / "two"))
    (tmp_path / "two.yaml").write_text(other.to_yaml())
    launch(_RUN, str(tmp_path / "two.yaml"), where=tmp_path, environment={"ACCELERATE_USE_CPU": "true"})
    ours, theirs = weights(recipe), weights(other)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=1e-4)
    states = [read_state(Path(r.output_dir, "checkpoints", "step-3")) for r in (recipe, other)]
    assert states[0].stream == states[1].stream


def test_a_checkpoint_without_these_fields_resumes_bit_for_bit(recipe: Recipe, tmp_path: Path) -> None:
    """Its recipe and its state lack the fields, and the memory options have their old name."""
    finetune(recipe)
    old = replace(recipe, output_dir=str(tmp_path / "old"))
    finetune(replace(old, steps=2))
    new = {"packing", "curriculum", "data_weights", "shifted_sparse", "streaming"}
    assert new <= {field.name for field in fields(Recipe)}
    assert "stream" in {field.name for field in fields(RunState)}
    for checkpoint in (tmp_path / "old" / "checkpoints").iterdir():
        file = checkpoint / "state.json"
        state = json.loads(file.read_text())
        del state["stream"]
        state[resume._OLD_OPTIONS] = state.pop("memory_options")
        state["recipe"] = {name: value for name, value in state["recipe"].items() if name not in new}
        file.write_text(json.dumps(state, indent=2))
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["files"]["state.json"] = {
            "bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }  # fmt: skip
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    finetune(old, resume=True)
    ours, theirs = weights(recipe), weights(old)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
