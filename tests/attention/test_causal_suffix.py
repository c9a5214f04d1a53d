"""Attention of the last tokens of a window without a mask, as on a GPU; shown without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import LENGTH, same, tokens
from cases import TARGET, llama
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import rope_extend as rx
from rope_extend.attention import causal_suffix
from rope_extend.evaluation import forward_plan
from rope_extend.evaluation.chunked_forward import ChunkedForward
from rope_extend.evaluation.flops import Rates
from rope_extend.memory.plan import Budget


def dense_suffix(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of the last tokens, written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(key.shape[2] - query.shape[2] + 1)
    return (scale * query @ key.mT).masked_fill(later, -torch.inf).softmax(-1) @ value


class Kernels(TorchDispatchMode):
    """Notes the attention kernels that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if "attention" in name:
            self.names.append(name.removeprefix("_scaled_dot_product_"))
            assert (kwargs or {}).get("attn_mask") is None
        return function(*args, **(kwargs or {}))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The flash kernel serves every call, as on a GPU in bfloat16; its queries and keys."""
    calls = []

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        calls.append((query.shape[2], key.shape[2]))
        return dense_suffix(query, key, value, scale)

    monkeypatch.setattr(causal_suffix, "can_use_flash_attention", lambda parameters: True)
    monkeypatch.setattr(causal_suffix, "suffix_attention", attend)
    return calls


@pytest.mark.parametrize("name", ["yarn", "dynamic_ntk", "short_original(yarn)", "logn(yarn)"])
@pytest.mark.parametrize("chunk", [20, 30, LENGTH])
@torch.no_grad()
def test_chunks_make_no_mask_and_give_the_same_states(
    name: str, chunk: int, flash: list[tuple[int, int]]
) -> None:
    """Static methods, and what acts inside attention; chunks of a long window, and parts of a whole one."""
    model, ids = llama(), tokens(1, LENGTH)
    chunked = ChunkedForward(model, torch.device("cpu"))
    chunked.maskless = True
    with rx.extend(model, TARGET, name):
        expected = model.model(ids, use_cache=False).last_hidden_state
        assert chunked.strategy == "layer by layer"
        with Kernels():
            found = torch.cat(list(chunked.in_chunks(ids, chunk)), dim=1)
    same(found, expected)
    assert flash or chunk == LENGTH or name not in ("yarn", "logn(yarn)")


@pytest.mark.parametrize("width", [100, 128])
@torch.no_grad()
def test_a_chunk_is_one_call_of_flash_attention(width: int) -> None:
    """With grouped heads, also of a width that is no multiple of 8, as on a GPU without its values."""
    with FakeTensorMode(), Kernels() as kernels:
        make = {"device": "cuda", "dtype": torch.bfloat16}
        query, key = torch.empty(1, 32, 1024, width, **make), torch.empty(1, 8, 8192, width, **make)
        found = causal_suffix.suffix_attention(query, key, key, 1.0)
    assert kernels.names == ["flash_attention"]
    assert (found.shape, found.dtype, found.device.type) == (query.shape, torch.bfloat16, "cuda")


def test_autocast_decides_which_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained norms give float32 queries and keys, which autocast casts; so no mask is needed."""
    dtypes: list[torch.dtype] = []
    monkeypatch.setattr(
        causal_suffix, "can_use_flash_attention", lambda parameters: dtypes.append(parameters.query.dtype)
    )
    query, key = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 20, 16)
    causal_suffix.flash_serves(query, key, key)
    with torch.autocast("cpu", torch.bfloat16):
        causal_suffix.flash_serves(query, key, key.bfloat16())
    assert dtypes == [torch.float32, torch.bfloat16]


H100 = Rates(linear=680e12, attention=600e12)
"""Operations per second that GPU.md-like arithmetic assumes: cuBLAS and cuDNN."""


@pytest.mark.slow
def test_long_windows_of_an_8b_model_are_planned_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rates of an H100: 128k tokens in 12 seconds, and a million in 10 minutes and 40 GB."""
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    monkeypatch.setattr(forward_plan, "measured_rates", lambda *_: H100)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    budget = Budget(torch.device("cuda"), 80 * 10**9)
    estimator = forward_plan.ForwardEstimator(model, budget, weights=weights)
    curve, million = forward_plan._plan(estimator, [2**17, 2**20], None, 1).lengths
    assert curve.strategy == "in one pass"
    assert 10 < curve.seconds < 12
    assert curve.peak < 20e9
    assert million.description == "layer by layer, in chunks of 16,384"
    assert 480 < million.seconds < 600
    assert million.total < 40e9
