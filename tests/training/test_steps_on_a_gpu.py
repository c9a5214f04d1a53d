"""What a training step needs on a GPU, shown without one: pinned memory, time-outs, and loading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import tiny_llama
from transformers import GPTNeoXConfig

from rope_extend.models import load_options
from rope_extend.models.processes import PATIENCE
from rope_extend.training import finetune as tuning
from rope_extend.training.memory_options import MemoryOptions, apply_memory_options, tiled
from rope_extend.training.recipe import Recipe
from rope_extend.training.step_plan import candidate_options, plan_training


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
    from test_memory_options import with_adapter

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


def test_processes_wait_for_the_one_that_tokenises(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would give up after ten minutes."""
    handlers = []

    class StopError(Exception):
        pass

    def accelerator(**arguments: Any) -> None:
        handlers.extend(arguments["kwargs_handlers"])
        raise StopError

    monkeypatch.setattr(tuning, "Accelerator", accelerator)
    recipe = Recipe("model", "data", str(tmp_path), 64)
    with pytest.raises(Exception, match="accelerate does not start"):
        tuning._accelerator(recipe, tmp_path)
    (handler,) = handlers
    assert handler.timeout == PATIENCE


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
    recipe = Recipe(str(tmp_path), "data", "run", 512, gradient_accumulation=1)
    options = load_options.LoadOptions("cpu", dtype=torch.bfloat16, limit_memory=10**9)
    peaks = []
    for device in ("cpu", "cuda"):
        plan = plan_training(
            recipe, load_options=options, device=torch.device(device),
            memory_options=MemoryOptions(mlp_tiles=tiles),
        )  # fmt: skip
        assert plan is not None
        peaks.append(plan.chosen.peak)
    more = (peaks[1] - peaks[0]) / (512 * 64 * 2)  # in hidden states of bfloat16
    assert more >= states  # one for each norm; in tiles, their float32 inputs are not kept
