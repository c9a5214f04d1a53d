"""Weight files that are damaged, exchanged, pickled or not finite are refused, and left as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import llama, tiny_model
from integrity import each, extended, logits, refused, tuned, unsealed, weights_of
from safetensors.torch import load_file, save_file

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.models.parameters import learned_parameters


@each("full", "adapter")
def test_the_state_of_a_training_run_is_not_taken_for_weights(directory: Path) -> None:
    expected = logits(rx.load(directory))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "scaler.pt"):
        (directory / name).write_bytes(b"\x80\x04.")
    assert torch.equal(logits(rx.load(directory)), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_weights_that_are_not_finite_are_not_saved(checkpoints: Path, tmp_path: Path, value: float) -> None:
    full = extended()
    full.model.layers[1].mlp.up_proj.weight.data[3, 5] = value
    adapted = tuned(checkpoints / "base")
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_B["default"].weight.data[1, 1] = value
    learned = extended("kerple")
    next(iter(learned_parameters(learned).values())).data[0] = value
    for model, name in (
        (full, "model.layers.1.mlp.up_proj"),
        (adapted, "q_proj.lora_B.weight"),
        (learned, "encoding.safetensors: layer0.r1"),
    ):
        with pytest.raises(RopeExtendError, match=rf"{name}.* holds values that are NaN or infinite"):
            rx.save(model, tmp_path / "a" / "new")
        assert list(tmp_path.iterdir()) == []  # no parent directory is left behind


@each("adapter")
@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.q_proj.lora_magnitude_vector", "layers.7.self_attn.q_proj.lora_A.weight"]
)
def test_a_weight_of_an_adapter_that_nothing_takes_is_refused(directory: Path, name: str) -> None:
    """peft leaves it out without a warning: the adapter is of a newer peft, or of a deeper base model."""
    path = weights_of(directory)
    save_file({**load_file(path), f"base_model.model.model.{name}": torch.ones(2, 32)}, path)
    before = list(vars(llama().model.layers[0].self_attn.q_proj))
    unsealed(directory)
    refused(directory, rf"does not fit this model.*{name}", by="load")
    refused(directory, rf"does not fit this model.*{name}", by="merge")
    base = llama()
    with pytest.raises(RopeExtendError, match=name):
        rx.load_adapter(base, directory)
    assert list(vars(base.model.layers[0].self_attn.q_proj)) == before


def test_an_adapter_whose_weights_are_renamed_on_loading_is_taken(tmp_path: Path) -> None:
    """peft follows transformers' renaming: Gemma 3 had another order of modules in transformers 4."""
    tiny_model("gemma3").save_pretrained(tmp_path / "base")
    adapted = tuned(tmp_path / "base")
    directory = rx.save(adapted, tmp_path / "adapter")
    old, path = "base_model.model.language_model.model.", weights_of(directory)
    weights = {
        key.replace("base_model.model.model.language_model.", old): weight
        for key, weight in load_file(path).items()
    }
    assert any(key.startswith(old) for key in weights)
    save_file(weights, path)
    unsealed(directory)
    assert torch.equal(logits(rx.load(directory)), logits(adapted))
    assert rx.merge(directory, tmp_path / "merged").is_dir()
    save_file({**weights, f"{old}layers.0.self_attn.q_proj.lora_other": torch.ones(2, 32)}, path)
    with pytest.raises(RopeExtendError, match=r"does not fit.*layers.0.self_attn.q_proj.lora_other"):
        rx.load(directory)
