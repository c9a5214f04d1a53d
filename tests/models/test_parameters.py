"""Learned parameters of an encoding are trained, saved, loaded, merged and checked like other weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TARGET, TRAINED, llama
from integrity import extended, logits, with_lora
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.checkpoint.record import read_record
from rope_extend.models.checkpoint_directory import LEARNED_FILE
from rope_extend.models.parameters import learned_parameters


@pytest.fixture
def adapted(tmp_path: Path) -> Any:
    """A model with FIRE and an adapter, saved in `adapter/`, its base in `base/`."""
    llama().save_pretrained(tmp_path / "base")
    model = with_lora(extended("fire", AutoModelForCausalLM.from_pretrained(tmp_path / "base")))
    with torch.no_grad():
        for value in learned_parameters(model).values():
            value.add_(0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(2)))
    rx.save(model, tmp_path / "adapter")
    return model


def test_the_file_is_under_digest_like_any_weight(adapted: Any, tmp_path: Path) -> None:
    directory = tmp_path / "adapter"
    path = directory / LEARNED_FILE
    assert {LEARNED_FILE, "adapter_model.safetensors"} == set(read_record(directory).weights)
    values = load_file(path)
    assert values.keys() == learned_parameters(adapted).keys()
    save_file({name: value + 1 for name, value in values.items()}, path)
    with pytest.raises(rx.RopeExtendError, match=r"'encoding.safetensors'.*is not what was saved"):
        rx.load(directory)
    changed = rx.load(directory, check_files=False)
    assert (logits(changed) - logits(adapted)).abs().max() > 1e-3
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
