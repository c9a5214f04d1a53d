"""Writes golden directories in the current format of checkpoints: `python tests/golden/make.py`.

Run it after `SCHEMA_VERSION` has changed, and commit its output: `schema-N/full` and `schema-N/adapter`, a
few KB each, and their logits in `logits.json`. Never write the directories of earlier schemas again: the
tests prove that they still load.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rope_extend import extend, save
from rope_extend.checkpoint.record import SCHEMA_VERSION

HERE = Path(__file__).parent
IDS = torch.arange(40).remainder(31)[None]


def make() -> None:
    torch.manual_seed(0)
    if not (HERE / "base").exists():
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16, rope_theta=5e4,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(HERE / "base")
    target = HERE / f"schema-{SCHEMA_VERSION}"
    full = AutoModelForCausalLM.from_pretrained(HERE / "base")
    extend(full, 64, "ntk_by_parts")
    save(full, target / "full", base_model="golden/base")
    adapted = AutoModelForCausalLM.from_pretrained(HERE / "base")
    extend(adapted, 64, "yarn", beta_fast=16.0)
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(adapted, lora)
    adapted.peft_config["default"].base_model_name_or_path = "golden/base"
    save(adapted, target / "adapter", base_model="golden/base")
    table = HERE / "logits.json"
    logits = json.loads(table.read_text()) if table.exists() else {}
    for name, model in (("full", full), ("adapter", adapted)):
        with torch.no_grad():
            last = model.eval()(IDS).logits[0, -1]
        logits[f"schema-{SCHEMA_VERSION}/{name}"] = [round(float(value), 7) for value in last]
    table.write_text(json.dumps(logits, indent=1) + "\n")


if __name__ == "__main__":
    make()
