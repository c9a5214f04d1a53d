"""Only what text reaches is trained: every trained weight gets a gradient, in every family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FAMILIES, FamilyCase, tiny_model
from peft import PeftModel
from torch import nn

from rope_extend import RopeExtendError
from rope_extend.loss import next_token_loss
from rope_extend.training.lora import TextReach, adapted, lora_config, text_reach
from rope_extend.training.recipe import Recipe

SOME = {"gemma3", "fuyu", "mllama", "llama4_text", "falcon_h1"}
"""Families for the default run."""
UNKNOWN = {"diffllama", "jetmoe"}
"""Families that do not run backward on the meta device."""
EVERYTHING = {"lora_targets": "all-linear", "train_norm_embed": True}


def recipe(**changes: Any) -> Recipe:
    return Recipe(
        **{"model": "m", "data": "d", "output_dir": "o", "target_length": 128, "lora_rank": 2, **changes}
    )


def without_gradient(model: Any, run: Recipe, reach: TextReach | None = None) -> list[str]:
    adapter = adapted(model, run, reach).train()
    next_token_loss(adapter, torch.arange(3, 19)[None]).backward()
    return [name for name, value in adapter.named_parameters() if value.requires_grad and value.grad is None]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.model_type in SOME else [pytest.mark.slow], id=str(case))
        for case in FAMILIES
    ],
)
def test_the_dry_run_agrees_with_a_real_one(case: FamilyCase) -> None:
    """Every linear layer that gets a gradient from a real backward pass is trained, and no other.

    In every way to train, each trained weight gets a gradient.
    """
    model = tiny_model(case)
    reach = text_reach(model)
    for changes in ({}, {"train_norm_embed": True}, EVERYTHING):
        assert without_gradient(copy.deepcopy(model), recipe(**changes), reach) == []
    outputs: dict[str, Any] = {}
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    for name, part in linear.items():
        part.register_forward_hook(lambda _module, _args, out, name=name: outputs.update({name: out}))
    next_token_loss(model.train(), torch.arange(3, 35)[None]).backward()
    reached = {name for name, value in model.named_parameters() if value.grad is not None}
    assert reach.weights == reached or case.model_type in UNKNOWN
    for name, part in linear.items():
        in_kernel = name.endswith("mamba.out_proj")  # on a GPU, a kernel takes the weight
        used = isinstance(outputs.get(name), torch.Tensor) and part.weight.grad is not None and not in_kernel
        assert used == (name in reach.layers), name


def test_names_do_not_match_modules_that_only_end_like_them() -> None:
    """peft compares names in `modules_to_save` with the last characters of each path."""
    for name, wrong in (("fuyu", "vision_embed_tokens"), ("gemma3", "mm_soft_emb_norm")):
        model = tiny_model(name)
        saved = lora_config(model, recipe(train_norm_embed=True)).modules_to_save
        paths = [f"base_model.model.{path}" for path, _ in model.named_modules()]
        paths = [path for path in paths if path.endswith(tuple(saved))]
        assert any(path.endswith("embed_tokens") for path in paths)
        assert not any(wrong in path or "vision_tower" in path for path in paths)


def test_an_adapter_without_these_parts_loads_again(tmp_path: Path) -> None:
    """Its config names the same modules when peft reads it: those of the adapter, no more."""
    adapter = adapted(tiny_model("gemma3"), recipe(**EVERYTHING)).eval()
    with torch.no_grad():
        for value in adapter.parameters():
            if value.requires_grad:
                value.add_(0.01)
        adapter.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(tiny_model("gemma3"), tmp_path).eval()
        ids = torch.arange(3, 35)[None]
        assert torch.equal(loaded(ids).logits, adapter(ids).logits)
    assert {name for name, _ in loaded.named_modules()} == {name for name, _ in adapter.named_modules()}


def test_a_named_layer_that_cannot_be_trained_is_refused() -> None:
    for name, layer in (
        ("fuyu", "vision_embed_tokens"),
        ("llama4_text", "router"),
        ("falcon_h1", "out_proj"),
    ):
        with pytest.raises(
            RopeExtendError, match=f"lora_targets has '{layer}', which LoRA cannot train on text"
        ):
            lora_config(tiny_model(name), recipe(lora_targets=[layer]))
    partly = recipe(lora_targets=["q_proj"])
    adapter = adapted(tiny_model("mllama"), partly)
    trained = {name for name, value in adapter.named_parameters() if value.requires_grad}
    assert trained
    assert all("self_attn.q_proj" in name for name in trained)
