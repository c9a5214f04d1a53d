"""Several processes that share a window compute what one process computes: real processes over gloo."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from alternative_cases import ALTERNATIVES
from peft import LoraConfig, get_peft_model
from rotary_cases import ENCODINGS, TARGET, TRAINED
from several_processes import launch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import rope_extend as rx
from rope_extend.loss import shifted

TOKENS = 84
HEADS = {"one key head": 1}
SETTINGS = ("plain", "packed", "one key head", "LoRA", "checkpointing")


def llama(key_heads: int = 2) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=key_heads, max_position_embeddings=TRAINED, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def inputs(setting: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 61, (1, TOKENS))
    if setting != "packed":
        return {"input_ids": ids}
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(37), torch.arange(TOKENS - 37)])[None]}


def loss_and_gradients(
    model: Any, given: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients, averaged over the processes."""
    model.zero_grad(set_to_none=True)
    logits = model(**given, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), shifted(given["input_ids"]).flatten())
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()
            dist.all_reduce(found[name])
            found[name] /= dist.get_world_size()
    return loss.detach(), found


def errors_of(case: Any, setting: str) -> tuple[float, float]:
    """The largest error of the loss, and of any gradient relative to its largest number."""
    model = llama(HEADS.get(setting, 2))
    patch = rx.patch_model(
        model,
        case.build(rx.RopeShape(8, 1e4, TRAINED)) if hasattr(case, "oracle") else case.build(),
        target_length=TARGET,
    )
    del patch
    if setting == "LoRA":
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, lora).double()
    if setting == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    given = inputs(setting)
    one, expected = loss_and_gradients(model, given)
    with rx.split_window(model):
        loss, found = loss_and_gradients(model, given)
    assert found.keys() == expected.keys()
    worst = max(
        float((found[name] - value).abs().max() / (value.abs().max() + 1e-30))
        for name, value in expected.items()
    )
    return float((loss - one).abs()), worst


def main() -> None:
    import time

    dist.init_process_group("gloo")
    for case in [*ENCODINGS, *ALTERNATIVES]:
        for setting in SETTINGS:
            t = time.time()
            try:
                a = errors_of(case, setting)
            except Exception as e:
                import traceback

                traceback.print_exc()
                a = f"{type(e).__name__}: {e}"
            if dist.get_rank() == 0:
                print(case, setting, a, f"{time.time() - t:.2f}", flush=True)


PATHS = f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}\n"


def test_x(tmp_path: Path) -> None:
    print(launch(PATHS + "from test_split_window import main\nmain()", where=tmp_path))
