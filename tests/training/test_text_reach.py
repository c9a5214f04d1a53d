"""Only what text reaches is trained: every trained weight gets a gradient, in every family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FamilyCase, tiny_model
from covering import families
from peft import PeftModel
from runs import described
from torch import nn

from rope_extend import RopeExtendError
from rope_extend.loss import next_token_loss
from rope_extend.training.lora import adapted, lora_config, text_reach

SOME = {"gemma3", "fuyu", "mllama", "llama4_text", "falcon_h1"}
"""Families for the default run."""
UNKNOWN = {"diffllama", "jetmoe"}
"""Families that do not run backward on the meta device."""
EVERYTHING = {"lora_targets": "all-linear", "train_norm_embed": True}


@pytest.mark.parametrize("case", families(some=SOME))
def test_the_dry_run_agrees_with_a_real_one(case: FamilyCase) -> None:
    """Every linear layer that gets a gradient from a real backward pass is trained, and no other.

    In every way to train, each trained weight gets a gradient. In fuyu and gemma3, peft's `modules_to_save`
    could also match parts for images, whose paths end like those of the embedding and the norms.
    """
    model = tiny_model(case)
    reach = text_reach(model)
    for changes in ({}, {"train_norm_embed": True}, EVERYTHING):
        adapter = adapted(copy.deepcopy(model), described(**changes), reach).train()
        next_token_loss(adapter, torch.arange(3, 19)[None]).backward()
        trained = {name: value for name, value in adapter.named_parameters() if value.requires_grad}
        assert [name for name, value in trained.items() if value.grad is None] == []
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


def test_an_adapter_without_these_parts_loads_again(tmp_path: Path) -> None:
    """Its config names the same modules when peft reads it: those of the adapter, no more."""
    adapter = adapted(tiny_model("gemma3"), described(**EVERYTHING)).eval()
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
    for name, part in (("fuyu", "vision_embed_tokens"), ("llama4_text", "router"), ("falcon_h1", "out_proj")):
        message = f"lora_targets has '{part}', which LoRA cannot train on text"
        with pytest.raises(RopeExtendError, match=message):
            lora_config(tiny_model(name), described(lora_targets=[part]))
    partly = described(lora_targets=["q_proj"])
    adapter = adapted(tiny_model("mllama"), partly)
    trained = {name for name, value in adapter.named_parameters() if value.requires_grad}
    assert trained
    assert all("self_attn.q_proj" in name for name in trained)
