"""Long windows in pieces: the numbers of one forward, in memory that does not grow with the window."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from cases import FAMILIES, KEY_FAMILIES, FamilyCase, tiny_model
from test_perplexity import VOCABULARY, measure, sliding, texts, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rope_extend as rx
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.memory import LiveBytes
from rope_extend.evaluation.reading import TRIAL, LongReader
from rope_extend.loss import hidden_states

CPU = torch.device("cpu")

WITH_A_CACHE = {
    "gemma4_unified": "later layers take the keys of earlier ones",
    "glm_moe_dsa": "layers hand on which keys they chose",
    "hrm_text": "its layers run more than once",
    "hy_v4": "layers hand on a residual stream",
    "longcat_flash": "each layer counts twice",
    "mllama": "layers of another kind between its own",
    "zaya": "layers hand on the state of a router",
}
IN_ONE_PIECE = {
    "bamba": "its state-space layers forget what came before a piece",
    "blt": "its global transformer reads without a cache",
    "minimax": "takes a cache of its own class",
}


QUICK = (*KEY_FAMILIES, *IN_ONE_PIECE, "zaya")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(case, id=case.model_type, marks=[] if case.model_type in QUICK else [pytest.mark.slow])
        for case in FAMILIES
    ],
)
@torch.no_grad()
def test_every_family_is_read_in_the_way_that_gives_what_one_forward_gives(family: FamilyCase) -> None:
    model = tiny_model(family).eval()
    reader = LongReader(model, CPU)
    ids = torch.randint(3, 60, (2, 64), generator=torch.Generator().manual_seed(1))
    expected = (
        None
        if family.model_type in IN_ONE_PIECE
        else "with a cache"
        if family.model_type in WITH_A_CACHE
        else "layer by layer"
    )
    assert reader.way == expected
    if expected is not None:
        pieces = list(reader.in_pieces(ids, 24))
        assert [piece.shape[1] for piece in pieces] == [24, 24, 16]
        whole = hidden_states(model, ids)
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_a_family_that_forgets_between_pieces_is_not_read_in_pieces() -> None:
    case = next(case for case in FAMILIES if case.model_type == "bamba")
    model = tiny_model(case)
    with pytest.raises(RopeExtendError, match="bamba does not give in pieces"):
        measure(model, texts(40, vocabulary=60), [40], chunk=16)


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "xpos", "short_original(yarn)"])
@torch.no_grad()
def test_layer_by_layer_under_a_patch(method: str) -> None:
    """Tables from the rotary module, and rotation inside attention with positions beside the cache."""
    model = tiny().eval()
    ids = texts(100)[0].input_ids[None]
    with rx.extend(model, 128, method):
        reader = LongReader(model, CPU)
        assert reader.way == "layer by layer"
        pieces = torch.cat(list(reader.in_pieces(ids, 30)), dim=1)
        torch.testing.assert_close(pieces, hidden_states(model, ids), rtol=1e-4, atol=1e-4)


def test_both_ways_agree_bit_for_bit() -> None:
    """The same kernels on the same shapes, whichever loop is the outer one."""
    model = sliding(10).eval()
    reader = LongReader(model, CPU)
    pieces = torch.split(torch.stack([one.input_ids for one in texts(70, 70)]), 16, dim=1)
    with torch.no_grad():
        for one, other in zip(reader.by_layer(pieces), reader.with_cache(pieces), strict=True):
            assert torch.equal(one, other)


def test_an_interruption_leaves_the_layers_where_they_were() -> None:
    model = tiny().eval()
    before = list(model.model.layers)
    generator = LongReader(model, CPU).by_layer(torch.split(texts(40)[0].input_ids[None], 16, dim=1))
    next(generator)
    assert list(model.model.layers) == before  # between two pieces too

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure(model, texts(40), [40], chunk=16)
    handle.remove()
    assert list(model.model.layers) == before
    assert measure(model, texts(40), [40], chunk=16).ppl == measure(model, texts(40), [40], chunk=16).ppl


# ------------------------------------------------------------------------------------- how much at a time


def sizes(model: torch.nn.Module, length: int) -> list[int]:
    """How many tokens the first layer reads at a time."""
    seen: list[int] = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda _module, states: seen.append(states[0].shape[1])
    )
    measure(model, texts(length), [length])
    handle.remove()
    trial = [sum(TRIAL), *TRIAL, *TRIAL]
    return seen[len(trial) :] if seen[: len(trial)] == trial else seen


def test_what_is_read_at_a_time_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = "rope_extend.evaluation.reading"
    model, slides = tiny(), sliding(10)
    assert sizes(model, 100) == [100]
    monkeypatch.setattr(f"{reading}.WHOLE", 99)
    monkeypatch.setattr(f"{reading}.CHUNK", 30)
    assert sizes(model, 99) == [99]
    assert sizes(model, 100) == [30, 30, 30, 10]
    monkeypatch.setattr(f"{reading}.PAIRS", 2000)  # masks `[piece, window]` of so many
    assert sizes(model, 99) == [99]  # none is needed for a whole window
    assert sizes(model, 100) == [20] * 5
    assert sizes(slides, 44) == [44]
    assert sizes(slides, 50) == [30, 20]
    assert sizes(slides, 80) == [25, 25, 25, 5]
    model.set_attn_implementation("eager")  # four heads
    assert sizes(model, 22) == [22]
    assert sizes(model, 50) == [10] * 5


@pytest.mark.parametrize("make", [tiny, lambda: sliding(10)], ids=["full", "sliding window"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_tensor_has_a_value_for_every_pair_of_tokens(
    make: Any, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mask over all pairs, which at 128k tokens would be 16 GiB; nor scores, but eager's of a piece."""
    monkeypatch.setattr("rope_extend.evaluation.reading.PAIRS", 2**14)
    model = make().eval()
    model.set_attn_implementation(attention)
    length = 1024
    with LiveBytes() as memory:
        result = measure(model, texts(length), [length])
    # A mask becomes float32 and is copied; scores have it for each of four heads, in float32 and sliding.
    assert memory.largest <= max(4 * 2**14, length * VOCABULARY)
    assert memory.largest < length**2 / 4
    model.set_attn_implementation("sdpa")
    ids = texts(length)[0].input_ids[None]
    with torch.no_grad():
        assert result.ppl[length] == pytest.approx(model(ids, labels=ids).loss.exp().item(), rel=1e-5)


def test_in_pieces_memory_grows_by_the_hidden_states_and_one_layers_keys() -> None:
    model = tiny(intermediate=512).eval()
    model.config.attention_dropout = 0.0
    config = model.config
    short, long, size = 1024, 4096, 64

    def growth(**how: Any) -> float:
        peaks = []
        for length in (short, long):
            (document,) = texts(length)
            with LiveBytes() as memory:
                measure(model, [document], [length], chunk_bytes=2**16, **how)
            peaks.append(memory.peak)
        return (peaks[1] - peaks[0]) / (long - short)

    states = 4 * config.hidden_size
    keys = 2 * 4 * config.num_key_value_heads * config.head_dim
    mask = size * (1 + 1 + 4)  # two parts of a boolean mask, and it in float32
    heads = 2 * 4 * config.num_attention_heads * config.head_dim  # keys repeated for the heads, under a mask
    losses = 4 + 4 + 8 + 8  # of each token, joined, and its id as input and target
    bound = states + keys + heads + mask + losses
    assert growth(chunk=size) <= 1.1 * bound
    assert growth() > 4 * bound


class Widest(TorchDispatchMode):
    """The most rows of a tensor with as many columns as there are tokens in the vocabulary."""

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


@pytest.mark.parametrize("how", [{}, {"chunk": 50}], ids=["whole", "in pieces"])
@torch.no_grad()
def test_every_loss_is_that_of_the_naive_loop_to_a_hundred_thousandth_of_a_nat(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = tiny(vocabulary=4096, hidden=64).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # losses of about ten nats, as models have them at worst
            torch.nn.init.normal_(parameter, std=0.08)
    (document,) = texts(300, vocabulary=4096)
    result = measure(model, [document], [300], save_losses=True, chunk_bytes=2**16, **how)
    logits = model(document.input_ids[None]).logits[0, :-1]
    naive = torch.nn.functional.cross_entropy(logits, document.input_ids[1:], reduction="none")
    np.testing.assert_allclose(result.losses[300][0], naive.numpy(), rtol=0, atol=1e-5)
    assert naive.mean() > 8


# ------------------------------------------------------------------------------------------- without a mask


@pytest.mark.parametrize("make", [tiny, lambda: sliding(10)], ids=["full", "sliding window"])
@torch.no_grad()
def test_attention_without_a_mask_gives_what_it_gives_with_one(make: Any) -> None:
    """As on a GPU, here with the kernels of the CPU; the masks of layers that slide are made as ever."""
    model = make().eval()
    ids = texts(100)[0].input_ids[None]
    reader = LongReader(model, CPU)
    reader.maskless = True
    found = torch.cat(list(reader.in_pieces(ids, 30)), dim=1)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(found, hidden_states(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@torch.no_grad()
def test_flash_attention_of_the_last_queries_on_a_gpu() -> None:
    model = tiny(hidden=64).eval().to("cuda", torch.bfloat16)
    ids = texts(1000)[0].input_ids[None].to("cuda")
    reader = LongReader(model, torch.device("cuda"))
    assert reader.maskless
    with LiveBytes() as memory:
        found = torch.cat(list(reader.in_pieces(ids, 300)), dim=1)
    expected = hidden_states(model, ids)
    assert memory.largest < 300 * 1000
    gaps = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    assert gaps.max() < 0.05


def test_what_a_family_cannot_do_is_told_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    case = next(case for case in FAMILIES if case.model_type == "zaya")
    with caplog.at_level(logging.DEBUG, "rope_extend"), torch.no_grad():
        assert LongReader(tiny_model(case).eval(), CPU).way == "with a cache"
    assert "zaya: no by_layer" in caplog.text
