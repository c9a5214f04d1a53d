"""Long windows in chunks: the results of one forward, in memory that does not grow with the window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import FamilyCase, tiny_model
from covering import SHAPES, families, few
from test_perplexity import VOCABULARY, measure, sliding, texts, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rope_extend as rx
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.chunked_forward import TRIAL_CHUNKS, ChunkedForward
from rope_extend.evaluation.loss_computer import LossComputer
from rope_extend.loss import hidden_states
from rope_extend.memory.live_bytes import LiveBytes

CPU = torch.device("cpu")

WITH_A_CACHE = {
    "gemma4_unified": "later layers use the keys of earlier ones",
    "glm_moe_dsa": "layers pass on which keys they chose",
    "hrm_text": "its layers run more than once",
    "hy_v4": "layers pass on a residual stream",
    "longcat_flash": "each layer counts twice",
    "mllama": "layers of another kind between its decoder layers",
    "zaya": "layers pass on the state of a router",
}
IN_ONE_PASS = {
    "bamba": "its state-space layers lose state between chunks",
    "blt": "its global transformer has no cache",
    "minimax": "needs a cache of its own class",
}


@pytest.mark.parametrize("family", families(some=(*SHAPES, *IN_ONE_PASS, "zaya")))
@torch.no_grad()
def test_every_family_has_the_strategy_that_gives_what_one_forward_gives(family: FamilyCase) -> None:
    model = tiny_model(family).eval()
    chunked = ChunkedForward(model, CPU)
    ids = torch.randint(3, 60, (2, 64), generator=torch.Generator().manual_seed(1))
    others = dict.fromkeys(WITH_A_CACHE, "with a cache") | dict.fromkeys(IN_ONE_PASS)
    expected = others.get(family.model_type, "layer by layer")
    assert chunked.strategy == expected
    assert LossComputer(model, CPU).can_chunk(64, 24) == (expected is not None)  # else whole
    if expected is not None:
        chunks = list(chunked.in_chunks(ids, 24))
        assert [chunk.shape[1] for chunk in chunks] == [24, 24, 16]
        whole = hidden_states(model, ids)
        torch.testing.assert_close(torch.cat(chunks, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "method", ["yarn", "dynamic_ntk", "xpos", "short_original(yarn)", "self_extend", "jet_long", "dual_chunk"]
)
@torch.no_grad()
def test_layer_by_layer_under_a_patch(method: str) -> None:
    """Tables of the rotary module, and rotation inside attention with positions next to the cache."""
    model = tiny().eval()
    ids = texts(100)[0].input_ids[None]
    with rx.extend(model, 128, method):
        chunked = ChunkedForward(model, CPU)
        assert chunked.strategy == "layer by layer"
        chunks = torch.cat(list(chunked.in_chunks(ids, 30)), dim=1)
        torch.testing.assert_close(chunks, hidden_states(model, ids), rtol=1e-4, atol=1e-4)


def sizes(model: torch.nn.Module, length: int) -> list[int]:
    """The chunk sizes that the first layer gets."""
    seen: list[int] = []
    with model.model.layers[0].register_forward_pre_hook(
        lambda _module, states: seen.append(states[0].shape[1])
    ):
        measure(model, texts(length), [length])
    trial = [sum(TRIAL_CHUNKS), *TRIAL_CHUNKS, *TRIAL_CHUNKS]
    return seen[len(trial) :] if seen[: len(trial)] == trial else seen


def test_the_default_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "rope_extend.evaluation.chunked_forward"
    model, slides = tiny(), sliding(10)
    assert sizes(model, 100) == [100]
    monkeypatch.setattr(f"{module}.MAX_WHOLE", 99)
    monkeypatch.setattr(f"{module}.MAX_CHUNK", 30)
    assert sizes(model, 99) == [99]
    assert sizes(model, 100) == [30, 30, 30, 10]
    monkeypatch.setattr(f"{module}.MAX_PAIRS", 2000)  # elements of a mask `[chunk, window]`
    assert sizes(model, 99) == [99]  # a whole window needs no mask
    assert sizes(model, 100) == [20] * 5
    assert sizes(slides, 44) == [44]
    assert sizes(slides, 50) == [30, 20]
    assert sizes(slides, 80) == [25, 25, 25, 5]
    model.set_attn_implementation("eager")  # four heads
    assert sizes(model, 22) == [22]
    assert sizes(model, 50) == [10] * 5


@pytest.mark.parametrize("make", [tiny, lambda: sliding(10)], ids=["full", "sliding window"])
@pytest.mark.parametrize("attention", few(("sdpa", "eager"), 2))
def test_no_tensor_has_a_value_for_every_pair_of_tokens(
    make: Any, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mask over all pairs, which would be 16 GiB at 128k tokens, and scores only for a chunk."""
    monkeypatch.setattr("rope_extend.evaluation.chunked_forward.MAX_PAIRS", 2**14)
    model = make().eval()
    model.set_attn_implementation(attention)
    length = 1024
    with LiveBytes() as memory:
        result = measure(model, texts(length), [length])
    # A mask is converted to float32 and copied. Scores have four heads in float32, with sliding windows too.
    assert memory.largest <= max(4 * 2**14, length * VOCABULARY)
    assert memory.largest < length**2 / 4
    model.set_attn_implementation("sdpa")
    ids = texts(length)[0].input_ids[None]
    with torch.no_grad():
        assert result.ppl[length] == pytest.approx(model(ids, labels=ids).loss.exp().item(), rel=1e-5)


class Widest(TorchDispatchMode):
    """The largest number of rows of a tensor with one column per token of the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocabulary,):
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return out


@pytest.mark.parametrize("how", [{}, {"chunk": 64}, {"protocol": "sliding", "stride": 128}])
def test_the_logits_of_the_window_never_exist(how: dict[str, Any]) -> None:
    model, length = tiny(vocabulary=977).eval(), 512
    budget = 40 * 4 * 977
    with Widest(977) as logits:
        measure(model, texts(length, vocabulary=977), [length], chunk_bytes=budget, **how)
    assert logits.rows == 40
    with Widest(977) as logits, torch.no_grad():
        model(texts(length, vocabulary=977)[0].input_ids[None])
    assert logits.rows == length


@pytest.mark.parametrize("how", [{}, {"chunk": 50}], ids=["whole", "in chunks"])
@torch.no_grad()
def test_every_loss_is_that_of_the_naive_loop_to_a_hundred_thousandth_of_a_nat(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = tiny(vocabulary=4096, hidden=64).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # losses of about ten nats, the worst of real models
            torch.nn.init.normal_(parameter, std=0.08)
    (document,) = texts(300, vocabulary=4096)
    result = measure(model, [document], [300], save_losses=True, chunk_bytes=2**16, **how)
    logits = model(document.input_ids[None]).logits[0, :-1]
    naive = torch.nn.functional.cross_entropy(logits, document.input_ids[1:], reduction="none")
    np.testing.assert_allclose(result.losses[300][0], naive.numpy(), rtol=0, atol=1e-5)
    assert naive.mean() > 8


@pytest.mark.parametrize("make", [tiny, lambda: sliding(10)], ids=["full", "sliding window"])
@torch.no_grad()
def test_attention_without_a_mask_gives_what_it_gives_with_one(make: Any) -> None:
    """As on a GPU, but with the kernels of the CPU. Layers with sliding windows keep their masks."""
    model = make().eval()
    ids = texts(100)[0].input_ids[None]
    chunked = ChunkedForward(model, CPU)
    chunked.maskless = True
    found = torch.cat(list(chunked.in_chunks(ids, 30)), dim=1)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(found, hidden_states(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@torch.no_grad()
def test_flash_attention_of_the_last_queries_on_a_gpu() -> None:
    model = tiny(hidden=64).eval().to("cuda", torch.bfloat16)
    ids = texts(1000)[0].input_ids[None].to("cuda")
    chunked = ChunkedForward(model, torch.device("cuda"))
    assert chunked.maskless
    with LiveBytes() as memory:
        found = torch.cat(list(chunked.in_chunks(ids, 300)), dim=1)
    expected = hidden_states(model, ids)
    assert memory.largest < 300 * 1000
    gaps = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    assert gaps.max() < 0.05


class Small:
    """A hook of the first layer that imitates a device with memory for only `fits` tokens at a time."""

    def __init__(self, fits: int, error: Exception) -> None:
        self.fits, self.error, self.sizes = fits, error, []

    def __call__(self, _module: object, states: tuple[torch.Tensor]) -> None:
        size = states[0].shape[:2].numel()
        if size > sum(TRIAL_CHUNKS):
            self.sizes.append(size)
        if size > self.fits:
            raise self.error


def test_if_memory_runs_out_the_document_is_repeated_in_smaller_chunks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, documents = tiny(), texts(96, 96, 96)
    whole = measure(model, documents, [48, 96])
    small = Small(30, RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    with model.model.layers[0].register_forward_pre_hook(small):
        result = measure(model, documents, [48, 96])
    # The first document fails whole and in halves. The others start with what fits.
    assert small.sizes == [96, 48] + [24] * 12
    assert caplog.text.count("retrying in chunks of") == 2
    assert "'text0': retrying in chunks of 24 tokens" in caplog.text
    np.testing.assert_allclose(result.block_nll, whole.block_nll, rtol=1e-5, atol=1e-5)
    assert result.forward_tokens == whole.forward_tokens


@pytest.mark.slow
def test_if_memory_runs_out_batches_get_smaller() -> None:
    model, documents = tiny(), texts(96)
    whole = measure(model, documents, [16], protocol="sliding", stride=4)
    small = Small(16, torch.OutOfMemoryError("CUDA out of memory"))
    with model.model.layers[0].register_forward_pre_hook(small):
        result = measure(model, documents, [16], protocol="sliding", stride=4)
    assert result.ppl[16] == pytest.approx(whole.ppl[16], rel=1e-5)
    assert [size for size in small.sizes if size > 16] == [320, 160, 80, 32]
    assert small.sizes[-21:] == [16] * 21


@pytest.mark.slow
def test_too_little_memory_is_one_clear_error() -> None:
    model, documents = tiny(), texts(96)
    model.model.layers[0].register_forward_pre_hook(
        Small(0, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    )
    with pytest.raises(
        RopeExtendError, match=r"out of memory on 'text0', even in chunks of .*Tried to allocate"
    ):
        measure(model, documents, [96])
