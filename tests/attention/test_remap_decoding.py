"""Decoding under changed positions: exact from rotated keys that are kept, and no more work than without."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from batches import LENGTH, batch, in_parts, logits, same, tokens
from cases import REMAPS, TARGET, EncodingCase, llama
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_same_but_rounding
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

import rope_extend as rx
from rope_extend.attention import remaps
from rope_extend.attention.growing import spare
from rope_extend.attention.rotated_keys import CHOICE, KEPT
from rope_extend.models.view import shape_of

MODEL = llama(head_dim=16).double()
each_method = pytest.mark.parametrize("case", REMAPS, ids=str)


def patched(case: EncodingCase, model: Any = MODEL) -> rx.Patch:
    return rx.patch_model(model, case.build(shape_of(model)), target_length=TARGET)


def exactly(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the rounding of float64."""
    assert_same_but_rounding(actual, expected, torch.float64)


@torch.no_grad()
def fed(ids: Tensor, cache: Any, model: Any = MODEL) -> Tensor:
    """Logits of further tokens, one by one."""
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(1, dim=1)], dim=1)


@torch.no_grad()
def filled(ids: Tensor, model: Any = MODEL) -> DynamicCache:
    """A cache that holds a text, read at once."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    return cache


ACTIONS = st.one_of(
    st.tuples(st.just("one"), st.integers(1, 12)),
    st.tuples(st.just("several"), st.integers(2, 9)),
    st.tuples(st.just("crop"), st.integers(1, 9)),
    st.tuples(st.just("rows"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
    st.tuples(st.just("copy"), st.none()),
)


@each_method
@settings(max_examples=max(3, settings.default.max_examples // 8))
@given(st.lists(ACTIONS, min_size=3, max_size=6))
def test_a_cache_gives_what_one_forward_gives(case: EncodingCase, actions: list[tuple[str, Any]]) -> None:
    """After any sequence of tokens, crops, reordered rows and copies, in float64."""
    with patched(case):
        ids = tokens(2, 40)
        cache = filled(ids)
        for number, (action, how) in enumerate([*actions, ("one", 2)]):
            if action == "one":
                new = tokens(2, how, seed=number)
                ids = torch.cat([ids, new], dim=1)
                exactly(fed(new, cache), logits(MODEL, ids)[:, -how:])
            elif action == "several":
                new = tokens(2, how, seed=number)
                ids = torch.cat([ids, new], dim=1)
                with torch.no_grad():
                    exactly(MODEL(new, past_key_values=cache).logits, logits(MODEL, ids)[:, -how:])
            elif action == "crop":
                cache.crop(-how)
                ids = ids[:, :-how]
                if ids.shape[1] < 20:  # texts within the window have the model's own float32 tables
                    return
            elif action == "rows":
                cache.reorder_cache(torch.tensor(how))
                ids = ids[how]
            else:
                cache = copy.deepcopy(cache)


@each_method
def test_a_cache_is_cropped_by_more_than_the_near_window(case: EncodingCase) -> None:
    """As before an answer is generated again: most regions of the keys that are left have changed."""
    with patched(case):
        ids = tokens(1, 60)
        for left in (46, 33):  # shorter texts have the float32 tables of the model
            cache = filled(ids[:, :-3])
            fed(ids[:, -3:], cache)
            cache.crop(left - ids.shape[1])
            exactly(fed(ids[:, left:], cache), logits(MODEL, ids)[:, left:])


@pytest.mark.parametrize("case", REMAPS[-3:], ids=str)
def test_padding_token_by_token_without_position_ids(case: EncodingCase) -> None:
    """A query that is padding sees no key. Positions count the padding, as in stock transformers."""
    data = batch((0, 28))
    del data["position_ids"]
    with patched(case):
        found = in_parts(MODEL, data, [24, *range(25, 32), LENGTH])
        same(found, logits(MODEL, **data), data)  # short texts have the float32 tables of the model


class _Counter(TorchDispatchMode):
    """Counts operations, and the elements of the largest result of each that copies or computes."""

    VIEWS = (
        "slice", "narrow", "transpose", "view", "_unsafe_view", "expand", "unsqueeze", "select", "split",
        "alias", "t", "permute", "detach",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.large = 0, Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.operations += 1
        name = function.overloadpacket.__name__
        if name not in self.VIEWS:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self.large[name] = max(self.large[name], leaf.numel())
        return out


@each_method
def test_a_token_is_no_more_work_than_without_a_patch(case: EncodingCase) -> None:
    """Counted: no result is as large as the keys of a layer, and few operations are added to a layer."""
    more = {}
    for layers, context in ((1, 111), (1, 251), (3, 111)):
        counts = []
        for patch in (True, False):
            model = llama(head_dim=16, num_hidden_layers=layers)
            if patch:
                patched(case, model)
            cache = filled(tokens(1, context), model)
            fed(tokens(1, 2), cache, model)
            with _Counter() as counter:
                fed(tokens(1, 1), cache, model)
            counts.append(counter)
        keys = cache.layers[0].keys.numel()
        assert counts[1].large["cat"] >= keys
        assert not [name for name, size in counts[0].large.items() if size >= keys]
        more[layers, context] = counts[0].operations - counts[1].operations
    assert more[1, 111] == more[1, 251]
    assert (more[3, 111] - more[1, 111]) / 2 <= 40
    assert more[1, 111] <= 180


@each_method
def test_memory_is_that_of_keys_values_and_rotated_keys(case: EncodingCase) -> None:
    stock, ours, ids = llama(head_dim=16), llama(head_dim=16), tokens(1, 200)

    def held(model: LlamaForCausalLM) -> int:
        cache = filled(ids[:, :197], model)
        fed(ids[:, 197:], cache, model)
        storages = {
            leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
            for owner in (cache, *cache.layers)
            for leaf in tree_leaves(list(vars(owner).values()))
            if isinstance(leaf, Tensor)
        }
        return sum(storages.values())

    with patched(case, ours):
        positions = 8 * ids.numel()
        assert held(ours) <= held(stock) * 1.5 * (1 + spare(200) / 200) + positions


@each_method
def test_padding_and_16_bits(case: EncodingCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other lengths, in float64; and kernels of bfloat16, compared with keys that are not kept."""
    data = batch((0, 3, 17))
    with patched(case):
        whole = logits(MODEL, **data)
        there = data["attention_mask"][:, :, None].bool()
        found = in_parts(MODEL, data, [64, *range(65, LENGTH + 1)])
        exactly(found.where(there, 0), whole.where(there, 0))
    model = llama(head_dim=16)
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    with patched(case, model):
        kept, plain = filled(tokens(1, 60), model), filled(tokens(1, 60), model)
        setattr(plain, CHOICE, False)
        found, expected = fed(tokens(1, 12), kept, model), fed(tokens(1, 12), plain, model)
        assert KEPT in vars(kept)
        assert KEPT not in vars(plain)
    difference = (found - expected).float().abs().mean() / expected.float().abs().mean()
    assert float(difference) < 0.05  # two layers of roundings of 2**-9


def test_what_the_step_does_not_support_is_computed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention, static caches, other masks and gradients rotate all keys by their distance."""
    used: list[bool] = []
    attend = remaps.attend_one

    def watched(*arguments: Any) -> Tensor | None:
        output = attend(*arguments)
        used.append(output is not None)
        return output

    monkeypatch.setattr(remaps, "attend_one", watched)
    case, ids = REMAPS[0], tokens(1, 60)
    eager, model = (llama(head_dim=16, attn_implementation=name) for name in ("eager", "sdpa"))
    for each in (eager, model):
        with patched(case, each):
            expected = logits(each, ids)[:, -1:]
            if each is eager:
                same(fed(ids[:, -1:], filled(ids[:, :-1], each), each), expected)
                continue
            static = StaticCache(config=model.config, max_cache_len=70)
            with torch.no_grad():
                model(ids[:, :-1], past_key_values=static)
            same(fed(ids[:, -1:], static, each), expected)
            mask = torch.ones(1, 1, 1, 60, dtype=torch.bool)
            mask[..., 30] = False  # a hole
            cache = filled(ids[:, :-1], each)
            model(ids[:, -1:], past_key_values=cache, attention_mask=mask)
            same(model(ids[:, -1:], past_key_values=filled(ids[:, :-1], each)).logits, expected)
    assert not any(used)
    with patched(case, model):
        same(fed(ids[:, -1:], filled(ids[:, :-1], model), model), expected)
    assert any(used)
