"""Encodings that act inside attention: exact under every cache, in every batch, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from batches import LENGTH, batch, logits, same, tokens
from cases import FACTOR, KINDS, LINEAR, TARGET, TRAINED, YARN, FamilyCase, llama, tiny_model
from tolerances import assert_same_but_rounding
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import rope_extend as rx
from rope_extend.attention import masks
from rope_extend.errors import PatchError

LISTS = {"long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0], "short_factor": [1.0] * 7 + [1.25]}
INSIDE: dict[str, dict[str, Any]] = {
    "dynamic_ntk": {"name": "dynamic_ntk", "factor": FACTOR},
    "dynamic_ntk-each-token": {"name": "dynamic_ntk", "factor": FACTOR, "step": 0},
    "dynamic_linear": {"name": "dynamic_linear"},
    "dynamic_yarn": {"name": "dynamic_yarn"},
    "longrope": {"name": "longrope", "factor": FACTOR, **LISTS},
    "longrope-start": {"name": "longrope", "factor": FACTOR, **LISTS, "start_tokens": 4},
    "short_original(yarn)": {"name": "short_original", "inner": YARN},
    "logn(yarn)": {"name": "logn", "inner": YARN},
    "xpos(linear)": {"name": "xpos", "inner": LINEAR},
    "xpos(dynamic_ntk)": {
        "name": "xpos",
        "inner": {"name": "dynamic_ntk", "factor": FACTOR},
        "scale_base": 8.0,
    },
    "drope": {"name": "drope", "factor": FACTOR},
}


def patched(model: PreTrainedModel, encoding: Any) -> rx.Patch:
    if isinstance(encoding, str):
        encoding = rx.Encoding.from_dict(INSIDE[encoding])
    return rx.patch_model(model, encoding, target_length=TARGET)


def naive_llama(
    model: PreTrainedModel,
    input_ids: Tensor,
    rotation: Callable[[int, int], tuple[Any, Any]],
    first: int = 0,
    allowed: Tensor | None = None,
) -> Tensor:
    """Llama's logits `[T, vocab]` in float64 by its published equations, one query at a time.

    `rotation(query, position)` gives the angles `[head_dim/2]` at which a vector stands that the query reads
    at a position, and the factor on it, one or `[head_dim/2]`. Positions count from `first`. `allowed`
    `[T, T]` says which keys a query sees, by default those up to it.
    """
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    config = model.config
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def turns(query: int, positions: list[int]) -> Tensor:
        values = [rotation(first + query, first + position) for position in positions]
        angles = torch.tensor([angle for angle, _ in values]).double()
        factors = torch.tensor([factor for _, factor in values]).double()
        return torch.polar(factors.view(len(values), -1).expand_as(angles).contiguous(), angles)

    def turn(x: Tensor, by: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : width // 2], x[..., width // 2 :]) * by
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    hidden = weights["model.embed_tokens.weight"][input_ids]
    count = len(input_ids)
    if allowed is None:
        allowed = torch.ones(count, count, dtype=torch.bool).tril()
    seen = [allowed[query].nonzero().flatten().tolist() for query in range(count)]
    by = [turns(query, [query, *seen[query]])[:, None] for query in range(count)]  # as in every layer
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        x = norm(hidden, weights[at + "input_layernorm.weight"])
        q = (x @ weights[at + "self_attn.q_proj.weight"].T).view(count, heads, width)
        k = (x @ weights[at + "self_attn.k_proj.weight"].T).view(count, kv_heads, width)
        v = (x @ weights[at + "self_attn.v_proj.weight"].T).view(count, kv_heads, width)
        rows = []
        for query in range(count):
            keys, values = turn(k[seen[query]], by[query][1:]), v[seen[query]]
            keys, values = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (keys, values))
            scores = torch.einsum("hd,jhd->hj", turn(q[query], by[query][0]), keys) / math.sqrt(width)
            rows.append(torch.einsum("hj,jhd->hd", scores.softmax(-1), values).flatten())
        hidden = hidden + torch.stack(rows) @ weights[at + "self_attn.o_proj.weight"].T
        x = norm(hidden, weights[at + "post_attention_layernorm.weight"])
        gate = nn.functional.silu(x @ weights[at + "mlp.gate_proj.weight"].T)
        up = x @ weights[at + "mlp.up_proj.weight"].T
        hidden = hidden + (gate * up) @ weights[at + "mlp.down_proj.weight"].T
    return norm(hidden, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


PAIRS = 8
PLAIN = [10_000 ** (-i / PAIRS) for i in range(PAIRS)]


def dynamic_ntk(query: int, position: int) -> tuple[list[float], float]:
    length = query + 1
    if length <= TRAINED:
        return [position * f for f in PLAIN], 1.0
    base = 10_000 * (FACTOR * length / TRAINED - (FACTOR - 1)) ** (2 * PAIRS / (2 * PAIRS - 2))
    return [position * base ** (-i / PAIRS) for i in range(PAIRS)], 1.0


def dynamic_linear_in_steps(query: int, position: int) -> tuple[list[float], float]:
    length = query + 1
    reach = TRAINED  # of a table: each next one serves texts longer by a sixteenth
    while reach < length:
        reach += reach // 16
    return [position * f * TRAINED / reach for f in PLAIN], 1.0


def longrope_with_start(query: int, position: int) -> tuple[list[float], float]:
    factors = LISTS["short_factor"] if query + 1 <= TRAINED else LISTS["long_factor"]
    angles = [position * f / (1.0 if position < 4 else by) for f, by in zip(PLAIN, factors, strict=True)]
    return angles, math.sqrt(1 + math.log(FACTOR) / math.log(TRAINED))


def logn_of_linear(query: int, position: int) -> tuple[list[float], float]:
    # The factor multiplies query and key, so the logits get its square.
    return [position * f / FACTOR for f in PLAIN], math.sqrt(max(1.0, math.log(query + 1, TRAINED)))


def xpos_of_linear(query: int, position: int) -> tuple[list[float], list[float]]:
    # The factor of a pair is zeta^(query - key), from any origin; here the origin is the query.
    zeta = [(2 * i + 0.4 * 2 * PAIRS) / (1.4 * 2 * PAIRS) for i in range(PAIRS)]
    return [position * f / FACTOR for f in PLAIN], [z ** ((query - position) / 8) for z in zeta]


def dropped(query: int, position: int) -> tuple[list[float], float]:
    return [0.0] * PAIRS, math.sqrt(1 + 0.103 * math.log(FACTOR))


def dropped_by_query(query: int, position: int) -> tuple[list[float], float]:
    return [0.0] * PAIRS, math.sqrt(1 + 0.103 * math.log(max(1.0, (query + 1) / TRAINED)))


def unpatched(query: int, position: int) -> tuple[list[float], float]:
    return [position * frequency for frequency in PLAIN], 1.0


@cache
def written_out(rotation: Any, first: int = 0) -> torch.Tensor:
    """Logits of 48 tokens from position `first` on, by the equations."""
    return naive_llama(llama(head_dim=16), tokens(1, 48)[0], rotation, first)


@pytest.mark.parametrize(
    ("encoding", "rotation"),
    [
        (INSIDE["dynamic_ntk-each-token"], dynamic_ntk),
        (INSIDE["dynamic_linear"], dynamic_linear_in_steps),
        (INSIDE["longrope-start"], longrope_with_start),
        ({"name": "logn", "inner": LINEAR}, logn_of_linear),
        ({"name": "xpos", "inner": LINEAR, "scale_base": 8.0}, xpos_of_linear),
        (INSIDE["drope"], dropped_by_query),
        ({"name": "drope", "factor": FACTOR, "per": "target"}, dropped),
    ],
    ids=["dynamic_ntk", "dynamic_linear", "longrope", "logn", "xpos", "drope", "drope-target"],
)
def test_logits_equal_attention_written_out(encoding: dict[str, Any], rotation: Any) -> None:
    model = llama(head_dim=16)
    input_ids = tokens(1, 48)
    for first in (0, 20):
        expected = written_out(rotation, first)
        positions = torch.arange(first, first + 48)[None]
        with patched(model, rx.Encoding.from_dict(encoding)):
            actual = logits(model, input_ids, position_ids=positions)[0].double()
        assert_same_but_rounding(actual, expected)
    # With plain RoPE, the same equations give the logits of the model without a patch.
    assert_same_but_rounding(
        logits(model, input_ids, position_ids=positions)[0].double(), written_out(unpatched, 20)
    )
    assert (written_out(unpatched, 20) - expected).abs().max() > 0.05


AHEAD = {
    "prefix": torch.ones(48, 48, dtype=torch.bool).tril() | (torch.arange(48) < 40),
    "image": torch.ones(48, 48, dtype=torch.bool).tril(),
    "both ways": torch.ones(48, 48, dtype=torch.bool),
}
"""Masks that let tokens attend to later ones, across the end of the trained window."""
AHEAD["image"][25:45, 25:45] = True


@pytest.mark.parametrize("kind", AHEAD)
@pytest.mark.parametrize(
    ("encoding", "rotation"),
    [
        (INSIDE["dynamic_ntk-each-token"], dynamic_ntk),
        (INSIDE["longrope-start"], longrope_with_start),
        ({"name": "logn", "inner": LINEAR}, logn_of_linear),
    ],
    ids=["dynamic_ntk", "longrope", "logn"],
)
def test_masks_that_look_ahead_equal_attention_written_out(
    kind: str, encoding: dict[str, Any], rotation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under both implementations that take a mask; a query rotates later keys by its own table too."""
    monkeypatch.setattr(masks, "MASK_ROWS", 7)  # the mask is searched in parts
    model, input_ids, mask = llama(head_dim=16), tokens(1, 48), AHEAD[kind][None, None]
    expected = naive_llama(model, input_ids[0], rotation, allowed=AHEAD[kind])
    assert (expected - written_out(rotation)).abs().max() > 0.05
    with patched(model, rx.Encoding.from_dict(encoding)):
        given = {"attention_mask": mask}
        assert_same_but_rounding(logits(model, input_ids, **given)[0].double(), expected)
        if kind == "prefix":
            with torch.no_grad():
                start = model(input_ids[:, :40], attention_mask=mask[:, :, :40, :40], use_cache=True)
                rest = model(input_ids[:, 40:], past_key_values=start.past_key_values).logits
            assert_same_but_rounding(torch.cat([start.logits, rest], dim=1)[0].double(), expected)
        model.set_attn_implementation("eager")
        given = {"attention_mask": torch.zeros(1, 1, 48, 48).masked_fill(~mask, -math.inf)}
        assert_same_but_rounding(logits(model, input_ids, **given)[0].double(), expected)
        if kind == "both ways":
            for implementation in ("sdpa", "eager"):
                model.set_attn_implementation(implementation)
                found = logits(model, input_ids, is_causal=False)[0].double()
                assert_same_but_rounding(found, expected)


def test_images_across_the_trained_window_equal_stock() -> None:
    """Gemma 3 lets the tokens of an image attend to each other. Both lists are equal but for rounding."""
    model = tiny_model(FamilyCase("gemma3_text", {**KINDS, "head_dim": 16, "pad_token_id": 0}))
    nearly_one = rx.encoding("longrope", factor=FACTOR, long_factor=[1.0000001] * 8, attention_scale=1.0)
    input_ids = tokens(1, 48)
    allowed = AHEAD["image"][None, None]
    near = torch.ones(48, 48, dtype=torch.bool).triu(-15)
    masks = {"full_attention": allowed, "sliding_attention": allowed & near}
    expected = logits(model, input_ids, attention_mask=masks)
    with patched(model, nearly_one):
        same(logits(model, input_ids, attention_mask=masks), expected)


@pytest.mark.parametrize("method", ["xpos", "dual_chunk"])
def test_decay_and_chunks_refuse_masks_that_look_ahead(method: str) -> None:
    model = llama(head_dim=16)
    with rx.extend(model, TARGET, method):
        for given in ({"attention_mask": AHEAD["prefix"][None, None]}, {"is_causal": False}):
            with pytest.raises(PatchError, match=rf"{method}.*attend to later ones.*use causal attention"):
                logits(model, tokens(1, 48), **given)


@pytest.mark.parametrize("hidden", [-1e4, -1e9, torch.finfo(torch.bfloat16).min, -torch.inf])
@pytest.mark.parametrize("method", ["xpos", "linear_attention"])
def test_masks_may_hide_keys_by_any_large_number(hidden: float, method: str) -> None:
    model, input_ids = llama(), tokens(1, 40)
    with rx.patch_model(model, rx.encoding(method), target_length=TARGET):
        mask = torch.full((1, 1, 40, 40), hidden).triu(1)
        same(model(input_ids, attention_mask=mask, use_cache=False).logits, logits(model, input_ids))


def test_small_numbers_of_an_added_mask_hide_no_key() -> None:
    added = torch.tensor([0.0, -1.0, -30.0, 2.0, -1e4, -1e9, -torch.inf])
    assert masks.visible(added).tolist() == [True] * 4 + [False] * 3


def test_bfloat16_rounds_as_static_methods_do() -> None:
    model = llama(head_dim=16)
    input_ids = tokens(2, LENGTH)
    with patched(model, "short_original(yarn)"):
        exact = logits(model, input_ids)
        model.to(torch.bfloat16)
        inside = logits(model, input_ids).float()
    model.to(torch.float32)
    with rx.patch_model(model, rx.Encoding.from_dict(YARN)):
        static = logits(model, input_ids)
        model.to(torch.bfloat16)
        rounded = (logits(model, input_ids).float() - static).abs().mean()
    assert (inside - exact).abs().mean() < 1.5 * rounded


@torch.no_grad()
def test_caches_of_others_and_of_other_methods_stay_valid() -> None:
    """Keys are cached as the stock model rotates them: how they are turned is up to who reads them."""
    model, data = llama(head_dim=16), batch((0,))
    for before in (None, "longrope", "xpos(linear)"):
        cache = DynamicCache(config=model.config)
        with patched(model, before) if before else nullcontext():
            model(**data.part(0, 1), past_key_values=cache)
        first = [layer.keys.clone() for layer in cache.layers]
        stock = DynamicCache(config=model.config)
        model(**data.part(0, 1), past_key_values=stock)
        assert all(
            torch.equal(*pair) for pair in zip(first, (each.keys for each in stock.layers), strict=True)
        )
    cache = DynamicCache(config=model.config)
    model(**data.part(0, TRAINED), past_key_values=cache)
    with patched(model, "dynamic_ntk"):
        rest = model(**data.part(TRAINED, LENGTH), past_key_values=cache).logits
        same(rest, logits(model, **data)[:, TRAINED:])


@pytest.mark.parametrize("name", ["dynamic_yarn", "alibi", "linear_attention"])
def test_a_paged_cache_is_refused(name: str) -> None:
    """Continuous batching gives the attention function the places of its cache."""
    model = llama(head_dim=16)
    with (
        rx.patch_model(model, rx.encoding(name), target_length=TARGET),
        pytest.raises(PatchError, match=r"paged cache \(continuous batching\); use generate"),
    ):
        model(tokens(1, 10), write_index=[torch.arange(10)], use_cache=False)
