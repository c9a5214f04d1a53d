"""What users change between the model's own rotation, its cache and its attention does no harm.

A step of decoding has cos and sin of two rows, and its cache returns rotated keys. Wherever something else
acts between them, the result is that of one forward, or the forward is refused by name.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from batches import same, tokens
from cases import FACTOR, llama
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.models.llama import modeling_llama

import rope_extend as rx
from rope_extend.attention.rotated_keys import CHOICE, KEPT
from rope_extend.attention.two_rows import PLACES
from rope_extend.errors import PatchError

METHOD = {"name": "dynamic_ntk", "factor": FACTOR}
START, LENGTH = 68, 71
"""Tokens of a cache, and of a text. The next two tokens have the table of the last two in the cache."""
IDS = tokens(1, LENGTH)


@pytest.fixture
def model() -> Iterator[LlamaForCausalLM]:
    """A patched model; a test may change it."""
    model = llama()
    with rx.patch_model(model, rx.Encoding.from_dict(METHOD)), torch.no_grad():
        yield model


def decode(
    model: LlamaForCausalLM, cache: Any, start: int = START, stop: int = LENGTH, **more: Any
) -> Tensor:
    """The logits of tokens `start` to `stop`, one by one."""
    parts = IDS[:, start:stop].split(1, dim=1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


def filled(model: LlamaForCausalLM) -> DynamicCache:
    """A cache of `START` tokens, the last two of them fed one by one."""
    cache = DynamicCache(config=model.config)
    model(IDS[:, : START - 2], past_key_values=cache)
    decode(model, cache, START - 2, START)
    return cache


def whole(model: LlamaForCausalLM) -> Tensor:
    """The logits of the tokens that `decode` gives, in one forward."""
    return model(IDS, use_cache=False).logits[:, START:]


@contextmanager
def often_switched() -> Iterator[None]:
    """Threads take turns all the time, so that each meets the others in the midst of their work."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def rows_of(model: LlamaForCausalLM) -> list[int]:
    """A list that gets the number of rows of cos in each forward."""
    rows: list[int] = []
    model.model.rotary_emb.register_forward_hook(lambda _, __, tables: rows.append(tables[0].shape[1]))
    return rows


@pytest.mark.parametrize("change", [lambda states: states * 1, Tensor.contiguous])
def test_a_cache_whose_update_was_replaced(
    model: LlamaForCausalLM, change: Callable[[Tensor], Tensor]
) -> None:
    """It may return other tensors."""
    expected, cache = whole(model), filled(model)

    def update(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(map(change, type(cache).update(cache, *arguments)))

    cache.update = update  # type: ignore[method-assign]
    same(decode(model, cache), expected)


def test_rotated_keys_in_another_tensor_are_refused(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If attention is replaced after the patch: nothing says whether its keys are rotated."""
    find = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface

    def cloning(*names: Any) -> Any:
        inner = find(*names)
        return lambda module, query, key, *rest, **more: inner(module, query, key.clone(), *rest, **more)

    cache = filled(model)
    monkeypatch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", cloning)
    with pytest.raises(PatchError, match=rf"layer 0.*replaced by other tensors.*{CHOICE} = False"):
        decode(model, cache)
    cache = DynamicCache(config=model.config)
    setattr(cache, CHOICE, False)
    model(IDS[:, :START], past_key_values=cache)
    same(decode(model, cache), whole(model))


@pytest.mark.parametrize("replaced", ["forward of a module", "forward of the class", "rotation"])
def test_attention_of_a_users_own_gets_one_row(replaced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known when the patch is installed. A function may take the last row, or write in place."""
    model, own = llama(), modeling_llama.LlamaAttention.forward
    if replaced == "rotation":
        rotation = modeling_llama.apply_rotary_pos_emb

        def last(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return rotation(query, key, cos[:, -query.shape[2] :], sin[:, -query.shape[2] :])

        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", last)
    elif replaced == "forward of the class":
        monkeypatch.setattr(
            modeling_llama.LlamaAttention, "forward", lambda *args, **more: own(*args, **more)
        )
    else:
        module = model.model.layers[1].self_attn
        module.forward = lambda *args, **more: own(module, *args, **more)
    with rx.patch_model(model, rx.Encoding.from_dict(METHOD)), torch.no_grad():
        rows, cache = rows_of(model), filled(model)
        same(decode(model, cache), whole(model))
    assert set(rows) == {START - 2, 1, LENGTH}


def test_a_layer_may_run_alone_with_saved_cos_and_sin(model: LlamaForCausalLM) -> None:
    """As in quantisation layer by layer, without position_ids, and inside a forward at other positions."""
    layer, saved = model.model.layers[1], []
    catch = layer.register_forward_pre_hook(
        lambda _, args, kwargs: saved.append((args, dict(kwargs))), with_kwargs=True
    )
    model(IDS, use_cache=False)
    catch.remove()
    ((states,), given), found = saved[0], []
    tables = {name: given[name] for name in ("position_embeddings", "attention_mask")}
    expected = layer(states, **given)
    same(layer(states, **tables), expected)
    handle = model.model.layers[0].register_forward_hook(lambda *_: found.append(layer(states, **tables)))
    model(IDS, position_ids=torch.arange(LENGTH)[None] + 40, use_cache=False)
    handle.remove()
    same(found[0], expected)
    same(copy.deepcopy(layer)(states, **tables), expected)


def test_a_hook_may_give_saved_cos_and_sin(model: LlamaForCausalLM) -> None:
    """Attention then has their positions, whatever ran before."""
    saved: list[Any] = []
    rotary = model.model.rotary_emb.register_forward_hook(lambda _, __, tables: saved.append(tables))
    expected = model(IDS, position_ids=torch.arange(LENGTH)[None] + 40, use_cache=False).logits
    rotary.remove()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "position_embeddings": saved[0]}), with_kwargs=True
        )
    same(model(IDS, use_cache=False).logits, expected)


def test_threads_may_begin_to_train_at_once(model: LlamaForCausalLM) -> None:
    """Hooks that come when they are first needed come once."""
    model.requires_grad_(True)
    model.gradient_checkpointing_enable()
    model.train()

    def train() -> None:
        with torch.enable_grad():
            model(IDS, labels=IDS, use_cache=False).loss.backward()

    with often_switched(), ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(train) for _ in range(6)]:
            done.result()
    assert [len(layer.self_attn._forward_hooks) for layer in model.model.layers] == [1, 1]


def test_one_row_of_cos_and_sin_is_refused_where_two_are_expected(model: LlamaForCausalLM) -> None:
    cache = filled(model)
    model.model.rotary_emb.register_forward_hook(lambda _, __, tables: tuple(part[:, -1:] for part in tables))
    with pytest.raises(PatchError, match=rf"two rows for one token.*layer 0 caches 1 keys.*{CHOICE} = False"):
        decode(model, cache)


@pytest.mark.parametrize("shift", [0, -1])
@pytest.mark.parametrize("place", ["layers.0.self_attn", "layers.1.self_attn"])
def test_a_hook_may_call_the_rotary_module(model: LlamaForCausalLM, place: str, shift: int) -> None:
    """At the same positions, in another tensor, and at other ones."""
    expected, cache = whole(model), filled(model)

    def call(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        model.model.rotary_emb(kwargs["hidden_states"], kwargs["position_ids"] + shift)

    model.model.get_submodule(place).register_forward_pre_hook(call, with_kwargs=True)
    rows = rows_of(model)
    same(decode(model, cache), expected)
    assert set(rows) == ({1, 2} if shift else {2})
    assert cache.rope_extend_positions.flatten().tolist() == [*range(LENGTH)]
    same(decode(model, filled(model)), expected)  # its first forward is of many tokens


def test_a_rotary_module_that_was_called_before_its_decoder_does(model: LlamaForCausalLM) -> None:
    """A cache then has the positions that attention used."""
    model.model.embed_tokens.register_forward_hook(
        lambda _, __, states: model.model.rotary_emb(states, torch.zeros(1, states.shape[1]).long()) and None
    )
    cache = model(IDS[:, :START]).past_key_values
    assert cache.rope_extend_positions.flatten().tolist() == [*range(START)]


@pytest.mark.parametrize("place", ["layers.0", "layers.1.mlp"])
def test_an_interrupted_step_does_not_leave_its_cache_in_use(place: str) -> None:
    """After Ctrl-C, PyTorch calls no hook of what ran."""
    model = llama()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with rx.patch_model(model, rx.Encoding.from_dict(METHOD)), torch.no_grad():
        cache = filled(model)
        hook = model.model.get_submodule(place).register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            decode(model, cache)
        hook.remove()
    with pytest.raises(PatchError, match="no longer patched"):
        model(IDS[:, :1], past_key_values=cache)


@pytest.mark.parametrize("count", [2, 5])
def test_one_position_for_several_tokens_is_refused(model: LlamaForCausalLM, count: int) -> None:
    with pytest.raises(PatchError, match=rf"has {count} queries.*got 1 positions"):
        model(IDS[:, :count], past_key_values=filled(model), position_ids=torch.tensor([[START]]))


def test_rotated_keys_are_freed_when_a_user_so_chooses(model: LlamaForCausalLM) -> None:
    """After decoding began."""
    expected, cache = whole(model), filled(model)
    assert vars(cache)[PLACES]
    setattr(cache, CHOICE, False)
    same(decode(model, cache), expected)
    assert not vars(cache)[KEPT]
    assert not vars(cache)[PLACES]


def test_what_is_kept_may_be_removed(model: LlamaForCausalLM) -> None:
    expected, cache = whole(model), filled(model)
    for name in [name for name in vars(cache) if name in (KEPT, "rope_extend_room")]:
        vars(cache).pop(name)
    model(IDS[:, START : START + 2], past_key_values=cache)
    same(decode(model, cache, START + 2), expected[:, 2:])


@pytest.mark.parametrize("changed", ["update", "values"])
def test_a_layer_that_a_user_changed_after_decoding_began(model: LlamaForCausalLM, changed: str) -> None:
    cache, plain, calls = filled(model), filled(model), []
    setattr(plain, CHOICE, False)
    for each in (cache, plain):
        layer = each.layers[1]

        def halved(keys: Tensor, values: Tensor, *rest: Any, layer: Any = layer) -> Any:
            calls.append(layer)
            return DynamicLayer.update(layer, keys, values / 2, *rest)

        if changed == "update":
            layer.update = halved
        else:
            layer.values = layer.values / 2
    found, expected = decode(model, cache), decode(model, plain)
    same(found, expected)
    assert calls.count(cache.layers[1]) == (LENGTH - START if changed == "update" else 0)
    assert float((found - whole(model)).abs().max()) > 1e-2


@pytest.mark.parametrize("removed", [1, 2])
def test_two_caches_that_share_their_layers(model: LlamaForCausalLM, removed: int) -> None:
    """As `copy.copy` makes them: what one decodes in place of the other's tokens, both have."""
    cache = filled(model)
    other = copy.copy(cache)
    other.crop(-removed)
    texts = torch.cat([IDS[:, : START - removed], IDS[:, :removed], IDS[:, START:]], dim=1)
    for past, start, stop in ((other, START - removed, START), (cache, START, START + 1)):
        for part in texts[:, start:stop].split(1, dim=1):
            found = model(part, past_key_values=past).logits
        same(found, model(texts[:, :stop], use_cache=False).logits[:, -1:])


def test_decoding_for_inference_frees_the_graph_of_a_prompt(model: LlamaForCausalLM) -> None:
    """A prompt that was read with gradients, as happens by accident."""
    cache = DynamicCache(config=model.config)
    with torch.enable_grad():
        model(IDS[:, :START], past_key_values=cache)
    assert cache.layers[1].keys.requires_grad
    with torch.inference_mode():
        found = decode(model, cache)
    same(found, whole(model))
    kept = [vars(cache)[PLACES][1].rotated.view, cache.layers[1].keys, cache.layers[1].values]
    assert not any(states.requires_grad for states in kept)


def test_keys_that_another_thread_reads(model: LlamaForCausalLM) -> None:
    """It gathers them, at any time."""
    cache, done = filled(model), threading.Event()

    def read() -> None:
        while not done.is_set():
            assert all(layer.keys.shape[2] >= START for layer in cache.layers)

    texts = tokens(1, START + 60, seed=7)
    texts[:, :START] = IDS[:, :START]
    with often_switched(), ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        try:
            parts = texts[:, START:].split(1, dim=1)
            found = torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)
        finally:
            done.set()
    reader.result()
    same(found, model(texts, use_cache=False).logits[:, START:])


def test_a_new_layer_of_the_class_of_a_cache(model: LlamaForCausalLM) -> None:
    """As in tools that make an empty cache like another."""
    states = torch.ones(1, 2, 3, 4)
    layer = type(filled(model).layers[0])()
    assert layer.get_seq_length() == 0
    keys, _ = layer.update(states, states)
    assert torch.equal(keys, states)


def test_a_layer_that_computes_with_gradients(model: LlamaForCausalLM) -> None:
    """In a decoder that runs without: what its cache holds belongs to the graph, as in a stock cache."""
    expected, cache = whole(model), filled(model)
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda *_: torch.set_grad_enabled(True) and None)
    attention.register_forward_hook(lambda *_: torch.set_grad_enabled(False) and None)
    same(decode(model, cache), expected)
    assert cache.layers[1].keys.requires_grad
    assert cache.layers[1].values.requires_grad


class Cache(DynamicCache):
    """A class of a user's own."""


@pytest.mark.parametrize("other", ["class of caches", "compiled rotary module"])
def test_others_get_cos_and_sin_of_one_row(
    model: LlamaForCausalLM, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, cache = whole(model), filled(model)
    rotary: nn.Module = model.model.rotary_emb
    if other == "class of caches":
        cache = Cache(config=model.config)
        model(IDS[:, :START], past_key_values=cache)
    else:  # the rotary module asks whether it is compiled
        inner = rotary.forward

        def compiled(*arguments: Any, **kwargs: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
                return inner(*arguments, **kwargs)

        rotary.forward = compiled  # type: ignore[method-assign]
    rows = rows_of(model)
    same(decode(model, cache), expected)
    assert set(rows) == {1}


def test_cos_and_sin_of_a_step_have_two_rows(model: LlamaForCausalLM) -> None:
    """Otherwise the tests here would see nothing."""
    cache, rows = filled(model), rows_of(model)
    same(decode(model, cache), whole(model))
    assert rows == [2] * (LENGTH - START) + [LENGTH]
