"""The rotated keys that a cache keeps are those of its unrotated keys, whatever happens to the cache."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import Counter
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import same, tokens
from cases import ALL_FAMILIES, FACTOR, TRAINED, FamilyCase, llama, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaForCausalLM, StaticCache
from transformers.cache_utils import DynamicLayer

import rope_extend as rx
from rope_extend.attention.rotated_keys import CHOICE, KEPT
from rope_extend.attention.two_rows import PLACES, TwoRows
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.models.families import adapter_for

YARN = {"name": "yarn", "factor": FACTOR}
METHODS: dict[str, dict[str, Any]] = {
    "dynamic_ntk": {"name": "dynamic_ntk", "factor": FACTOR},
    "each token": {"name": "dynamic_linear", "step": 0},
    "short_original": {"name": "short_original", "inner": YARN},
}
LONG = 71
"""Tokens after which the next one still has the same table."""


@once
def patched(name: str) -> LlamaForCausalLM:
    model = llama()
    rx.patch_model(model, rx.Encoding.from_dict(METHODS[name]))
    return model


@torch.no_grad()
def fed(model: LlamaForCausalLM, ids: Tensor, cache: Any) -> Tensor:
    """The logits of the last of some tokens, with a cache."""
    return model(ids, past_key_values=cache, use_cache=True).logits[:, -1]


@torch.no_grad()
def whole(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """The logits of the last token, in one forward without a cache."""
    return model(ids, use_cache=False).logits[:, -1]


def filled(model: LlamaForCausalLM, ids: Tensor) -> DynamicCache:
    """A cache that holds some tokens, the last few fed one by one."""
    cache = DynamicCache(config=model.config)
    for part in (ids[:, :-3], *ids[:, -3:].split(1, dim=1)):
        fed(model, part, cache)
    assert KEPT in vars(cache)
    return cache


ACTIONS = st.one_of(
    st.tuples(st.just("one"), st.integers(1, 6)),
    st.tuples(st.just("several"), st.integers(2, 20)),
    st.tuples(st.just("crop"), st.integers(1, 15)),
    st.tuples(st.just("rows"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
    st.tuples(st.just("copy"), st.booleans()),
)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=settings.default.max_examples // 3)
@given(st.lists(ACTIONS, min_size=3, max_size=6))
def test_a_cache_gives_what_one_forward_gives(name: str, actions: list[tuple[str, Any]]) -> None:
    """After any sequence of tokens, crops, reordered rows and copies."""
    model = patched(name)
    ids, cache = tokens(2, TRAINED - 4), DynamicCache(config=model.config)
    fed(model, ids, cache)
    for number, (action, how) in enumerate(actions):
        if action in ("one", "several"):
            new = tokens(2, how, seed=number)
            ids = torch.cat([ids, new], dim=1)
            for part in new.split(1 if action == "one" else how, dim=1):
                found = fed(model, part, cache)
            same(found, whole(model, ids))
        elif action == "crop":
            cache.crop(-how) if ids.shape[1] > how else None
            ids = ids[:, : ids.shape[1] - how] if ids.shape[1] > how else ids
        elif action == "rows":
            cache.reorder_cache(torch.tensor(how))
            ids = ids[how]
        else:
            cache = copy.deepcopy(cache) if how else pickle.loads(pickle.dumps(cache))
    last = tokens(2, 1, seed=99)
    same(fed(model, last, cache), whole(model, torch.cat([ids, last], dim=1)))


@pytest.mark.parametrize("change", ["in place", "another tensor", "rows of a layer"])
def test_keys_that_a_user_changed_are_rotated_again(change: str) -> None:
    """Compared with a cache that keeps no rotated keys."""
    model, ids = patched("dynamic_ntk"), tokens(2, LONG)
    kept, plain = filled(model, ids), filled(model, ids)
    setattr(plain, CHOICE, False)
    for cache in (kept, plain):
        layer = cache.layers[0]
        if change == "in place":
            layer.keys[:, :, 3] *= 2
        elif change == "another tensor":
            layer.keys = layer.keys.flip(0)
        else:
            layer.batch_select_indices(torch.tensor([1, 0]))
    last = tokens(2, 1, seed=2)
    found, expected = fed(model, last, kept), fed(model, last, plain)
    same(found, expected)
    assert not torch.allclose(found, whole(model, torch.cat([ids, last], dim=1)), atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("change", ["freed memory", "one row for all"])
def test_another_tensor_at_the_same_address_is_rotated_again(change: str) -> None:
    """A tensor that is freed leaves its address to the next one of its size; a view shares it."""
    model, ids = patched("dynamic_ntk"), tokens(4, LONG)
    kept, plain = filled(model, ids), filled(model, ids)
    setattr(plain, CHOICE, False)
    for cache in (kept, plain):
        for layer in cache.layers:
            if change == "one row for all":
                layer.keys = layer.keys[:1].expand_as(layer.keys)
                continue
            for order in ([1, 2, 3, 0], [2, 1, 3, 0]):
                layer.keys, layer.values = layer.keys[order], layer.values[order]
    last = tokens(4, 1, seed=2)
    same(fed(model, last, kept), fed(model, last, plain))


def test_a_cache_decodes_with_and_without_inference_mode() -> None:
    model, ids = patched("dynamic_ntk"), tokens(1, LONG + 3)
    cache = filled(model, ids[:, :LONG])
    with torch.inference_mode():
        for part in ids[:, LONG:].split(1, dim=1):
            found = fed(model, part, cache)
    same(found, whole(model, ids))


def test_gradients_of_queries_alone() -> None:
    """As with an adapter on q_proj or v_proj: keys of the first layer need no gradient."""
    model, ids = patched("dynamic_ntk"), tokens(1, LONG)
    for kind in ("q_proj", "v_proj"):
        weights = [weight for name, weight in model.named_parameters() if kind in name]
        model.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        cache = filled(model, ids[:, : LONG - 3])
        parts = [model(part, past_key_values=cache).logits for part in ids[:, LONG - 3 :].split(1, dim=1)]
        found = torch.autograd.grad(torch.cat(parts, dim=1).square().sum(), weights)
        with torch.no_grad():
            cache = filled(model, ids[:, : LONG - 3])
        setattr(cache, CHOICE, False)
        parts = [model(part, past_key_values=cache).logits for part in ids[:, LONG - 3 :].split(1, dim=1)]
        expected = torch.autograd.grad(torch.cat(parts, dim=1).square().sum(), weights)
        for actual, wanted in zip(found, expected, strict=True):
            scale = float(wanted.abs().max())
            torch.testing.assert_close(actual, wanted, rtol=0, atol=2e-3 * scale + 1e-6)
    model.requires_grad_(True)


class Rounding(DynamicCache):
    """A user's cache that rounds keys, and halves the first one each time."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any) -> Any:
        super().update(key_states.round(decimals=1), value_states, layer_idx, *args)
        layer = self.layers[layer_idx]
        layer.keys = torch.cat([layer.keys[:, :, :1] / 2, layer.keys[:, :, 1:]], dim=2)
        return layer.keys, layer.values


def rounded_update(layer: DynamicLayer, keys: Tensor, *args: Any) -> Any:
    return DynamicLayer.update(layer, keys.round(decimals=1), *args)


@pytest.mark.parametrize("owner", ["class", "layer"])
def test_an_update_of_the_users_own_is_called(owner: str) -> None:
    """For each token, whether a class of caches has it or one layer."""
    model, ids = patched("dynamic_ntk"), tokens(1, LONG)
    cache = Rounding(config=model.config) if owner == "class" else DynamicCache(config=model.config)
    if owner == "layer":
        for layer in cache.layers:
            layer.update = partial(rounded_update, layer)
    for part in ids.split([LONG - 3, 1, 1, 1], dim=1):
        fed(model, part, cache)
    for layer in cache.layers:
        later = layer.keys[:, :, 1:]
        assert torch.equal(later, later.round(decimals=1))
    plain, last = copy.deepcopy(cache), tokens(1, 1, seed=2)  # copies have no rotated keys
    if owner == "layer":
        for layer in plain.layers:
            layer.update = partial(rounded_update, layer)
    same(fed(model, last, cache), fed(model, last, plain))


def test_users_choose_whether_rotated_keys_are_kept() -> None:
    model, ids = patched("dynamic_ntk"), tokens(1, LONG)
    cache = DynamicCache(config=model.config)
    setattr(cache, CHOICE, False)
    for part in ids.split([LONG - 3, 1, 1, 1], dim=1):
        found = fed(model, part, cache)
    same(found, whole(model, ids))
    assert KEPT not in vars(cache)


def test_other_caches_keep_nothing() -> None:
    """A static cache writes into its tensors, and copies have tensors of their own."""
    model, ids = patched("dynamic_ntk"), tokens(1, LONG)
    static = StaticCache(config=model.config, max_cache_len=LONG)
    for part in ids.split([LONG - 2, 1, 1], dim=1):
        found = fed(model, part, static)
    same(found, whole(model, ids))
    assert KEPT not in vars(static)
    cache = filled(model, ids)
    assert KEPT not in vars(copy.deepcopy(cache))
    assert KEPT not in vars(pickle.loads(pickle.dumps(cache)))
    cache.batch_repeat_interleave(2)
    assert KEPT not in vars(cache)


def test_gradients_flow_through_all_keys() -> None:
    """A step of decoding with gradients rotates every key in the graph."""
    model, ids = patched("dynamic_ntk"), tokens(1, LONG)
    model.zero_grad()
    cache = DynamicCache(config=model.config)
    for part in ids.split([LONG - 2, 1, 1], dim=1):
        logits = model(part, past_key_values=cache, use_cache=True).logits[:, -1]
    logits.square().sum().backward()
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    model(ids, use_cache=False).logits[:, -1].square().sum().backward()
    expected = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=2e-3 * scale + 1e-6)


class _Large(TorchDispatchMode):
    """Counts operations, and those of which the result is at least as large as the keys of a layer."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.operations, self.large = elements, 0, Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.operations += 1
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.numel() >= self.elements:
                self.large[function.overloadpacket.__name__] += 1
        return out


def _own_calls(function: Any) -> int:
    """How many functions of this library a call runs."""
    count, folder = 0, str(Path(rx.__file__).parent)

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(folder)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", ["dynamic_ntk", "short_original"])
def test_a_decoded_token_costs_what_it_costs_without_a_patch(name: str) -> None:
    """Counted: earlier keys are not multiplied, and not copied more often; few operations are added."""
    stock = llama()
    layers = stock.config.num_hidden_layers
    for context, steps, copies in ((100, 1, 2), (1100, 4, 1)):
        counts = []
        for model in (patched(name), stock):
            cache = DynamicCache(config=model.config)
            for part in tokens(1, context + 2).split([context, 1, 1], dim=1):
                fed(model, part, cache)
            elements = cache.layers[0].values.numel()
            with _Large(elements) as counter:
                for part in tokens(1, steps).split(1, dim=1):
                    fed(model, part, cache)
            counts.append(counter)
        ours, theirs = counts
        arithmetic = ("mul", "add", "sub", "addcmul", "cos", "sin", "clone", "new_empty")
        assert not [operation for operation in arithmetic if ours.large[operation] > theirs.large[operation]]
        assert theirs.large["cat"] == 2 * layers * steps
        assert ours.large["cat"] <= copies * layers * steps
        assert ours.operations - theirs.operations <= 6 * layers * steps
    model = patched(name)
    cache = filled(model, tokens(1, 100))
    assert _own_calls(lambda: fed(model, tokens(1, 1), cache)) <= 20 * layers + 50


@pytest.mark.parametrize("name", ["dynamic_ntk", "short_original"])
def test_many_decoded_tokens_cost_few_operations_more(name: str) -> None:
    """Counted over tokens under one table, with what is prepared and allocated for several together."""
    counts = []
    for model in (patched(name), llama()):
        cache = DynamicCache(config=model.config)
        for part in tokens(1, 200).split([198, 1, 1], dim=1):
            fed(model, part, cache)
        with _Large(1) as counter:
            for part in tokens(1, 24).split(1, dim=1):
                fed(model, part, cache)
        counts.append(counter.operations)
    steps, layers = 24, llama().config.num_hidden_layers
    assert counts[0] - counts[1] <= 8 * layers * steps


def _two_rows() -> list[FamilyCase]:
    """Families of which the model's own rotation rotates the keys that are kept."""
    return [case for case in ALL_FAMILIES if case.model_type in adapter_for(case.model_type).two_rows]


@pytest.mark.parametrize("case", _two_rows(), ids=lambda case: case.model_type)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_rotate_new_keys_themselves(
    case: FamilyCase, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, over changes of the table, compared with one forward over all of them."""
    added: list[bool] = []
    add = TwoRows.add

    def watched(step: TwoRows, *arguments: Any) -> tuple[Tensor, Tensor]:
        result = add(step, *arguments)
        added.append(step.gave(result[0]))
        return result

    monkeypatch.setattr(TwoRows, "add", watched)
    model = tiny_model(case)
    model.set_attn_implementation(attention)
    with rx.patch_model(model, rx.Encoding.from_dict(METHODS["dynamic_ntk"])):
        ids, cache = tokens(2, 80), DynamicCache(config=model.config)
        fed(model, ids[:, :30], cache)
        found = [fed(model, part, cache) for part in ids[:, 30:].split(1, dim=1)]
        with torch.no_grad():
            whole_text = model(ids, use_cache=False).logits[:, 30:]
    same(torch.stack(found, dim=1), whole_text)
    assert len(added) == 50 * model.config.num_hidden_layers
    # Layers with a window of their own have no such keys.
    assert sum(added) == 50 * sum(not layer.is_sliding for layer in cache.layers)


def test_layers_on_another_device_get_copies_of_cos_and_sin() -> None:
    """Copies do not say which forward they belong to. Keys that the model rotated are not rotated again."""
    model, ids = patched("dynamic_ntk"), tokens(1, LONG)
    attention = model.model.layers[1].self_attn

    def copied(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs["position_embeddings"] = tuple(part.clone() for part in kwargs["position_embeddings"])
        return args, kwargs

    hook = attention.register_forward_pre_hook(copied, with_kwargs=True, prepend=True)
    try:
        cache = filled(model, ids[:, :-1])
        found = fed(model, ids[:, -1:], cache)
        assert set(vars(cache)[PLACES]) == {0, 1}
    finally:
        hook.remove()
    same(found, whole(model, ids))


@pytest.mark.slow
def test_compiled_layers_decode_with_keys_that_the_model_rotated() -> None:
    """The rotary module runs as it is, and the layers are compiled."""
    model = llama()
    rx.patch_model(model, rx.Encoding.from_dict(METHODS["dynamic_ntk"]))
    ids = tokens(1, LONG)
    expected, cache = whole(model, ids), filled(model, ids[:, :-2])
    model.model.layers[1].compile(backend="eager")
    for part in ids[:, -2:].split(1, dim=1):
        found = fed(model, part, cache)
    assert set(vars(cache)[PLACES]) == {0, 1}
    same(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("inference", [False, True])
def test_keys_that_were_shown_are_never_written_to(inference: bool) -> None:
    """Views of a user, a layer with the same tensors, and cropped caches keep their values."""
    model, ids = patched("dynamic_ntk"), tokens(1, LONG)
    with torch.inference_mode(inference):
        cache, other = filled(model, ids), filled(model, ids)
        for mine, theirs in zip(cache.layers, other.layers, strict=True):
            theirs.keys, theirs.values = mine.keys, mine.values
        shown = [part for layer in cache.layers for part in (layer.keys, layer.values)]
        before = [part.clone() for part in shown]
        cache.crop(-2)
        texts = [tokens(1, 5, seed=seed) for seed in (2, 3)]
        for column in range(5):  # in turns
            found = [
                fed(model, text[:, column, None], each)
                for text, each in zip(texts, (cache, other), strict=True)
            ]
    assert all(map(torch.equal, shown, before))
    same(found[0], whole(model, torch.cat([ids[:, :-2], texts[0]], dim=1)))
    same(found[1], whole(model, torch.cat([ids, texts[1]], dim=1)))


def test_memory_is_that_of_keys_values_and_rotated_keys() -> None:
    model, stock = patched("dynamic_ntk"), llama()
    ids = tokens(1, 200)

    def held(model: LlamaForCausalLM) -> int:
        cache = DynamicCache(config=model.config)
        for part in ids.split([197, 1, 1, 1], dim=1):
            fed(model, part, cache)
        memory = LiveBytes()
        for owner in (cache, *cache.layers):
            for leaf in tree_leaves(list(vars(owner).values())):
                if isinstance(leaf, Tensor):
                    memory.add(leaf)
        return memory.live

    positions = 8 * ids.numel()
    assert held(model) <= held(stock) * 1.5 * (1 + 1 / 171) + positions


@torch.no_grad()
def test_a_cache_that_grows_copies_one_tensor_at_a_time() -> None:
    """Counted: the most bytes that a step holds in addition to those before it."""
    model = patched("short_original")  # one table beyond the window
    with LiveBytes() as memory:
        cache, extra = filled(model, tokens(1, 400)), []
        for token in tokens(1, 90).split(1, dim=1):
            before, memory.peak = memory.live, memory.live
            fed(model, token, cache)
            extra.append(memory.peak - before)
    later, size = extra[50:], cache.layers[0].keys.nbytes  # cos and sin are computed ahead at 448
    assert sum(more > size / 2 for more in later) > 20
    assert max(later) < 1.5 * size


@pytest.mark.parametrize("context", [100, 512, 2048])
def test_bytes_between_steps_are_at_most_half_more_than_without_a_patch(context: int) -> None:
    """Counted after each of 70 tokens, to two decimals, and without positions."""
    model, stock = patched("dynamic_ntk"), llama()
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    ids = tokens(1, context + 70)
    for part in ids.split([context] + [1] * 70, dim=1):
        held = []
        for each, cache in zip((model, stock), caches, strict=True):
            fed(each, part, cache)
            leaves = [
                leaf for owner in (cache, *cache.layers) for leaf in tree_leaves(list(vars(owner).values()))
            ]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() == 4]
            sizes = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
            held.append(sum(sizes.values()))
        assert held[0] < 1.505 * held[1]
    assert held[0] >= 1.5 * held[1]


def test_keys_of_decoded_tokens_are_there_when_a_user_reads_them() -> None:
    """Unrotated, in the order of the text, and nothing is computed again for that."""
    model, ids = patched("short_original"), tokens(1, LONG + 80)
    cache, plain = filled(model, ids[:, :LONG]), DynamicCache(config=model.config)
    setattr(plain, CHOICE, False)
    for part in ids[:, LONG:].split(1, dim=1):
        fed(model, part, cache)
        assert cache.get_seq_length() == cache.rope_extend_positions.shape[1]
    fed(model, ids, plain)
    for mine, other in zip(cache.layers, copy.deepcopy(cache).layers, strict=True):
        same(mine.keys, other.keys)
    for mine, expected in zip(cache.layers, plain.layers, strict=True):
        assert mine.keys is mine.keys
        assert mine.get_seq_length() == LONG + 80 == mine.keys.shape[2]
        same(mine.keys, expected.keys)
    with _Large(cache.layers[0].keys.numel() // 4) as counter:
        fed(model, tokens(1, 1), cache)
    assert counter.large["mul"] == 0


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("context", [140, 1030])
def test_a_cropped_cache_decodes_on_without_rotating_all_keys(context: int, inference: bool) -> None:
    """In short texts, and in those in which tensors have room: compared with one forward, and counted."""
    model, ids = patched("short_original"), tokens(2, context + 12)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode(inference):
        for part in ids.split([context, *[1] * 12], dim=1):
            fed(model, part, cache)
        shown = [layer.values for layer in cache.layers]
        before = [part.clone() for part in shown]
        cache.crop(-5)
    new = tokens(2, 9, seed=2)
    with _Large(cache.layers[0].keys.numel() // 4) as counter:
        for part in new.split(1, dim=1):
            found = fed(model, part, cache)
    assert counter.large["mul"] == counter.large["sub"] == 0
    assert all(map(torch.equal, shown, before))
    same(found, whole(model, torch.cat([ids[:, :-5], new], dim=1)))
