"""Positions belong to one forward, also while others are under way: in hooks, interleaved or run again."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from batches import LENGTH, batch, in_parts, logits, same, tokens
from cases import ALL_FAMILIES, TARGET, llama, tiny_model
from covering import few
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import rope_extend as rx
from rope_extend.attention.functions import HANDLER
from rope_extend.attention.tracked_cache import RUNNING
from rope_extend.errors import PatchError

ENCODINGS = ["dynamic_yarn", "alibi", "fire", "linear_attention", "sinusoidal"]
WITHOUT_POSITION_IDS = ["llama4_text", "persimmon", "fuyu", "zaya", "moshi"]
"""Families that do not hand position_ids to attention; in Moshi, the rotary module is inside attention."""


def family(name: str) -> PreTrainedModel:
    return tiny_model(next(case for case in ALL_FAMILIES if str(case).startswith(name)))


def patched(model: PreTrainedModel, name: str) -> rx.Patch:
    return rx.patch_model(model, rx.encoding(name), target_length=TARGET)


@contextmanager
def in_a_hook(module: nn.Module, do: Any) -> Iterator[None]:
    """Call `do` once, before the first forward of a module."""
    calls = iter([do])
    handle = module.register_forward_pre_hook(lambda *_: next(calls, lambda: None)())
    yield
    handle.remove()
    assert next(calls, None) is None, "the hook was not called"


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("place", ["layers.1", "layers.1.self_attn", "layers.1.self_attn.o_proj"])
def test_a_forward_inside_another_changes_nothing(name: str, place: str) -> None:
    """While a model computes a token with a cache, a hook runs whole forwards of the same model."""
    model = llama(head_dim=16)
    first, second = batch((0,)), batch((0, 17))
    others: list[Tensor] = []
    with patched(model, name), torch.no_grad():
        whole, other = logits(model, **first), in_parts(model, second, [40, LENGTH])
        cache = model(**first.part(0, 70), use_cache=True).past_key_values
        with in_a_hook(
            model.model.get_submodule(place),
            lambda: others.append(in_parts(model, second, [40, LENGTH])),
        ):
            token = model(**first.part(70, 71), past_key_values=cache).logits
        rest = model(**first.part(71, LENGTH), past_key_values=cache).logits
    same(torch.cat([token, rest], dim=1), whole[:, 70:])
    same(others[0], other, second)


@pytest.mark.parametrize("name", ENCODINGS)
def test_an_interrupted_forward_leaves_nothing_behind(name: str) -> None:
    model, data = llama(head_dim=16), batch((0,))

    def interrupt() -> None:
        raise RuntimeError("interrupted")

    with patched(model, name):
        handler = getattr(model.model, HANDLER)
        expected = logits(model, **data)
        with (
            pytest.raises(RuntimeError, match="interrupted"),
            in_a_hook(model.model.layers[1].self_attn.o_proj, interrupt),
        ):
            logits(model, data["input_ids"][:, :9])
        assert handler._running.frames == []
        same(in_parts(model, data, [40, LENGTH]), expected)


@pytest.mark.parametrize("name", [*ENCODINGS, "self_extend"])
@pytest.mark.parametrize("second", [None, "yarn"])
def test_a_cache_does_not_outlive_its_patch(name: str, second: str | None) -> None:
    """Its keys are not those of another patch or of none. Once it is empty, it is a cache like any other."""
    model, data = llama(head_dim=16), batch((0,))
    with rx.extend(model, TARGET, name), torch.no_grad():
        expected = logits(model, **data)
        cache = model(**data.part(0, 40), use_cache=True).past_key_values
    other = rx.extend(model, TARGET, second) if second else nullcontext()
    with other, torch.no_grad():
        for held in (cache, pickle.loads(pickle.dumps(cache))):
            with pytest.raises(PatchError, match=rf"filled under {name}.*40 cached tokens.*empty cache, or"):
                model(**data.part(40, LENGTH), past_key_values=held)
    with rx.extend(model, TARGET, name), torch.no_grad():
        found = model(**data.part(40, LENGTH), past_key_values=copy.deepcopy(cache)).logits
        same(found, expected[:, 40:])
    if name == "linear_attention":
        return  # a state is not keys: such a cache cannot be emptied
    cache.crop(-40)
    other = rx.extend(model, TARGET, second) if second else nullcontext()
    with other:
        same(in_parts(model, data, [40, LENGTH], cache), logits(model, **data))
    with rx.extend(model, TARGET, name), pytest.raises(PatchError, match="cached without the encoding"):
        model(tokens(1, 3), past_key_values=cache)


def test_an_interrupted_forward_does_not_leave_its_cache_in_use() -> None:
    model, data = llama(head_dim=16), batch((0,))

    def interrupt() -> None:
        raise RuntimeError("interrupted")

    with patched(model, "dynamic_yarn"), torch.no_grad():
        cache = model(**data.part(0, 40), use_cache=True).past_key_values
        with pytest.raises(RuntimeError), in_a_hook(model.model.layers[0], interrupt):
            model(**data.part(40, 50), past_key_values=cache)
    with pytest.raises(PatchError, match="no longer patched"):
        model(**data.part(40, 50), past_key_values=cache)


def loss_of(model: PreTrainedModel, step: int) -> Tensor:
    """The loss of a row whose positions are `step` apart."""
    ids = tokens(1, 40, seed=step)
    positions = step * torch.arange(40)[None]
    mask = torch.ones_like(ids)  # otherwise transformers takes each jump for the start of a document
    output: Tensor = model(ids, attention_mask=mask, position_ids=positions, labels=ids, use_cache=False).loss
    return output


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Gradients are equal to within 1e-4 of the largest of each weight; a wrong position changes 1e-2."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name], gradient, rtol=0, atol=1e-4 * float(gradient.abs().max()) + 1e-7, msg=name
        )


def trained(name: str, encoding: str) -> Any:
    model = family(name)
    patched(model, encoding)
    return model.train()


@pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")  # a new name is on its way
@pytest.mark.parametrize(
    ("name", "encoding"), few(itertools.product(WITHOUT_POSITION_IDS, ["dynamic_yarn", "alibi"]), 3)
)
def test_recomputed_layers_use_the_positions_of_their_forward(name: str, encoding: str) -> None:
    """A loss of two forwards, as in DPO, whose layers run again in the backward pass.

    On a GPU the backward pass runs in a thread of autograd; here it is a thread of this test.
    """
    model = trained(name, encoding)
    (loss_of(model, 1) + loss_of(model, 2)).backward()
    expected = gradients_of(model)
    for reentrant in (False, True):
        model.zero_grad()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        loss = loss_of(model, 1) + loss_of(model, 2)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        close(gradients_of(model), expected)


def orders() -> list[tuple[int, ...]]:
    """Every order of three forwards and their backward passes; `0, 0` is forward 0, then its backward."""
    return sorted(set(itertools.permutations([0, 0, 1, 1, 2, 2])))


@pytest.mark.parametrize("order", few(((order,) for order in orders()), 15), ids=str)
def test_any_order_of_forwards_and_backwards_gives_the_same_gradients(order: tuple[int, ...]) -> None:
    """Two losses of one model and one of another, each with layers that run again in the backward pass."""
    models = [trained("llama4_text", "alibi"), trained("persimmon", "dynamic_yarn")]
    parts = [(models[0], 1), (models[0], 2), (models[1], 3)]
    for model, step in parts:
        loss_of(model, step).backward()
    expected = [gradients_of(model) for model in models]
    for model in models:
        model.zero_grad()
        model.gradient_checkpointing_enable()
    waiting: dict[int, Tensor] = {}
    for index in order:
        if index in waiting:
            waiting.pop(index).backward()
        else:
            waiting[index] = loss_of(*parts[index])
    for model, gradients in zip(models, expected, strict=True):
        close(gradients_of(model), gradients)


@pytest.mark.parametrize("name", ["llama4_text", "persimmon", "llama"])
def test_a_backward_pass_inside_a_forward_changes_neither(name: str) -> None:
    model = trained(name, "alibi")
    loss_of(model, 2).backward()
    expected, plain = gradients_of(model), loss_of(model, 1)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    earlier = loss_of(model, 2)
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    with in_a_hook(layers[1], earlier.backward):
        later = loss_of(model, 1)
    assert torch.equal(later, plain)
    close(gradients_of(model), expected)


def test_unknown_positions_are_refused() -> None:
    """Copies of cos and sin do not say which forward they belong to, and Llama 4 gives no position_ids."""
    model = trained("llama4_text", "alibi")
    model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (
                args,
                {**kwargs, "position_embeddings": kwargs["position_embeddings"].clone()},
            ),
            with_kwargs=True,
            prepend=True,
        )
    loss = loss_of(model, 1)
    with pytest.raises(rx.RopeExtendError, match=r"does not know the positions.*turn gradient checkpointing"):
        loss.backward()


@pytest.mark.parametrize("name", ["dynamic_yarn", "linear_attention"])
def test_a_cache_can_be_pickled(name: str) -> None:
    model, data = llama(head_dim=16), batch()
    with patched(model, name), torch.no_grad():
        whole = logits(model, **data)
        cache = model(**data.part(0, 60), use_cache=True).past_key_values
        file = io.BytesIO()
        torch.save(cache, file)
        file.seek(0)
        for twin in (pickle.loads(pickle.dumps(cache)), torch.load(file, weights_only=False)):
            assert type(twin) is type(cache)
            assert isinstance(twin, DynamicCache)
            assert torch.equal(twin.rope_extend_positions, cache.rope_extend_positions)
            same(model(**data.part(60, LENGTH), past_key_values=twin).logits, whole[:, 60:])


@torch.no_grad()
@pytest.mark.filterwarnings("error:module forward hook")
@pytest.mark.parametrize("place", ["model", "model.layers.0.self_attn", "model.layers.1"])
def test_an_earlier_hook_may_raise(place: str) -> None:
    """That ends the forward: the cache is no longer in use, and the model works on."""
    model, data, stops = llama(head_dim=16), batch((0,)), [False]

    def stop(*_: Any) -> None:
        if stops[0]:
            raise KeyError("stop")

    model.get_submodule(place).register_forward_pre_hook(stop)
    with patched(model, "dynamic_yarn"):
        cache = model(**data.part(0, 40), use_cache=True).past_key_values
        stops[0] = True
        with pytest.raises(KeyError, match="stop"):
            model(**data.part(40, 41), past_key_values=cache)
        stops[0] = False
        assert RUNNING not in vars(cache)
        same(in_parts(model, data, [60, LENGTH]), logits(model, **data))


@torch.no_grad()
def test_rows_of_a_cache_are_selected_by_any_index() -> None:
    model, data = llama(head_dim=16), batch((0, 17))
    with patched(model, "dynamic_yarn"):
        expected = logits(model, **data.rows([1]))[:, 50:]
        for rows in ([1], slice(1, 2), np.array([1]), torch.tensor([1]), torch.tensor([False, True])):
            cache = model(**data.part(0, 50), use_cache=True).past_key_values
            cache.batch_select_indices(rows)
            found = model(**data.rows([1]).part(50, LENGTH), past_key_values=cache).logits
            same(found, expected)


@torch.no_grad()
def test_a_shallow_copy_of_a_cache_is_refused_once_the_other_went_on() -> None:
    """Both have the same layers, as with stock caches, but positions of their own."""
    model, data = llama(head_dim=16), batch((0,))
    with patched(model, "dynamic_yarn"):
        cache = model(**data.part(0, 40), use_cache=True).past_key_values
        other = copy.copy(cache)
        model(**data.part(40, 41), past_key_values=cache)
        with pytest.raises(PatchError, match=r"has positions for 40 of its 41 tokens.*copy\.deepcopy"):
            model(**data.part(41, 42), past_key_values=other)


@pytest.mark.parametrize("name", ["dynamic_yarn", "alibi"])
@torch.no_grad()
def test_a_cache_with_keys_removed_from_its_middle_is_refused(name: str) -> None:
    """As programs do that compress a cache: which positions its keys have cannot be known."""
    model, ids = llama(head_dim=16), tokens(1, 40)
    with patched(model, name):
        cache = model(ids, use_cache=True).past_key_values
        for layer in cache.layers:
            layer.keys, layer.values = (
                torch.cat([each[:, :, :4], each[:, :, 20:]], dim=2) for each in (layer.keys, layer.values)
            )
        with pytest.raises(
            PatchError, match=r"filled with 40 tokens and holds 24.*remove tokens by its crop"
        ):
            model(ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[40]]))


LOGN = {"name": "logn", "inner": {"name": "yarn", "factor": 4}}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_padding_may_have_negative_positions(implementation: str) -> None:
    model, ids, padding = llama(head_dim=16), tokens(1, 40), 5
    model.set_attn_implementation(implementation)
    mask = (torch.arange(40) >= padding).long()[None]
    with rx.patch_model(model, rx.Encoding.from_dict(LOGN)):
        padded = logits(model, ids, attention_mask=mask, position_ids=torch.arange(40)[None] - padding)
        same(padded[:, padding:], logits(model, ids[:, padding:]))


@torch.no_grad()
def test_a_forward_of_one_token_is_exported_where_the_table_is_static() -> None:
    model, ids = llama(head_dim=16), tokens(1, 1)
    with rx.patch_model(model, rx.Encoding.from_dict(LOGN)):
        exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=False).module()
        same(exported(ids, use_cache=False).logits, logits(model, ids))
