"""Long steps: norms in tiles, one copy of the input of LoRA, and the estimate for a GPU, without one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import tiny_llama, tiny_model
from test_memory_options import step, with_adapter
from transformers import GPTNeoXConfig, LlamaConfig

from rope_extend.loss import next_token_loss
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.models import load_options
from rope_extend.models.load_options import LoadOptions
from rope_extend.training.memory_options import MemoryOptions, _in_tiles, _norms, apply_memory_options, tiled
from rope_extend.training.recipe import Recipe
from rope_extend.training.step_plan import candidate_options, plan_training

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
    model = tiny_model(name)
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


@pytest.mark.slow
def test_a_step_of_500k_tokens_of_an_8b_model_fits_on_80_gb(tmp_path: Path) -> None:
    """LoRA on all linear layers. With the kernel's own memory; what the peak is made of, in hidden states."""
    tokens = 524_288
    EIGHT_BILLION.save_pretrained(tmp_path)
    recipe = Recipe(str(tmp_path), "books", "runs/one", tokens, lora_targets="all-linear", method="yarn",
                    gradient_accumulation=1)  # fmt: skip
    options = LoadOptions("cpu", dtype=torch.bfloat16, limit_memory=80 * 10**9)
    recipe = replace(recipe, **asdict(EVERYTHING))
    plan = plan_training(recipe, load_options=options, device=torch.device("cuda"))
    assert plan is not None
    plan.check()
    chosen, state = plan.chosen, tokens * 4096 * 2
    assert chosen.host == 32 * state  # the inputs of all layers, exactly
    assert chosen.peak == pytest.approx(12.2 * state, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "device", "tile"),
    [(32_768, "cuda", 1024), (65_536, "cuda", 4096), (500_000, "cuda", 4096), (500_000, "cpu", 1024)],
)
def test_long_steps_on_a_gpu_have_few_tiles(tokens: int, device: str, tile: int) -> None:
    """Of 60 kernels each, at 500k tokens: 123 in each layer instead of 489; for norms as many as before."""
    run = Recipe("model", "books", "runs/one", tokens)
    with torch.device("meta"):
        model = tiny_llama()
    candidates = candidate_options(run, model, torch.device(device))
    assert {options.mlp_tiles for options in candidates} == {0, tile}
    with tiled(model, tile):
        layer = model.model.layers[0]
        sizes = [part.forward.args[-1] for part in (layer.mlp, layer.input_layernorm)]
    assert sizes == [tile, 4096]


def test_embeddings_need_no_gradient_under_checkpointing() -> None:
    """Otherwise they and their gradient stay on the device for the whole step."""
    adapter, seen = with_adapter(tiny_llama()), []
    base = adapter.get_base_model()
    embeddings = base.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, inputs, output: seen.append(output))
    ids = torch.randint(3, 60, (1, 8))
    with apply_memory_options(base, MemoryOptions(True)):
        adapter(ids)
    assert not seen[-1].requires_grad
    base.enable_input_require_grads()  # by the user, who may train a prompt
    with apply_memory_options(base, MemoryOptions(True)):
        adapter(ids)
    assert seen[-1].requires_grad


def test_each_process_loads_the_weights_to_its_own_gpu(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not first to host memory, which eight processes share."""
    arguments: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(
        load_options, "pretrained", lambda auto, name, **given: arguments.update(given) or tiny_llama()
    )
    options = load_options.LoadOptions("cuda:3", dtype=torch.bfloat16)
    monkeypatch.setattr(load_options.LoadOptions, "_config", lambda self, name: tiny_llama().config)
    options.load("model")
    assert arguments["device_map"] == {"": torch.device("cuda:3")}


@pytest.mark.parametrize(("tiles", "states"), [(0, 5), (64, 2)])
def test_layer_norms_are_float32_under_the_autocast_of_a_gpu(tiles: int, states: int, tmp_path: Any) -> None:
    """Autocast of a CPU leaves them in bfloat16."""
    GPTNeoXConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path)  # fmt: skip
    recipe = Recipe(
        str(tmp_path), "data", "run", 512, gradient_accumulation=1, gradient_checkpointing=False,
        mlp_tiles=tiles,
    )  # fmt: skip
    options = load_options.LoadOptions("cpu", dtype=torch.bfloat16, limit_memory=10**9)
    peaks = []
    for device in ("cpu", "cuda"):
        plan = plan_training(recipe, load_options=options, device=torch.device(device))
        assert plan is not None
        peaks.append(plan.chosen.peak)
    more = (peaks[1] - peaks[0]) / (512 * 64 * 2)  # in hidden states of bfloat16
    assert more >= states  # one for each norm; in tiles, their float32 inputs are not kept
