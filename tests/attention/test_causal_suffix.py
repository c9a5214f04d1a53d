"""Attention of the last tokens of a window in parts, as on a GPU with cuDNN; shown without one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import LENGTH, same, tokens
from cases import FACTOR, TARGET, llama
from hypothesis import given
from hypothesis import strategies as st
from tolerances import rounding
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import rope_extend as rx
from rope_extend.attention import causal_suffix, fused_kernels, log_sum_exp
from rope_extend.evaluation import forward_plan
from rope_extend.evaluation.chunked_forward import ChunkedForward
from rope_extend.evaluation.flops import Rates
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.memory.plan import Budget

SCALE = 0.3
YARN = {"name": "yarn", "factor": FACTOR}
METHODS: list[dict[str, Any]] = [
    YARN,
    {"name": "dynamic_ntk", "factor": FACTOR},
    {"name": "short_original", "inner": YARN},
    {"name": "logn", "inner": YARN},
    {"name": "alibi"},
]


class Kernels(TorchDispatchMode):
    """Notes the attention kernels that are called, and the sizes of the largest tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.keys: list[int] = []
        self.masks = 0
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if "attention" in name:
            self.names.append(name.removeprefix("_scaled_dot_product_"))
            self.keys.append(args[1].shape[2])
            self.masks += (kwargs or {}).get("attn_mask") is not None
        out = function(*args, **(kwargs or {}))
        self.largest = max(self.largest, out.numel() if isinstance(out, Tensor) else 0)
        return out


def dense_suffix(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of the last tokens, written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(key.shape[2] - query.shape[2] + 1)
    return (scale * query @ key.mT).masked_fill(later, -torch.inf).softmax(-1) @ value


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes cuDNN, as on a Hopper GPU; the kernels of the CPU compute its parts."""
    monkeypatch.setattr(causal_suffix, "takes_cudnn", lambda *states, causal: True)
    monkeypatch.setattr(causal_suffix, "can_use_flash_attention", lambda parameters: True)
    monkeypatch.setattr(causal_suffix, "flash_suffix", dense_suffix)
    monkeypatch.setattr(causal_suffix, "SMALLEST_PART", 8)
    monkeypatch.setattr(causal_suffix, "WHOLE_QUERIES", 10)


@given(st.integers(0, 3 * 2**20))
def test_parts_have_few_sizes(keys: int) -> None:
    sizes = causal_suffix.sizes_of_parts(keys)
    *whole, _ = [*sizes, 0]
    assert sum(sizes) == keys
    assert len(sizes) <= 11
    assert len(set(sizes)) == len(sizes)
    assert all(size > 0 for size in sizes)
    rest = [size for size in whole if size < causal_suffix.SMALLEST_PART]
    assert len(rest) <= 1
    assert all(size & (size - 1) == 0 for size in whole if size not in rest)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("heads", "queries", "keys"), [((4, 2), 30, 97), ((2, 2), 5, 64), ((6, 1), 40, 41)])
@pytest.mark.usefixtures("cudnn")
def test_parts_equal_attention_written_out(
    heads: tuple[int, int], queries: int, keys: int, dtype: torch.dtype
) -> None:
    make = torch.Generator().manual_seed(keys)
    shapes = [(2, heads[0], queries, 16), (2, heads[1], keys, 16), (2, heads[1], keys, 16)]
    query, key, value = (torch.randn(*shape, dtype=dtype, generator=make) for shape in shapes)
    found = causal_suffix.in_parts(query, key, value, SCALE)
    assert found.dtype == dtype
    expected = dense_suffix(query.double(), key.double(), value.double(), SCALE)
    bound = rounding(dtype, keys * 16, max(1.0, float(expected.abs().max())))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("fields", METHODS, ids=lambda fields: fields["name"])
@pytest.mark.usefixtures("cudnn")
@torch.no_grad()
def test_chunks_in_parts_make_no_mask_and_give_the_same_states(fields: dict[str, Any]) -> None:
    """Static methods, and what acts inside attention. Each is computed by kernels without a mask alone."""
    model, ids = llama(), tokens(1, LENGTH)
    chunked = ChunkedForward(model, torch.device("cpu"))
    chunked.maskless = True
    with rx.patch_model(model, rx.Encoding.from_dict(fields), target_length=TARGET):
        expected = model.model(ids, use_cache=False).last_hidden_state
        assert chunked.strategy == "layer by layer"
        with Kernels() as kernels:
            found = torch.cat(list(chunked.in_chunks(ids, 20)), dim=1)
    same(found, expected)
    assert not kernels.masks
    assert len(set(kernels.keys)) < 24 or fields["name"] in ("dynamic_ntk", "short_original")


class Slices(TorchFunctionMode):
    """Cuts slices of tensors by an operation: a build without CUDA refuses to index fake tensors on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not Tensor.__getitem__:
            return function(*args, **(kwargs or {}))
        states, index = args
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            place = index.index(Ellipsis)
            index = (
                *index[:place],
                *[slice(None)] * (states.dim() + index.count(None) - len(index) + 1),
                *index[place + 1 :],
            )
        for axis, part in enumerate(index):
            if part is None:
                states = states.unsqueeze(axis)
                continue
            start, stop, _ = part.indices(states.shape[axis])
            states = states.narrow(axis, start, stop - start)
        return states


@contextmanager
def a_gpu() -> Iterator[Kernels]:
    """Tensors on a GPU, without values; notes the kernels that are called."""
    with FakeTensorMode(), Slices(), Kernels() as kernels:
        yield kernels


def heads_on_a_gpu(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of an 8B model without values; inside FakeTensorMode."""
    make = {"device": "cuda", "dtype": torch.bfloat16}
    query, key = torch.empty(1, 32, queries, 128, **make), torch.empty(1, 8, keys, 128, **make)
    return query, key, torch.empty_like(key)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes cuDNN unless that is turned off, and flash attention then; without a build for CUDA."""

    def choose(*_: Any, causal: bool) -> SDPBackend:
        on = torch.backends.cuda.cudnn_sdp_enabled()
        return SDPBackend.CUDNN_ATTENTION if on else SDPBackend.FLASH_ATTENTION

    monkeypatch.setattr(fused_kernels, "chosen_kernel", choose)
    monkeypatch.setattr(fused_kernels, "_refused", set())


@pytest.mark.usefixtures("hopper")
@torch.no_grad()
def test_cudnn_computes_the_parts_of_a_chunk_on_a_gpu() -> None:
    """Its operator gets grouped heads and no mask. The last few keys, whose number varies, go to flash."""
    with a_gpu() as kernels:
        query, key, value = heads_on_a_gpu(16_384, 5 * 16_384 + 100)
        found = causal_suffix.suffix_attention(query, key, value, 128**-0.5)
    assert (found.shape, found.dtype, found.device.type) == (query.shape, torch.bfloat16, "cuda")
    assert kernels.names == ["cudnn_attention"] * 2 + ["flash_attention"]
    assert kernels.keys == [16_384, 65_536, 100]
    assert kernels.largest == key.numel()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("how", ["odd", "turned off"])
@torch.no_grad()
def test_one_call_of_flash_attention_serves_where_cudnn_would_not(how: str) -> None:
    """Also under a mode that counts operations, and for heads whose width is no multiple of 8."""
    off = causal_suffix.without_cudnn() if how == "turned off" else nullcontext()
    with a_gpu() as kernels, off:
        query, key, value = heads_on_a_gpu(1000 if how == "odd" else 1024, 8192)
        if how == "odd":
            query, key, value = (part.narrow(3, 0, 100) for part in (query, key, value))
        found = causal_suffix.suffix_attention(query, key, value, 1.0)
    assert kernels.names == ["flash_attention"]
    assert kernels.keys == [8192]
    assert found.shape == query.shape


@pytest.mark.usefixtures("hopper")
def test_training_takes_the_kernel_that_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_suffix, "flash_suffix", lambda query, key, value, scale: "flash")
    monkeypatch.setattr(causal_suffix, "in_parts", lambda query, key, value, scale: "parts")
    found = []
    for trained in (True, False):
        with a_gpu():
            query, key, value = heads_on_a_gpu(1024, 4096)
            found.append(causal_suffix.suffix_attention(query.requires_grad_(trained), key, value, 1.0))
    assert found == ["flash", "parts"]


@pytest.mark.usefixtures("hopper")
@torch.no_grad()
def test_flash_attention_replaces_a_cudnn_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line in the log, and for the rest of the process. A lack of memory is not such a failure."""
    calls = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].shape)
        raise error

    error: RuntimeError = torch.OutOfMemoryError("CUDA out of memory")
    operators = SimpleNamespace(_scaled_dot_product_cudnn_attention=fail)
    monkeypatch.setattr(fused_kernels, "torch", SimpleNamespace(**{
        **{name: getattr(torch, name) for name in ("OutOfMemoryError", "Tensor", "is_autocast_enabled")},
        "ops": SimpleNamespace(aten=operators),
    }))  # fmt: skip
    with a_gpu() as kernels, caplog.at_level(logging.WARNING, "rope_extend"):
        states = heads_on_a_gpu(64, 64)
        with pytest.raises(torch.OutOfMemoryError):
            log_sum_exp.partial_attention(*states, causal=True, scale=1.0)
        error = RuntimeError("No valid execution plans built.\nmore")
        for _ in range(2):
            log_sum_exp.partial_attention(*states, causal=True, scale=1.0)
    assert kernels.names == ["flash_attention"] * 2
    assert len(calls) == 2
    assert caplog.messages == [
        "cuDNN's attention with a log-sum-exp failed for 128 channels (No valid execution plans built.); "
        "using flash attention"
    ]


def test_the_chosen_kernel_is_asked_of_torch() -> None:
    """On a CPU torch has flash attention, and no kernel for a width that differs between keys and values."""
    states = torch.randn(1, 2, 8, 16)
    assert fused_kernels.chosen_kernel(states, states, states, causal=True) == SDPBackend.FLASH_ATTENTION
    narrow = states[..., :4]
    assert fused_kernels.chosen_kernel(states, states, narrow, causal=True) == SDPBackend.MATH
    assert not fused_kernels.takes_cudnn(states, states, states, causal=True)


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
        monkeypatch.setattr(causal_suffix, "flash_suffix", dense_suffix)
        found = causal_suffix.suffix_attention(query, key, key.bfloat16(), SCALE)
    assert dtypes == [torch.float32, torch.bfloat16]
    assert found.dtype == torch.bfloat16
    expected = causal_suffix.in_parts(query.double(), key.double(), key.bfloat16().double(), SCALE)
    bound = rounding(torch.bfloat16, 20 * 16, float(expected.abs().max()))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("tokens", [1024, 2048])
@torch.no_grad()
def test_the_plan_counts_the_memory_of_parts(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 3 %: it is made on a machine without the GPU, and compared with the evaluator in parts here."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("meta"):
        empty = LlamaForCausalLM(config).to(torch.bfloat16)
    weights = sum(tensor.nbytes for tensor in (*empty.parameters(), *empty.buffers()))
    budget = Budget(torch.device("cuda"), 2**40)
    planned = forward_plan.ForwardEstimator(empty, budget, weights=weights).window(tokens, 256).total
    model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    monkeypatch.setattr(causal_suffix, "takes_cudnn", lambda *states, causal: True)
    monkeypatch.setattr(causal_suffix, "can_use_flash_attention", lambda parameters: True)
    monkeypatch.setattr(causal_suffix, "WHOLE_QUERIES", 1)
    chunked = ChunkedForward(model, torch.device("cpu"))
    chunked.maskless = True
    assert chunked.strategy == "layer by layer"
    ids = torch.randint(3, 64, (1, tokens), generator=torch.Generator().manual_seed(0))
    with LiveBytes() as memory:
        for tensor in (*model.parameters(), *model.buffers()):
            memory.add(tensor)
        for states in chunked.in_chunks(ids, 256):
            del states
    assert planned == pytest.approx(memory.peak, rel=0.03)


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
    curve, million = forward_plan._plan(estimator, [2**17, 2**20], None).lengths
    assert curve.strategy == "in one pass"
    assert 10 < curve.seconds < 12
    assert curve.peak < 20e9
    assert million.description == "layer by layer, in chunks of 16,384"
    assert 480 < million.seconds < 600
    assert million.total < 40e9
