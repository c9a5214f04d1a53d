"""Learned parameters of an encoding are trained, saved, loaded, merged and checked like other weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TARGET, TRAINED, llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.checkpoint.record import read_record
from rope_extend.encodings import ModelShape
from rope_extend.models.checkpoint_directory import LEARNED_FILE
from rope_extend.models.parameters import learned_parameters

IDS = torch.arange(100).remainder(61)[None]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits.float()


def perturb(model: nn.Module) -> None:
    with torch.no_grad():
        for value in learned_parameters(model).values():
            value.add_(0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(2)))


@pytest.fixture
def adapted(tmp_path: Path) -> Any:
    """A model with FIRE and an adapter, saved in `adapter/`, its base in `base/`."""
    llama().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    rx.patch_model(model, rx.encoding("fire"), target_length=TARGET)
    torch.manual_seed(0)
    wrapped = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    ).eval()
    perturb(wrapped)
    rx.save(wrapped, tmp_path / "adapter")
    return wrapped


def test_the_file_is_under_digest_like_any_weight(adapted: Any, tmp_path: Path) -> None:
    directory = tmp_path / "adapter"
    path = directory / LEARNED_FILE
    assert {LEARNED_FILE, "adapter_model.safetensors"} == set(read_record(directory).weights)
    values = load_file(path)
    assert values.keys() == learned_parameters(adapted).keys()
    whole = path.read_bytes()
    save_file({name: value + 1 for name, value in values.items()}, path)
    with pytest.raises(rx.RopeExtendError, match=r"'encoding.safetensors'.*is not what was saved"):
        rx.load(directory)
    changed = rx.load(directory, check_files=False)
    assert (logits(changed) - logits(adapted)).abs().max() > 1e-3
    path.write_bytes(whole[:-8])
    with pytest.raises(rx.RopeExtendError, match="truncated or damaged"):
        rx.load(directory, check_files=False)
    path.unlink()
    with pytest.raises(rx.RopeExtendError, match=r"'encoding.safetensors'.*is missing"):
        rx.load(directory)
    # Never with the first values instead of the learned ones.
    with pytest.raises(rx.RopeExtendError, match="does not fit"):
        rx.load(directory, check_files=False)
    save_file({name: values[name][None] for name in values}, path)
    with pytest.raises(
        rx.RopeExtendError, match=r"'layer0.bias1' has shape \(1, 32\) in the source, and has shape \(32,\)"
    ):
        rx.load(directory, check_files=False)


def test_the_weights_of_a_full_checkpoint_are_the_bases(tmp_path: Path) -> None:
    model = llama()
    before = dict(model.state_dict())
    rx.patch_model(model, rx.encoding("t5_bias"), target_length=TARGET)
    directory = rx.save(model, tmp_path)
    weights = load_file(directory / "model.safetensors")
    assert sorted(weights) == sorted(before)
    assert all(torch.equal(weights[name], value) for name, value in before.items())


def test_a_checkpoint_with_the_trained_window_is_guarded_too(tmp_path: Path) -> None:
    """Also if only the encoding changes and not the window, stock transformers must not load it."""
    model = llama()
    rx.patch_model(model, rx.encoding("alibi"))
    directory = rx.save(model, tmp_path)
    assert read_record(directory).target_length == TRAINED
    assert json.loads((directory / "config.json").read_text())["model_type"] == "rope_extend"


def test_an_adapter_includes_learned_parameters(adapted: Any, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = logits(base)
    loaded = rx.load_adapter(base, tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(adapted))
    patch = rx.current_patch(loaded)
    base = loaded.unload()
    assert patch is not None
    patch.remove()
    assert torch.equal(logits(base), plain)
    # On a model that is already patched, with other values.
    with rx.patch_model(base, rx.encoding("fire"), target_length=TARGET):
        assert torch.equal(logits(rx.load_adapter(base, tmp_path / "adapter")), logits(adapted))


@pytest.mark.slow
def test_a_fresh_process_needs_rope_extend(adapted: Any, tmp_path: Path) -> None:
    output = rx.merge(tmp_path / "adapter", tmp_path / "merged")
    found = rx.verify(output, reference=tmp_path / "adapter")
    assert found.verdict == "needs rope_extend"
    assert "fire is loaded exactly by rope_extend alone" in found.reason


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> rx.Recipe:
    return rx.Recipe(
        model=str(work / "model"), data=str(work / "data"), output_dir=str(tmp_path / "run"),
        target_length=128, steps=4, learning_rate=1e-2, warmup_steps=1, lora_rank=2, save_every=2,
        method="fire", method_parameters={"width": 8}, gradient_checkpointing=True,
    )  # fmt: skip


@pytest.mark.slow
def test_finetuning_trains_learned_parameters_and_resumes_exactly(recipe: rx.Recipe, tmp_path: Path) -> None:
    rx.finetune(recipe)
    whole = load_file(tmp_path / "run" / LEARNED_FILE)
    first = rx.encoding("fire", width=8).initial(ModelShape(2, 32, TRAINED))
    for name, value in whole.items():
        if name.endswith("weight2"):  # biases of units that are always on shift all logits equally
            assert (value - first[name.partition(".")[2]]).abs().max() > 1e-3, name
    half = replace(recipe, steps=2, output_dir=str(tmp_path / "half"))
    rx.finetune(half)
    rx.finetune(replace(half, steps=4), resume=True)
    again = load_file(tmp_path / "half" / LEARNED_FILE)
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    loaded = rx.load(tmp_path / "run")
    assert str(rx.current_patch(loaded).encoding) == "fire(width=8)"  # type: ignore[union-attr]
    rows = rx.evaluate(
        rx.EvaluationConfig(
            model=recipe.model, data=recipe.data, lengths=[128], methods=["alibi"],
            adapters=[tmp_path / "run"],
        )
    )  # fmt: skip
    assert [row.label for row in rows] == ["alibi", "none, cropped to 32", "fire + LoRA"]


def test_a_recipe_refuses_parameters_of_another_method(recipe: rx.Recipe) -> None:
    with pytest.raises(rx.RopeExtendError, match="sandwich: unknown parameter 'width'; it takes dim"):
        replace(recipe, method="sandwich")
    with pytest.raises(rx.RopeExtendError, match="Did you mean 'alibi'"):
        replace(recipe, method="alibbi", method_parameters={})
