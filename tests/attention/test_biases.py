"""Biases on the logits equal dense float64 attention, stock transformers and the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from batches import logits, tokens
from cases import ALTERNATIVES, TARGET, FamilyCase, llama, tiny_model
from covering import few
from hypothesis import given, settings
from hypothesis import strategies as st
from test_remaps import Recorder
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import rope_extend as rx
from rope_extend.encodings import BiasEncoding, ModelShape
from rope_extend.errors import UnsupportedModelError
from rope_extend.models.parameters import learned_parameters

BIASES = [case for case in ALTERNATIVES if issubclass(case.kind, BiasEncoding)]
SHAPE = ModelShape(heads=6, hidden_size=96, trained_length=32)


@pytest.fixture(params=BIASES, ids=str)
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def encoding(case: Any) -> BiasEncoding:
    return case.build()


def grouped(**changes: Any) -> PreTrainedModel:
    """A tiny Llama with six heads of queries and two of keys."""
    return llama(num_attention_heads=6, num_key_value_heads=2, hidden_size=96, **changes)


def stir(patch: rx.Patch) -> None:
    """Change the learned parameters from their initial values, so that each has an effect."""
    generator = torch.Generator().manual_seed(3)
    if patch.learned is not None:
        with torch.no_grad():
            for value in patch.learned.parameters():
                value += 0.3 * torch.randn(value.shape, generator=generator)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 25, 32, 40, 71, 112])
def test_alibi_is_what_bloom_and_mpt_build(heads: int) -> None:
    distance = torch.arange(49, -1, -1)
    shape = ModelShape(heads, heads, 50)
    bias = rx.encoding("alibi").bias(shape, distance, torch.tensor(49), {})  # type: ignore[attr-defined]
    bloom = build_alibi_tensor(torch.ones(1, 50), heads, torch.float32)[:, 0]
    # BLOOM counts from the first key, which adds the same number to a whole row.
    torch.testing.assert_close(bias, bloom - bloom[:, -1:], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(bias, build_mpt_alibi_tensor(heads, 50)[:, 0], rtol=1e-6, atol=0)


@given(st.integers(2, 64), st.integers(2, 5000))
@settings(max_examples=15, deadline=None)
def test_t5_buckets_are_those_of_stock_t5(buckets: int, beyond: int) -> None:
    made: Any = rx.encoding("t5_bias", buckets=buckets, max_distance=buckets // 2 + beyond)
    distance = torch.arange(6000)
    stock = T5Attention._relative_position_bucket(-distance, False, buckets, made.max_distance)
    assert torch.equal(made.bucket(distance), stock)


def dense(
    case: Any, learned: Mapping[str, Tensor], heads: int, queries: Tensor, keys: Tensor, trained: int
) -> Tensor:
    """The expected bias `[rows, heads, Q, K]` float64 for positions `[rows, Q]` and `[rows, K]`."""
    distance = (queries[:, :, None] - keys[:, None]).clamp(min=0).double()
    bias: Tensor = case.dense(learned, heads, distance, queries[:, :, None].double(), trained)
    return bias.movedim(0, 1)


def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Softmax attention in float64, `[batch, T, heads, width]`, with one dense matrix of weights."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    logits = (q @ k.transpose(-1, -2)) * scale + bias
    weights = logits.masked_fill(~allowed, -math.inf).softmax(-1)
    return (weights.nan_to_num(0) @ v).transpose(1, 2)


def shaw(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    learned: Mapping[str, Tensor],
    positions: Tensor,
    allowed: Tensor,
    scale: float,
    reach: int,
) -> Tensor:
    """Equations 3 and 4 of 1803.02155: each pair has its own key and value."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    which = (positions[:, :, None] - positions[:, None]).clamp(0, reach)
    keys = k[:, :, None] + learned["key_vectors"][which][:, None]
    logits = (q[:, :, :, None] * keys).sum(-1) * scale
    weights = logits.masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num(0)
    return (weights @ v).transpose(1, 2)


def places(kind: str, length: int) -> tuple[Tensor, Tensor]:
    """Positions `[rows, T]` and allowed pairs `[rows, 1, T, T]`."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    slots = torch.arange(length)
    if kind == "padded":
        pads = torch.tensor([0, length // 3])[:, None]
        return (slots - pads).clamp(min=0), (causal & (slots >= pads)[:, None])[:, None]
    if kind == "packed":
        document = (slots >= length // 4).long() + (slots >= length // 2).long()
        position = torch.cat([torch.arange(int((document == d).sum())) for d in range(3)])
        return position[None], (causal & (document[:, None] == document))[None, None]
    if kind == "window":
        return slots[None], (causal & (slots[:, None] - slots < 50))[None, None]
    if kind == "prefix":
        return slots[None], (causal | (slots < length // 2))[None, None]
    if kind == "images":  # tokens 20 to 60 and 100 to 130 attend to each other
        image = (slots >= 20).long() + (slots >= 60) + (slots >= 100) + (slots >= 130)
        return slots[None], (causal | ((image[:, None] == image) & (image % 2 == 1)))[None, None]
    if kind == "both ways":
        return slots[None], torch.ones_like(causal)[None, None]
    if kind == "gaps":
        return (slots + 1000 * (slots > 30) + 9 * (slots > length // 2))[None], causal[None, None]
    return slots[None] + (5000 if kind == "late" else 0), causal[None, None]


LENGTHS = {"plain": 300, "late": 60, "both ways": 60}
KINDS = (*LENGTHS, "padded", "packed", "window", "gaps", "prefix", "images")


@pytest.mark.parametrize(("case", "kind"), few(product(BIASES, KINDS), 4), ids=str)
def test_attention_equals_a_dense_bias_in_float64(case: Any, encoding: BiasEncoding, kind: str) -> None:
    """Forward and all gradients agree within 1e-5; three heads share each head of keys.

    A key after its query, which some masks show, counts as one at distance 0.
    """
    model, length = grouped(head_dim=16), LENGTHS.get(kind, 150)
    positions, allowed = places(kind, length)
    rows, scale = 2, 0.25
    allowed = allowed.expand(rows, -1, -1, -1)
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(rows, h, length, 16, generator=generator).requires_grad_() for h in (6, 2, 2)]
    upstream = torch.randn(rows, length, 6, 16, generator=generator)
    upstream *= allowed.any(-1)[:, 0, :, None, None]  # the output of padding is not used
    with rx.patch_model(model, encoding) as patch:
        stir(patch)
        module = model.model.layers[1].self_attn
        model.model.rotary_emb(tensors[0], positions)
        mask = None if kind in ("plain", "late", "both ways") else allowed
        module.is_causal = kind != "both ways"
        function = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
        output, _ = function(module, *tensors, mask, scaling=scale, position_ids=positions)
        (output * upstream).sum().backward()
        learned = {} if patch.learned is None else patch.learned.of(1)
        learned = {name: value.detach().double().requires_grad_() for name, value in learned.items()}
        exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
        if case.dense is None:
            expected = shaw(*exact, learned, positions, allowed, scale, case.build().reach)
        else:
            bias = dense(case, learned, 6, positions, positions, patch.shape.trained_length)
            expected = reference(*exact, bias, allowed, scale)
            assert bias.abs().max() > 0.1
        (expected * upstream).sum().backward()
        ours = {} if patch.learned is None else dict(patch.learned.named_parameters())
    seen = allowed.any(-1)[:, 0, :, None, None]
    torch.testing.assert_close((output * seen).double(), expected * seen, rtol=0, atol=1e-5)
    for tensor, other in zip(tensors, exact, strict=True):
        torch.testing.assert_close(tensor.grad.double(), other.grad, rtol=1e-5, atol=1e-5)
    for name, value in learned.items():
        found = next(p for full, p in ours.items() if full in (f"layer1.{name}", f"shared.{name}"))
        # These are sums over all pairs of tokens, so the float32 error is in proportion to the sum.
        torch.testing.assert_close(found.grad.double(), value.grad, rtol=1e-4, atol=2e-4)
    assert all(value.grad.abs().max() > 1e-2 for name, value in learned.items() if name in TELLING)


TELLING = ("table", "r1", "r2", "weight2", "key_vectors")
"""Learned parameters that always have an effect; the others of FIRE may have none."""


def test_a_softcap_is_applied_before_the_bias() -> None:
    """Gemma 2 caps its logits but not the bias; otherwise ALiBi would end at the cap."""
    model = tiny_model(
        FamilyCase("gemma2", {"head_dim": 16, "sliding_window": 4096, "attn_logit_softcapping": 0.5})
    )
    model.set_attn_implementation("eager")
    with rx.patch_model(model, rx.encoding("alibi")):
        weights = model(tokens(1, 64), output_attentions=True).attentions[0]
    assert (
        weights[0, 0, -1, :32].sum() < 0.3
    )  # a capped bias would leave all keys within exp(1) of each other


@pytest.mark.parametrize("case", few(BIASES, 2), ids=str)
def test_dropout_is_drawn_again_alike_in_the_backward_pass(encoding: BiasEncoding) -> None:
    """The gradient is the slope of the loss with the same dropout, by differences in float64."""
    for checkpointing in (False, True):
        model = grouped(attention_dropout=0.4).double().train()
        weight = model.model.layers[0].self_attn.q_proj.weight

        def loss(model: Any = model) -> Tensor:
            torch.manual_seed(0)
            return model(tokens(1, 300), labels=tokens(1, 300), use_cache=False).loss

        with rx.patch_model(model, encoding):
            if checkpointing:
                model.gradient_checkpointing_enable()
            loss().backward()
            size, ends = weight.grad.norm().item(), []
            with torch.no_grad():
                for step in (1e-4, -2e-4):
                    weight += step * weight.grad / size
                    ends.append(loss().item())
                assert loss().item() != model.eval()(tokens(1, 300), labels=tokens(1, 300)).loss.item()
        assert (ends[0] - ends[1]) / 2e-4 == pytest.approx(size, rel=1e-2)


@pytest.mark.parametrize("case", few(BIASES, 2, 1), ids=str)
def test_bfloat16_rounds_as_plain_attention_does(encoding: BiasEncoding) -> None:
    for implementation in ("sdpa", "eager"):
        errors = []
        for patched in (encoding, rx.encoding("nope")):
            model = grouped(max_position_embeddings=400)
            model.set_attn_implementation(implementation)
            with rx.patch_model(model, patched):
                exact = logits(model, tokens(2, 400))
                model.to(torch.bfloat16)
                errors.append((logits(model, tokens(2, 400)).float() - exact).abs().mean())
        assert errors[0] < 1.5 * errors[1]


@pytest.mark.slow
def test_memory_grows_with_the_length_and_not_its_square(encoding: BiasEncoding) -> None:
    """From 1,024 to 4,096 tokens, the largest tensor and the saved tensors grow linearly."""
    largest, kept = [], []
    for length in (1024, 4096):
        model = grouped(head_dim=8, num_hidden_layers=1, max_position_embeddings=1024).train()
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with rx.patch_model(model, encoding), Recorder() as counter:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model.model(tokens(1, length), use_cache=False).last_hidden_state.square().mean()
            loss.backward()
        largest.append(counter.largest)
        kept.append(sum(saved.values()))
    assert largest[1] < 4096 * 4096 / 2  # a twelfth of a bias for all heads
    assert math.log(kept[1] / kept[0], 4) < 1.1
    assert math.log(largest[1] / largest[0], 4) < 1.2


def test_learned_parameters_are_the_models_until_the_patch_is_removed(encoding: BiasEncoding) -> None:
    model = grouped()
    names, state = [n for n, _ in model.named_parameters()], list(model.state_dict())
    with rx.patch_model(model, encoding) as patch:
        new = [name for name in model.state_dict() if name not in state]
        assert new == [f"model.rope_extend_learned.{name}" for name in learned_parameters(model)]
        assert bool(new) == bool(encoding.initial(SHAPE))
        assert len(new) == len(encoding.initial(SHAPE)) * (2 if encoding.per_layer else 1)
        assert all(parameter.requires_grad for parameter in learned_parameters(model).values())
        model.to(torch.float64)
        assert all(parameter.dtype == torch.float64 for parameter in learned_parameters(model).values())
        with rx.extend(model, TARGET, "linear"):
            assert list(model.state_dict()) == state
            assert learned_parameters(model) == {}
        assert sorted(model.state_dict()) == sorted([*state, *new])
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == state
    assert (patch.learned is None) == (not new)  # the patch keeps the learned parameters


def test_what_cannot_take_a_bias_is_refused() -> None:
    model = grouped()
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedModelError, match=r"attn_implementation='sdpa' or 'eager'"):
        rx.patch_model(model, rx.encoding("alibi"))
    assert model.config._attn_implementation == "flex_attention"
