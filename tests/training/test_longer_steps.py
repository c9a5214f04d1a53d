"""Norms in tiles, and LoRA with one copy of its input: less memory, and the same numbers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FAMILIES, tiny_llama, tiny_model
from test_memory_options import step, with_adapter
from transformers import LlamaConfig

from rope_extend.loss import next_token_loss
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.models.load_options import LoadOptions
from rope_extend.training.memory_options import MemoryOptions, _in_tiles, _norms, apply_memory_options
from rope_extend.training.recipe import Recipe
from rope_extend.training.step_estimator import Step
from rope_extend.training.step_plan import plan_training

EIGHT_BILLION = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
)  # fmt: skip
EVERYTHING = MemoryOptions(True, 1024, True)
SWITCH = "rope_extend.training.memory_options.disable_input_dtype_casting"
"""peft's, of the casts that save a copy of the input for each matrix."""


def in_bfloat16(model: Any = None, **how: Any) -> Any:
    """An adapter in float32 on a base in bfloat16, as in training."""
    adapter = with_adapter(tiny_llama() if model is None else model, torch.bfloat16, **how)
    for parameter in adapter.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapter


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "olmo2", "qwen3"])
@pytest.mark.parametrize("checkpointing", [False, True])
@torch.autocast("cpu", torch.bfloat16)
def test_norms_in_tiles_give_the_same_bits(name: str, checkpointing: bool, ids: torch.Tensor) -> None:
    """In bfloat16. In float32, autograd adds up the three parts of a gradient in another order."""
    model = tiny_model(next(case for case in FAMILIES if case.model_type == name))
    adapter = in_bfloat16(model, target_modules=["down_proj", "dense_4h_to_h", "o_proj"])
    options = MemoryOptions(checkpointing)
    expected = step(adapter, options, ids)
    norms = _norms(adapter.get_base_model())
    assert len(norms) in (2 * 2 + 1, 2 * 4 + 1)  # of two layers, and the one behind them
    runs = 0
    for norm in norms:

        def counted(hidden: torch.Tensor, forward: Any = norm.forward) -> torch.Tensor:
            nonlocal runs
            runs += 1
            return forward(hidden)

        norm.forward = partial(_in_tiles, norm, counted, 6)
    found = step(adapter, options, ids)
    assert runs >= len(norms) * 7
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


@pytest.mark.parametrize("options", [MemoryOptions(), MemoryOptions(True), MemoryOptions(True, 6)], ids=str)
@torch.autocast("cpu", torch.bfloat16)
def test_lora_with_one_copy_of_its_input_gives_the_same_bits(
    options: MemoryOptions, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = in_bfloat16()
    found = step(adapter, options, ids)
    monkeypatch.setattr(SWITCH, lambda model, active: nullcontext())
    expected = step(adapter, options, ids)
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


@torch.autocast("cpu", torch.bfloat16)
def test_queries_keys_and_values_save_one_input(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = in_bfloat16(target_modules=["q_proj", "k_proj", "v_proj"])
    base, ids, kept = adapter.get_base_model(), torch.randint(3, 60, (1, 1024)), []
    for switched in (True, False):
        if not switched:
            monkeypatch.setattr(SWITCH, lambda model, active: nullcontext())
        with apply_memory_options(base, MemoryOptions()), LiveBytes() as memory:
            loss = next_token_loss(adapter, ids)
        kept.append(memory.live)
        del loss
    state = ids.numel() * base.config.hidden_size * 2
    assert kept[1] - kept[0] >= 2 * state * base.config.num_hidden_layers


def planned(tmp_path: Path, tokens: int) -> Step:
    EIGHT_BILLION.save_pretrained(tmp_path)
    recipe = Recipe(str(tmp_path), "books", "runs/one", tokens, lora_targets="all-linear", method="yarn",
                    gradient_accumulation=1)  # fmt: skip
    options = LoadOptions("cpu", dtype=torch.bfloat16, limit_memory=80 * 10**9)
    plan = plan_training(recipe, load_options=options, device=torch.device("cuda"), memory_options=EVERYTHING)
    assert plan is not None
    plan.check()
    return plan.chosen


@pytest.mark.slow
def test_a_step_of_500k_tokens_of_an_8b_model_fits_on_80_gb(tmp_path: Path) -> None:
    """LoRA on all linear layers. With the kernel's own memory; what the peak is made of, in hidden states."""
    tokens = 524_288
    step = planned(tmp_path, tokens)
    state = tokens * 4096 * 2
    assert step.host == 32 * state  # the inputs of all layers, exactly
    assert step.peak == pytest.approx(12.2 * state, rel=0.02)
