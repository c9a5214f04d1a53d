"""RoFormer's linear attention equals its formula in float64, with a state instead of a cache of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import LENGTH, batch, in_parts, logits, same, tokens
from cases import PLAIN, TARGET, YARN, FamilyCase, llama, tiny_model
from family_cases import GEMMA3
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import rope_extend as rx
from rope_extend.attention import kernel
from rope_extend.attention.kernel import StateLayer
from rope_extend.errors import PatchError, UnsupportedModelError

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


def grouped(**changes: Any) -> PreTrainedModel:
    return llama(**GROUPED, **changes)


@pytest.fixture(params=[{"name": "none"}, YARN], ids=["none", "yarn"])
def encoding(request: pytest.FixtureRequest) -> Any:
    return rx.encoding("linear_attention", inner=request.param)


def naive(q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
    """Equation 19 of 2104.09864, one query at a time: `[heads, T, width]`, angles `[T, width/2]`, float64."""

    def feature(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.exp())

    def turn(x: Tensor, at: int) -> Tensor:
        half = x.shape[-1] // 2
        both = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
            torch.ones(half).double(), angles[at]
        )
        return torch.cat([both.real, both.imag], dim=-1)

    k, v = (t.repeat_interleave(len(q) // len(t), dim=0) for t in (k, v))
    rows = []
    for m in range(q.shape[1]):
        above, below = 0.0, 0.0
        for n in range(m + 1):
            above = above + (turn(feature(q[:, m]), m) * turn(feature(k[:, n]), n)).sum(-1)[:, None] * v[:, n]
            below = below + (feature(q[:, m]) * feature(k[:, n])).sum(-1)[:, None]
        rows.append(above / below)
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("chunk", [7, 128])
def test_attention_equals_the_formula(encoding: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one layer of Llama: the input of the output projection, and the gradients."""
    monkeypatch.setattr(kernel, "CHUNK", chunk)
    model = grouped(num_hidden_layers=1)
    seen: dict[str, Tensor] = {}
    layer = model.model.layers[0].self_attn
    layer.o_proj.register_forward_pre_hook(lambda module, args: seen.update(output=args[0]))
    layer.q_proj.register_forward_hook(lambda module, args, output: seen.update(q=output))
    layer.k_proj.register_forward_hook(lambda module, args, output: seen.update(k=output))
    layer.v_proj.register_forward_hook(lambda module, args, output: seen.update(v=output))
    with rx.patch_model(model, encoding, target_length=TARGET) as patch:
        model(tokens(1, 40), position_ids=torch.arange(7, 47)[None])
        angles = torch.arange(7, 47).double()[:, None] * encoding.inner.inv_freq(patch.shape)
    states = [seen[name][0].detach().double().view(40, -1, 16).transpose(0, 1) for name in "qkv"]
    states = [state.requires_grad_() for state in states]
    expected = naive(*states, angles)
    ours = seen["output"][0].view(40, 4, 16).transpose(0, 1)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((ours * upstream).sum(), [seen[name] for name in "qkv"])
    (expected * upstream).sum().backward()
    for gradient, state in zip(gradients, states, strict=True):
        ours = gradient[0].view(40, -1, 16).transpose(0, 1).double()
        torch.testing.assert_close(ours, state.grad, rtol=1e-5, atol=1e-5)


HALF = [
    FamilyCase("smollm3", {**GROUPED, **PLAIN, "no_rope_layers": [1, 0], "pad_token_id": 0}),
    FamilyCase("gemma3_text", {**GEMMA3, **GROUPED}),
]
"""With other layers after linear ones or before them."""


@pytest.mark.parametrize("case", HALF, ids=str)
def test_layers_that_keep_their_softmax_and_their_keys(encoding: Any, case: FamilyCase) -> None:
    model, data = tiny_model(case), batch()
    with rx.patch_model(model, encoding, target_length=TARGET):
        whole = logits(model, **data)
        for stops in ([10, *range(11, 36), LENGTH], [20, 50, LENGTH]):
            same(in_parts(model, data, stops), whole, data)
            same(in_parts(model, data, stops, DynamicCache()), whole, data)
            same(in_parts(model, data, stops, DynamicCache(config=model.config)), whole, data)
        for row, width in enumerate((0, 17, 59)):
            alone = logits(model, data["input_ids"][row : row + 1, width:])
            same(whole[row : row + 1, width:], alone)


def test_the_state_does_not_grow() -> None:
    model = grouped()
    with rx.patch_model(model, rx.encoding("linear_attention")), torch.no_grad():
        sizes = []
        for length in (50, 400):
            cache = model(tokens(1, length), use_cache=True).past_key_values
            assert cache.get_seq_length() == length
            model(tokens(1, 1), past_key_values=cache)
            assert all(isinstance(layer, StateLayer) for layer in cache.layers)
            tensors = [each for layer in cache.layers for each in (layer.keys, layer.values)]
            sizes.append(sum(tensor.numel() for tensor in tensors))
        with pytest.raises(PatchError, match="no token can be removed"):
            cache.crop(-1)
        cache.reset()
        assert cache.get_seq_length() == 0
    assert sizes[0] == sizes[1] == 2 * 2 * 16 * (16 + 1)  # layers and heads of keys


def test_bfloat16_sums_in_float32() -> None:
    model = grouped(max_position_embeddings=400)
    with rx.patch_model(model, rx.encoding("linear_attention")):
        exact = logits(model, tokens(2, 400))
        model.to(torch.bfloat16)
        error = (logits(model, tokens(2, 400)).float() - exact).abs().mean(dim=(0, 2))
        cache = model(tokens(1, 10), use_cache=True).past_key_values
    assert {each.dtype for layer in cache.layers for each in (layer.keys, layer.values)} == {torch.float32}
    assert error[-50:].mean() < 1.5 * error[50:100].mean()  # no larger at far positions


def test_what_has_no_meaning_is_refused() -> None:
    model, data = grouped(), batch((0,))
    cache = DynamicCache(config=model.config)
    model(**data.part(0, 10), past_key_values=cache)
    eager = grouped()
    eager.set_attn_implementation("eager")
    made, packed = rx.encoding("linear_attention"), torch.cat([torch.arange(50), torch.arange(40)])[None]
    with rx.patch_model(model, made), rx.patch_model(eager, made):
        with pytest.raises(PatchError, match="filled without the encoding"):
            model(**data.part(10, 20), past_key_values=cache)
        with pytest.raises(PatchError, match="cannot forget"):
            logits(model, tokens(1, 90), position_ids=packed)
        causal = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
        prefix, hole = causal | (torch.arange(40) < 20), causal.clone()
        hole[..., 30, 3] = False
        for ahead in ({"attention_mask": prefix}, {"is_causal": False}):
            with pytest.raises(PatchError, match="attend to later ones"):
                logits(model, tokens(1, 40), **ahead)
        with pytest.raises(PatchError, match="cannot forget"):
            logits(model, tokens(1, 40), attention_mask=hole)
        with pytest.raises(PatchError, match="output_attentions has no meaning"):
            eager(tokens(1, 10), output_attentions=True)
        fixed = StaticCache(config=model.config, max_cache_len=20)
        model(tokens(1, 10), past_key_values=fixed)
        with pytest.raises(PatchError, match="its StaticLayer cannot hold a state"):
            model(tokens(1, 1), past_key_values=fixed)
    dropped = grouped(attention_dropout=0.1).train()
    with rx.patch_model(dropped, made), pytest.raises(PatchError, match="dropout has no meaning"):
        dropped(tokens(1, 10))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (FamilyCase("mistral", {"sliding_window": 24}), "only to a window of them"),
        (FamilyCase("falcon"), "acts inside attention, which cannot be patched"),
    ],
    ids=["mistral", "falcon"],
)
def test_families_that_cannot_have_it_are_refused(family: FamilyCase, message: str) -> None:
    model = tiny_model(family)
    before = logits(model, tokens(1, 20))
    with pytest.raises(UnsupportedModelError, match=message):
        rx.patch_model(model, rx.encoding("linear_attention"))
    assert torch.equal(logits(model, tokens(1, 20)), before)


def test_a_layer_that_attends_twice_is_refused_with_a_cache() -> None:
    """Differential attention needs two states."""
    model = tiny_model(FamilyCase("diffllama", {"num_key_value_heads": 2}))
    with rx.patch_model(model, rx.encoding("linear_attention")):
        model(tokens(1, 20), use_cache=False)
        with pytest.raises(PatchError, match=r"several modules use one layer.*use_cache=False"):
            model(tokens(1, 20), use_cache=True)
