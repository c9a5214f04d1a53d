"""What acts inside attention runs on GPUs too, shown without one: devices, kernels and host reads."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from batches import LENGTH, same, tokens
from cases import TARGET, llama
from covering import few
from logical_devices import inputs, spread
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import rope_extend as rx
from rope_extend.attention import bias_parts, log_sum_exp
from rope_extend.attention.packed import document_attention
from rope_extend.evaluation.forward_plan import ForwardEstimator
from rope_extend.memory.plan import Budget

INSIDE = (
    "yarn", "dynamic_ntk", "short_original(yarn)", "logn(yarn)", "xpos(linear)", "drope", "alibi", "t5_bias",
    "fire", "shaw", "linear_attention", "sinusoidal",
)  # fmt: skip


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a GPU are not here: parts without a mask are computed by products."""
    monkeypatch.setattr(log_sum_exp, "_has_kernel", lambda *_: False)


@torch.no_grad()
def cached_logits(model: Any, ids: Tensor) -> list[Tensor]:
    """Logits of a text in two parts and of one more token, with a cache."""
    cache = DynamicCache(config=model.config)
    return [model(part, past_key_values=cache).logits for part in ids.tensor_split([LENGTH // 2, -1], dim=1)]


def same_on(devices: list[str], model: Any, name: str) -> Any:
    """Check that a text has the logits of the CPU on other devices; returns their mode."""
    ids = tokens(1, LENGTH)
    with rx.extend(model, TARGET, name):
        expected = cached_logits(model, ids)
        with spread(model, *devices) as mode:
            found = cached_logits(model, inputs(ids, devices[0]))
    for ours, theirs in zip(found, expected, strict=True):
        same(ours, theirs)
    return mode


@pytest.mark.parametrize("implementation", few(["sdpa", "eager"], 2))
@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:1"]], ids=len)
@pytest.mark.parametrize("name", INSIDE)
def test_a_model_may_be_on_any_devices(name: str, devices: list[str], implementation: str) -> None:
    """Layers on another GPU get copies of positions, cos and sin."""
    same_on(devices, llama(attn_implementation=implementation), name)


@pytest.mark.parametrize(
    ("name", "devices"),
    few(
        [*((name, ["cuda:0"]) for name in ("self_extend", "rerope", "jet_long", "sinks", "dual_chunk")),
        *((name, ["cuda:0", "cuda:1"]) for name in ("near_far", "dual_chunk")),
    ], 2),
)  # fmt: skip
def test_methods_that_change_positions_may_be_on_any_devices(name: str, devices: list[str]) -> None:
    """More layers need no more looks at a device, but on a second one, where each layer copies the mask."""
    counts = []
    for layers in (2, 4):
        mode = same_on(devices, llama(num_hidden_layers=layers), name)
        counts.append((len(mode.reads), len(mode.writes) - 2 * layers))  # two of a new cache
    assert counts[0] == counts[1] or len(devices) == 2


@pytest.mark.parametrize("name", INSIDE)
@torch.no_grad()
def test_the_host_looks_at_a_gpu_once_in_a_forward(name: str) -> None:
    """At the positions, which then are on the host for all layers. A static method never looks.

    What the host copies to the GPU, such as tables, does not wait for it.
    """
    model, ids = llama(num_hidden_layers=3), tokens(1, LENGTH)
    with rx.extend(model, TARGET, name), spread(model, "cuda:0") as mode:
        cache = DynamicCache(config=model.config)
        for part in (ids[:, :-1], ids[:, -1:]):  # a whole text without a mask, and a step of decoding
            empty = cache.get_seq_length() == 0
            model.model(inputs(part, "cuda:0"), past_key_values=cache)
            assert len(mode.reads) == {"yarn": 0}.get(name, 1)
            assert mode.writes == ["tensor"] * (6 if empty else 0)  # transformers' own, of a new cache
            mode.reads.clear()
            mode.writes.clear()


@pytest.mark.parametrize("name", INSIDE)
@torch.no_grad()
def test_padding_costs_few_looks_at_a_gpu_and_none_in_each_layer(name: str) -> None:
    """One for positions, and one to see whether a mask looks ahead, or where the keys of a bias end."""
    ids, counts = tokens(2, LENGTH), []
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    for layers in (0, 1, 3):  # without layers, and so without our part
        model = llama(num_hidden_layers=max(1, layers))
        patch = rx.extend(model, TARGET, name) if layers else nullcontext()
        with patch, spread(model, "cuda:0") as mode:
            model.model(inputs(ids, "cuda:0"), attention_mask=inputs(padding, "cuda:0"), use_cache=False)
            counts.append(len(mode.reads))
    assert counts[1] == counts[2]
    assert counts[1] - counts[0] <= {"yarn": 0, "linear_attention": 3}.get(name, 2)  # which tokens are hidden


class Calls(TorchFunctionMode):
    """Notes each call of torch's attention: its mask, its heads of keys, and whether cuDNN may compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Any] = []
        self.cudnn: list[bool] = []
        self.heads: list[int] = []
        self.ways: list[tuple[bool, bool]] = []
        """Whether each call is causal, and whether it has grouped heads."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.scaled_dot_product_attention:
            bound = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False), **(kwargs or {}))
            self.masks.append(type(bound.get("attn_mask")))
            self.cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
            self.heads.append(bound["key"].shape[1])
            self.ways.append((bound.get("is_causal", False), bound.get("enable_gqa", False)))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "cudnn"), [("yarn", True), ("alibi", False), ("t5_bias", False)])
def test_only_calls_of_one_shape_go_to_cudnn(name: str, cudnn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN builds a plan for each new shape, such as those of parts and segments."""
    monkeypatch.setattr(bias_parts, "FEWEST", 8)
    monkeypatch.setattr(bias_parts, "MOST", 8)
    model, ids = llama().train(), tokens(1, LENGTH)
    with rx.extend(model, TARGET, name), Calls() as calls:
        model(ids).logits.sum().backward()
    assert set(calls.cudnn) == {cudnn}
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_packed_documents_do_not_go_to_cudnn() -> None:
    states = torch.randn(1, 2, 12, 8)
    with Calls() as calls:
        document_attention(states, states, states, torch.tensor([0, 5, 12]))
    assert calls.cudnn == [False, False]


@pytest.mark.parametrize("name", [None, "yarn", "logn(yarn)", "drope", "sinusoidal"])
@pytest.mark.parametrize("trained", [False, True])
def test_whole_windows_are_causal_without_a_mask_and_with_grouped_heads(
    name: str | None, trained: bool
) -> None:
    """What cuDNN and flash attention need. Keys are never repeated for the heads of a group."""
    model, ids = llama(num_attention_heads=4, num_key_value_heads=2).train(trained), tokens(1, LENGTH)
    patch = rx.extend(model, TARGET, name) if name else nullcontext()
    with patch, Calls() as calls, torch.set_grad_enabled(trained):
        loss = model(ids, use_cache=False).logits.sum()
        if trained:
            loss.backward()
    assert len(calls.masks) == model.config.num_hidden_layers
    assert set(calls.masks) == {type(None)}
    assert set(calls.ways) == {(True, True)}
    assert set(calls.heads) == {2}


def test_the_plan_of_a_long_window_has_no_masks_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to static methods: rotated keys, and no mask of 16,384 x 262,144."""
    monkeypatch.undo()  # on the meta device, kernels have sizes
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    needed = []
    for method in ("yarn", "dynamic_ntk"):
        estimator = ForwardEstimator(
            model, Budget(torch.device("cuda"), 2**40), weights=0,
            setups=[lambda method=method: rx.extend(model, 2**18, method)],
        )  # fmt: skip
        needed.append(estimator.window(2**18, 2**14).total)
    states = 2**18 * 512 * 2
    assert needed[1] - needed[0] < 2 * states
