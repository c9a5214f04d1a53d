"""Fine-tuning to encodings instead of RoPE: their default recipe, and runs that are resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import TRAINED
from safetensors.torch import load_file
from tolerances import assert_same_but_rounding

import rope_extend as rx
from rope_extend.encodings import encoding_classes, encoding_names, method_named
from rope_extend.models.checkpoint_directory import LEARNED_FILE
from rope_extend.training.finetune import finetune
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import checkpoints

IDS = torch.arange(2 * 100).remainder(251).view(2, 100)
REQUIRED = {"model": "m", "data": "d", "output_dir": "o", "target_length": 4096}


def test_fields_left_open_are_the_methods_and_given_ones_stay() -> None:
    usual = Recipe.from_dict({**REQUIRED, "method": "yarn"})
    assert (usual.steps, usual.learning_rate, usual.lora_targets) == (400, 2e-4, "attention")
    assert not usual.train_norm_embed
    replaced = Recipe.from_dict({**REQUIRED, "method": "alibi", "lora_targets": None})
    assert (replaced.steps, replaced.learning_rate, replaced.lora_targets) == (2000, 2e-4, "all-linear")
    assert replaced.train_norm_embed
    own = {"steps": 10, "lora_targets": "attention", "train_norm_embed": False}
    given = Recipe.from_dict({**REQUIRED, "method": "alibi", **own}).to_dict()
    assert {name: given[name] for name in own} == own
    assert Recipe.from_dict({**REQUIRED, "method": "resonance(nope)"}).lora_targets == "all-linear"


@pytest.mark.parametrize("name", encoding_names())
def test_every_method_has_a_default_recipe_that_is_valid(name: str) -> None:
    recipe = Recipe.from_dict({**REQUIRED, "method": name})
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    replaced = encoding_classes()[name].replaces_rotation
    assert method_named(name).replaces_rotation == replaced
    assert (recipe.lora_targets == "all-linear") == recipe.train_norm_embed == replaced


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    return Recipe(
        model=str(work / "model"), data=str(work / "data"), output_dir=str(tmp_path / "run"),
        target_length=4 * TRAINED, steps=4, learning_rate=1e-2, warmup_steps=1, lora_rank=2,
        save_every=1, keep_checkpoints=9, method="t5_bias", gradient_checkpointing=True,
        gradient_accumulation=1,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_that_learns_a_bias_and_was_interrupted_ends_on_the_same_bits(
    recipe: Recipe, tmp_path: Path
) -> None:
    result = finetune(recipe)
    with torch.no_grad():
        assert_same_but_rounding(rx.load(recipe.output_dir)(IDS).logits, result.model(IDS).logits)
    other = replace(recipe, output_dir=str(tmp_path / "other"))
    finetune(other)
    for checkpoint in checkpoints(tmp_path / "other" / "checkpoints")[2:]:
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    finetune(other, resume=True)
    for name in ("adapter_model.safetensors", LEARNED_FILE):
        whole, again = (load_file(tmp_path / run / name) for run in ("run", "other"))
        assert all(torch.equal(again[key], value) for key, value in whole.items())


def test_drope_recalibrates_at_the_trained_length_and_scales_beyond(recipe: Recipe) -> None:
    """Training within the window scales nothing; the saved model scales by the length."""
    result = finetune(replace(recipe, method="drope", block_length=TRAINED))
    record = json.loads((Path(recipe.output_dir) / "rope_extend.json").read_text())
    assert record["encoding"] == {"name": "drope", "factor": 4.0, "coefficient": 0.103, "per": "query"}
    short, plain = IDS[:, :TRAINED], rx.encoding("nope")
    model = rx.load(recipe.output_dir)
    with torch.no_grad():
        ours, far = model(short).logits, model(IDS).logits
        assert_same_but_rounding(far, result.model(IDS).logits)
    rx.current_patch(model).remove()  # type: ignore[union-attr]
    with rx.patch_model(model, plain), torch.no_grad():
        assert_same_but_rounding(ours, model(short).logits)
        assert (far - model(IDS).logits).abs().max() > 1e-5
