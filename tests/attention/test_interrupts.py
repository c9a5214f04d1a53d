"""An interrupt (Ctrl-C) or an error at any point of a forward does no harm to later ones.

PyTorch calls no hook after an interrupt. So nothing of ours ends what the forward began.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import same, tokens
from cases import FACTOR, llama
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM

import rope_extend as rx
from rope_extend.attention.interrupts import still_running
from rope_extend.attention.tracked_cache import RUNNING
from rope_extend.errors import PatchError

START, LENGTH = 68, 72
"""Tokens of a cache, and of a text."""
IDS = tokens(1, LENGTH)
METHODS: list[dict[str, Any]] = [
    {"name": "dynamic_ntk", "factor": FACTOR},
    {"name": "alibi"},
    {"name": "self_extend", "group": 4, "window": 16},
]
POINTS = 13
"""Points of a step at which it is interrupted."""


def patched(method: dict[str, Any]) -> LlamaForCausalLM:
    """A patched model of two layers."""
    model = llama()
    rx.patch_model(model, rx.Encoding.from_dict(method))
    return model


def filled(model: LlamaForCausalLM) -> DynamicCache:
    """A cache of `START` tokens, the last two of them fed one by one."""
    cache = DynamicCache(config=model.config)
    for part in IDS[:, :START].split([START - 2, 1, 1], dim=1):
        model(part, past_key_values=cache)
    return cache


def rest(model: LlamaForCausalLM, cache: Any) -> Tensor:
    """The logits of the tokens after `START`, one by one."""
    parts = IDS[:, START:].split(1, dim=1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


def calls_of(function: Callable[[], object], stop: int = -1) -> int:
    """The number of Python and C calls that a function makes; that of number `stop` is interrupted."""
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1
            if count == stop:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        function()
    except KeyboardInterrupt:
        assert count == stop
    finally:
        sys.setprofile(None)
    return count


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupted generators
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(each, id=each["name"], marks=[pytest.mark.slow] if number else [])
        for number, each in enumerate(METHODS)
    ],
)
def test_a_step_is_interrupted_at_any_point(method: dict[str, Any]) -> None:
    """A new cache is exact, the old one is exact or refused, and nothing holds it."""
    model = patched(method)

    def step(cache: DynamicCache) -> Callable[[], object]:
        return lambda: model(IDS[:, START, None], past_key_values=cache)

    expected = rest(model, filled(model))
    calls, parts = calls_of(step(filled(model))), set()
    for point in range(1, calls, -(-calls // POINTS)):
        cache = filled(model)
        calls_of(step(cache), point)
        grown = sum(layer.keys.shape[2] > START for layer in cache.layers)
        parts.add(grown)
        if grown:
            cache.crop(-1)  # of all layers
        same(rest(model, filled(model)), expected)
        assert RUNNING not in vars(cache)
        refused = ""
        try:
            same(rest(model, cache), expected)
        except PatchError as error:
            refused = str(error)
        assert bool(refused) == (grown == 1)
        assert not refused or "different numbers of tokens" in refused
        gone = weakref.ref(cache)
        del cache
        gc.collect()
        assert gone() is None
    assert parts == {0, 1, 2}


@torch.no_grad()
def test_a_new_cache_of_an_interrupted_prefill_is_refused() -> None:
    """Its layers have keys, but it has no positions."""
    model, cache = patched(METHODS[0]), DynamicCache()
    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(IDS, past_key_values=cache)
    hook.remove()
    with pytest.raises(PatchError, match="start from an empty cache"):
        model(IDS[:, :1], past_key_values=cache)
    same(rest(model, filled(model)), model(IDS, use_cache=False).logits[:, START:])


@torch.no_grad()
def test_a_forward_inside_another_goes_on_after_an_interrupted_one() -> None:
    """What runs is told from what was interrupted."""
    model = patched(METHODS[0])
    expected = rest(model, filled(model))
    interrupted = filled(model)
    hook = model.model.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(IDS[:, START, None], past_key_values=interrupted)
    hook.remove()
    found: list[Tensor] = []

    def inside(module: nn.Module, args: Any) -> None:
        if not found:
            found.append(torch.empty(0))  # not inside itself
            found.append(rest(model, filled(model)))

    model.model.layers[1].register_forward_pre_hook(inside)
    same(rest(model, filled(model)), expected)
    same(found[1], expected)


def interrupt(*_: Any) -> None:
    """A hook that is interrupted."""
    raise KeyboardInterrupt


def fail(*_: Any) -> None:
    """A hook in which memory runs out."""
    raise torch.OutOfMemoryError


def broken(model: LlamaForCausalLM, cache: Any, place: str, hook: Any, count: int = 1) -> Any:
    """The cache after a forward of tokens at `START` that ended before a module."""
    handle = model.model.get_submodule(place).register_forward_pre_hook(hook)
    with pytest.raises((KeyboardInterrupt, torch.OutOfMemoryError)):
        model(IDS[:, START : START + count], past_key_values=cache)
    handle.remove()
    return cache


def in_a_thread(function: Callable[[], Any]) -> Any:
    """What a function returns in another thread."""
    found = []
    thread = threading.Thread(target=torch.no_grad()(lambda: found.append(function())))
    thread.start()
    thread.join()
    return found[0]


@torch.no_grad()
@pytest.mark.parametrize("hook", [fail, interrupt])
@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: method["name"])
def test_layers_with_different_numbers_of_tokens_are_refused(method: dict[str, Any], hook: Any) -> None:
    """Also after a `crop`, which removes as many tokens from all layers, and in another thread."""
    model = patched(method)
    cache = broken(model, filled(model), "layers.1", hook)
    refusals = [in_a_thread(lambda: refusal(model, cache)), refusal(model, cache)]
    for tokens_to_remove in (1, 2):
        cache.crop(-tokens_to_remove)
        refusals += [in_a_thread(lambda: refusal(model, cache)), refusal(model, cache)]
    assert [layer.keys.shape[2] for layer in cache.layers] == [START - 2, START - 3]
    assert all("different numbers of tokens, as after an error or an interrupt" in each for each in refusals)


def refusal(model: LlamaForCausalLM, cache: Any) -> str:
    """Why a cache is refused."""
    with pytest.raises(PatchError) as caught:
        model(IDS[:, START, None], past_key_values=cache)
    return str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("hook", [fail, interrupt])
@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: method["name"])
def test_a_cache_without_the_tokens_of_an_ended_forward_is_used(method: dict[str, Any], hook: Any) -> None:
    """No layer got them, or a `crop` removed them from all layers."""
    model = patched(method)
    expected = rest(model, filled(model))
    for place, count in (("embed_tokens", 1), ("layers.0", 1), ("norm", 1), ("norm", 3)):
        cache = broken(model, filled(model), place, hook, count)
        if place == "norm":
            assert "positions for" in refusal(model, cache)
            cache.crop(-count)
        same(rest(model, cache), expected)
        assert RUNNING not in vars(cache)


@torch.no_grad()
def test_cos_and_sin_of_an_interrupted_step_are_not_used_again() -> None:
    """They had two rows for one token. The next forward, of several tokens, is elsewhere."""
    model, second = patched(METHODS[0]), patched(METHODS[0])
    expected = model(IDS, use_cache=False).logits[:, START:]
    for run in (in_a_thread, lambda function: function()):
        user = model if run is in_a_thread else second
        cache = broken(model, filled(model), "layers.0", interrupt)
        same(run(lambda: user(IDS[:, START:], past_key_values=cache).logits), expected)  # noqa: B023
        assert RUNNING not in vars(cache)
        assert cache.rope_extend_positions.shape[1] == LENGTH


@torch.no_grad()
def test_positions_that_are_not_known_stay_so() -> None:
    """After a `crop`, and after a `reset` with a prefill that ends early."""
    model = patched(METHODS[0])
    cache = filled(model)
    for layer in cache.layers:
        layer.keys, layer.values = (states[:, :, 8:] for states in (layer.keys, layer.values))
    cache.crop(-1)
    assert f"filled with {START - 1} tokens and holds {START - 9}" in refusal(model, cache)
    cache = filled(model)
    cache.reset()
    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(IDS[:, :START].flip(1), past_key_values=cache)
    hook.remove()
    assert "positions for 0 of its" in refusal(model, cache)


def test_modules_run_as_long_as_they_are_on_the_stack() -> None:
    """In the order in which they began; nothing is said of a module that is not there itself."""
    found = []

    class Inner(nn.Module):
        def forward(self) -> None:
            found.append(still_running([other, outer, other, inner], inner))
            found.append(still_running([outer, other], other))

    class Outer(nn.Module):
        def forward(self) -> None:
            inner()

    inner, outer, other = Inner(), Outer(), nn.Linear(1, 1)
    outer()
    assert found == [[False, True, False, False], [True, True]]
