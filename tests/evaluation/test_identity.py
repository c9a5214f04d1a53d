"""What a measurement depends on: the identity of a model has every part that changes a result."""

from __future__ import annotations

import torch
from cases import tiny_llama
from peft import LoraConfig, get_peft_model

from rope_extend.checkpoint.peft_models import tuner_layers
from rope_extend.evaluation.identity import model_identity
from rope_extend.journal import differences


def test_an_adapter_that_acts_otherwise_is_another_model() -> None:
    lora = LoraConfig(task_type="CAUSAL_LM", lora_alpha=8, target_modules=["q_proj"])
    model = get_peft_model(tiny_llama(), lora)
    identity = model_identity(model)
    with model.disable_adapter():
        assert "adapters" in differences(identity, model_identity(model))
    assert model_identity(model) == identity
    for _, layer in tuner_layers(model):
        layer.scale_layer(2.0)
    assert differences(identity, model_identity(model)).startswith("adapters (")


def test_only_buffers_that_are_saved_are_part_of_a_model() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    module.register_buffer("saved", torch.zeros(2, dtype=torch.bool))
    module[0].register_buffer("cached", torch.zeros(3), persistent=False)
    before = model_identity(module)
    module[0].cached += 1
    assert model_identity(module) == before
    module.saved[1] = True
    assert differences(before, model_identity(module)).startswith("weights (")
