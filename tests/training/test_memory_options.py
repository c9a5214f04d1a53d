"""Memory options keep loss and gradients, alone and combined, save memory, and can be removed.

The memory of a GPU is estimated without one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FAMILIES, tiny_llama, tiny_model
from covering import families
from peft import LoraConfig, get_peft_model
from runs import described
from test_step_plan import planned, recipe
from tolerances import rounding
from torch.autograd.graph import save_on_cpu
from transformers import GPTNeoXConfig, LlamaConfig

from rope_extend.loss import next_token_loss
from rope_extend.memory.budget import expand_segments
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.models.load_options import LoadOptions
from rope_extend.training import memory_options as options_module
from rope_extend.training.memory_options import (
    MemoryOptions,
    _in_tiles,
    _norms,
    apply_memory_options,
    tileable,
    tiled,
)
from rope_extend.training.step_plan import candidate_options

COMBINATIONS = [
    MemoryOptions(checkpointing, tiles, offload)
    for checkpointing, tiles, offload in itertools.product((False, True), (0, 6), (False, True))
    if checkpointing or not offload
]
SOME = ("llama", "gemma2", "gpt_neox", "phi3", "deepseek_v2", "bitnet", "mixtral")
IN_FLOAT32 = ("deepseek_v2", "mixtral")
"""Families whose experts do not support float64."""
NO_LORA = ("falcon_h1", "llama4_text", "phimoe")
"""Families in which peft or stock transformers cannot train all linear layers."""
NOT_RECOMPUTED = ("gpt_neox_japanese", "jetmoe", "blt")
"""Families without float64, and one whose embeddings transformers writes to although they are a leaf."""


def with_adapter(model: Any, dtype: torch.dtype = torch.float64, **how: Any) -> Any:
    """LoRA on all linear layers, with random weights: at the usual start, half of the gradient is zero."""
    config = LoraConfig(**{"task_type": "CAUSAL_LM", "r": 2, "target_modules": "all-linear", **how})
    adapter = get_peft_model(model.to(dtype), config)
    torch.manual_seed(0)
    for name, parameter in adapter.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return adapter.train()


def step(adapter: Any, memory_options: MemoryOptions, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss and gradients."""
    torch.manual_seed(1)
    with apply_memory_options(adapter.get_base_model(), memory_options):
        loss = next_token_loss(adapter, ids)
        loss.backward()
    found = {name: value.grad for name, value in adapter.named_parameters() if value.grad is not None}
    adapter.zero_grad()
    return {"loss": loss.detach(), **found}


TERMS = 2_000
"""Products in the longest sum of a gradient: of 40 tokens with about 48 channels."""
GAIN = 8
"""Factor by which two layers may amplify an error on its way to the first."""
FLOAT64 = GAIN * rounding(torch.float64, TERMS)
FLOAT32 = GAIN * rounding(torch.float32, TERMS)
BFLOAT16 = rounding(torch.bfloat16, 4)
"""Products are added in float32 and rounded once, a few times on the way."""
CANCELLED = 4
"""Roundings of the largest gradient that may remain in one that is zero, as that of a query with only one key
(blt): it is the difference of two equal terms as large as the gradients that reach it."""


def assert_close(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bound: float = FLOAT64
) -> None:
    """Equal to within `bound` times the largest value of each gradient: another order of summation."""
    assert ours.keys() == theirs.keys()
    largest = max(float(value.abs().max()) for name, value in theirs.items() if name != "loss")
    for name, value in ours.items():
        cancelled = CANCELLED * torch.finfo(value.dtype).eps * largest
        atol = bound * float(theirs[name].abs().max()) + cancelled
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=atol, msg=name)


def pullable(model: Any, memory_options: MemoryOptions) -> MemoryOptions:
    """Leave tiles out if no MLP supports them."""
    return memory_options if tileable(model) else replace(memory_options, mlp_tiles=0)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", SOME)
def test_every_combination_gives_the_same_gradients(name: str, ids: torch.Tensor) -> None:
    single = name in IN_FLOAT32
    adapter = with_adapter(tiny_model(name), torch.float32 if single else torch.float64)
    expected = step(adapter, MemoryOptions(), ids)
    for memory_options in COMBINATIONS[1:]:
        memory_options = pullable(adapter.get_base_model(), memory_options)
        found = step(adapter, memory_options, ids)
        if memory_options.mlp_tiles:
            assert_close(found, expected, FLOAT32 if single else FLOAT64)
        else:  # the same operations in the same order
            assert all(torch.equal(value, expected[key]) for key, value in found.items())


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 38, 39])
def test_tiles_of_any_size_give_the_same_gradients(tokens: int, ids: torch.Tensor) -> None:
    adapter = with_adapter(tiny_llama())
    assert_close(step(adapter, MemoryOptions(True, tokens), ids), step(adapter, MemoryOptions(), ids))


def test_weights_of_an_mlp_are_trained_in_tiles_too(ids: torch.Tensor) -> None:
    model = tiny_llama().double().train()
    adapter = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    for name, parameter in adapter.named_parameters():
        parameter.requires_grad_("mlp" in name)
    expected = step(adapter, MemoryOptions(), ids)
    assert sum("mlp" in name for name in expected) == 6
    for memory_options in COMBINATIONS[1:]:
        assert_close(step(adapter, memory_options, ids), expected)


def mlps(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers]


def test_dropout_inside_a_tile_is_drawn_once_for_both_passes(ids: torch.Tensor) -> None:
    """Compared with the same tiles under plain autograd, which keeps the masks; and with the same seed."""
    adapter = with_adapter(tiny_llama(), lora_dropout=0.3)
    model = adapter.get_base_model()
    found = step(adapter, MemoryOptions(mlp_tiles=6), ids)
    again = step(adapter, MemoryOptions(mlp_tiles=6), ids)
    recomputed = step(adapter, MemoryOptions(True, 6, True), ids)
    for mlp in mlps(model):
        plain = mlp.forward
        mlp.forward = lambda states, plain=plain: torch.cat([plain(x) for x in states.split(3, 1)], 1)
    expected = step(adapter, MemoryOptions(), ids)
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)
        assert torch.equal(value, again[key])
        assert torch.equal(value, recomputed[key])


def test_with_checkpointing_tiles_cost_no_operations(ids: torch.Tensor) -> None:
    """Recomputation of a layer ends before its MLP: with and without tiles, an MLP runs twice per token."""
    adapter = with_adapter(tiny_llama())
    counts = []
    for memory_options in (
        MemoryOptions(),
        MemoryOptions(True),
        MemoryOptions(True, 6),
        MemoryOptions(True, 6, True),
    ):
        rows = 0

        def note(module: Any, inputs: Any) -> None:
            nonlocal rows
            rows += inputs[0][..., 0].numel()

        handles = [mlp.gate_proj.register_forward_pre_hook(note) for mlp in mlps(adapter.get_base_model())]
        step(adapter, memory_options, ids)
        for handle in handles:
            handle.remove()
        counts.append(rows / (2 * ids.numel()))
    assert counts == [1, 2, 2, 2]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each tensor that `save_on_cpu` moves to host memory and back."""
    seen: list[str] = []

    class Moves(save_on_cpu):
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory)
            pack, unpack = self.pack_hook, self.unpack_hook
            self.pack_hook = lambda tensor: seen.append("out") or pack(tensor)
            self.unpack_hook = lambda kept: seen.append("in") or unpack(kept)

    monkeypatch.setattr(options_module, "save_on_cpu", Moves)
    return seen


@pytest.mark.parametrize("family", families([case for case in FAMILIES if case.model_type not in NO_LORA]))
def test_every_family_keeps_its_gradients_and_offloads_its_states(
    family: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, moves: list[str]
) -> None:
    """Once each, and nothing else. Hidden states that a family passes by keyword would stay on the device."""
    calls, offloaded = [], options_module._offloaded

    def counted(*args: Any, **given: Any) -> Any:
        calls.append(torch.is_grad_enabled())  # False in the first rounds of a model that loops
        return offloaded(*args, **given)

    monkeypatch.setattr(options_module, "_offloaded", counted)
    adapter = with_adapter(tiny_model(family), torch.float32)
    for module in adapter.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "residual_dropout"):
            module.residual_dropout = 0.0
    expected = step(adapter, MemoryOptions(), ids)
    checkpointing = family.model_type not in NOT_RECOMPUTED
    memory_options = pullable(adapter.get_base_model(), MemoryOptions(checkpointing, 6, checkpointing))
    assert_close(step(adapter, memory_options, ids), expected, FLOAT32)
    assert moves == ["out"] * sum(calls) + ["in"] * sum(calls)
    assert bool(calls) == checkpointing


@pytest.mark.gpu
def test_on_a_gpu_offloaded_inputs_come_back_unchanged() -> None:
    adapter = with_adapter(tiny_llama(num_hidden_layers=6).to("cuda"), torch.float32)
    ids = torch.randint(3, 60, (2, 1000), device="cuda")
    for tiles in (0, 128):
        expected = step(adapter, MemoryOptions(True, tiles), ids)
        for _ in range(3):
            found = step(adapter, MemoryOptions(True, tiles, True), ids)
            assert_close(found, expected, FLOAT32)


def traces(model: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        if "forward" in vars(module):
            yield f"{name}.forward"
        if getattr(module, "gradient_checkpointing", False):
            yield f"{name}.gradient_checkpointing"
        function = vars(module).get("_gradient_checkpointing_func")
        if getattr(function, "func", None) is options_module._offloaded:
            yield f"{name} offloads"


def test_memory_options_leave_no_trace(ids: torch.Tensor) -> None:
    model = tiny_llama()
    own = mlps(model)[0].forward = mlps(model)[0].forward  # from elsewhere, such as accelerate
    with apply_memory_options(model, MemoryOptions(True, 4, True)):
        assert len(list(traces(model))) >= 6
        assert mlps(model)[0].forward is not own
    assert vars(mlps(model)[0]).pop("forward") is own
    assert not list(traces(model))
    with pytest.raises(KeyboardInterrupt), apply_memory_options(model, MemoryOptions(True, 4, True)):
        raise KeyboardInterrupt
    assert not list(traces(model))


def test_only_token_wise_mlps_run_in_tiles() -> None:
    found = tileable(tiny_model("deepseek_v2"))
    assert [type(module).__name__ for module in found] == ["DeepseekV2MLP"]

    class Shift(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states.roll(1, -2) * self.weight

    model = tiny_llama()
    model.model.layers[0].mlp.add_module("shift", Shift())
    model.model.layers[1].mlp.forward = lambda states, mask: states
    assert tileable(model) == []


def test_settings_of_the_allocator_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for given in ({}, {names[0]: "a:64"}, {names[1]: "a:64"}):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        expand_segments()
        expected = given or {names[0]: "expandable_segments:True"}
        assert {name: os.environ[name] for name in names if name in os.environ} == expected
    monkeypatch.delenv(names[0], raising=False)


SWITCH = "rope_extend.training.memory_options.disable_input_dtype_casting"
"""peft's, of the casts that save a copy of the input for each matrix."""


def in_bfloat16(model: Any = None, **how: Any) -> Any:
    """An adapter in float32 on a base in bfloat16, as in training."""
    adapter = with_adapter(tiny_llama() if model is None else model, torch.bfloat16, **how)
    for parameter in adapter.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapter


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


@torch.autocast("cpu", torch.bfloat16)
def test_lora_with_one_copy_of_its_input_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, ids, kept, found = in_bfloat16(), torch.randint(3, 60, (1, 1024)), [], []
    for _ in range(2):
        with apply_memory_options(adapter.get_base_model(), MemoryOptions()), LiveBytes() as memory:
            _loss = next_token_loss(adapter, ids)
        kept.append(memory.live)
        found.append([step(adapter, options, ids) for options in COMBINATIONS])
        monkeypatch.setattr(SWITCH, lambda model, active: nullcontext())
    for ours, theirs in zip(*found, strict=True):
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    state = ids.numel() * adapter.config.hidden_size * 2  # queries, keys and values save one; gate and up
    assert kept[1] - kept[0] >= 3 * state * adapter.config.num_hidden_layers


@pytest.mark.slow
def test_a_step_of_500k_tokens_of_an_8b_model_fits_on_80_gb(tmp_path: Path) -> None:
    """LoRA on all linear layers. With the kernel's own memory; what the peak is made of, in hidden states."""
    tokens = 524_288
    LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    ).save_pretrained(tmp_path)  # fmt: skip
    options = LoadOptions("cpu", dtype=torch.bfloat16, limit_memory=80 * 10**9)
    run, everything = recipe(tmp_path, target_length=tokens), MemoryOptions(True, 1024, True)
    plan = planned(run, everything, load_options=options, device=torch.device("cuda"))
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
    with torch.device("meta"):
        model = tiny_llama()
    candidates = candidate_options(described(target_length=tokens), model, torch.device(device))
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


@pytest.mark.parametrize(("tiles", "states"), [(0, 5), (64, 2)])
def test_layer_norms_are_float32_under_the_autocast_of_a_gpu(tiles: int, states: int, tmp_path: Any) -> None:
    """Autocast of a CPU leaves them in bfloat16."""
    GPTNeoXConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path)  # fmt: skip
    run = recipe(tmp_path, target_length=512, lora_targets="attention")
    options = LoadOptions("cpu", dtype=torch.bfloat16, limit_memory=10**9)
    cpu, gpu = (
        planned(run, MemoryOptions(mlp_tiles=tiles), load_options=options, device=torch.device(name))
        for name in ("cpu", "cuda")
    )
    more = (gpu.chosen.peak - cpu.chosen.peak) / (512 * 64 * 2)  # in hidden states of bfloat16
    assert more >= states  # one for each norm; in tiles, their float32 inputs are not kept
