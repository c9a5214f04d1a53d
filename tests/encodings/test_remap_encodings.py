"""Methods that change positions: parameters from the lengths, and the distances that they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rope_extend as rx
from rope_extend.encodings import RemapEncoding, RopeShape, rotary_method
from rope_extend.encodings.core.regions import Bands

NAMES = ("self_extend", "rerope", "string", "jet_long", "sinks", "dual_chunk")
"""Methods that keep the frequencies of plain RoPE."""


def shape(trained: int) -> RopeShape:
    return RopeShape(16, 10_000.0, trained)


def for_target(name: str, trained: int, target: int, **parameters: Any) -> RemapEncoding:
    method = rotary_method(name).for_target(shape(trained), target, **parameters)
    assert isinstance(method, RemapEncoding)
    return method


@given(st.sampled_from(NAMES), st.integers(2, 300), st.floats(1.01, 12))
def test_no_pair_is_farther_apart_than_in_training(name: str, trained: int, factor: float) -> None:
    """With the parameters that follow from the lengths."""
    target = max(trained + 1, int(trained * factor))
    if name == "string":
        target = min(target, 2 * trained - max(1, min(128, trained // 16)))
    method = for_target(name, trained, target)
    queries = torch.arange(target)[:, None] if target < 600 else torch.arange(0, target, 7)[:, None]
    given_distances = method.distance(shape(trained), queries, torch.arange(target))
    causal = torch.arange(target) <= queries
    largest = given_distances[causal].nan_to_num(0).max()
    assert largest < trained
    assert given_distances[causal].nan_to_num(0).min() >= 0


@given(st.integers(2, 5000), st.integers(1, 64))
def test_the_group_is_the_smallest_that_the_authors_advise(trained: int, factor: int) -> None:
    target = factor * trained + 1
    method = for_target("self_extend", trained, target)
    assert isinstance(method, rx.encodings.SelfExtend)
    assert method.target_length(shape(trained)) >= target
    if trained >= 8:
        window, advised = trained // 4, 2 * trained / 3
        assert method.window == window
        assert window + (target - window) / method.group <= advised * (1 + 1e-12)
        assert method.group <= 2 or window + (target - window) / (method.group - 1) > advised * (1 - 1e-12)


def test_a_reach_is_the_longest_text_with_trained_distances() -> None:
    for name, parameters in (
        ("self_extend", {"group": 3, "window": 8}), ("rerope", {"window": 8, "leak": 2.5}),
        ("string", {"shift": 20, "local": 4}),
    ):  # fmt: skip
        method = rx.encoding(name, **parameters)
        assert isinstance(method, RemapEncoding)
        reach = method.target_length(shape(32))
        assert reach is not None
        keys = [torch.arange(length) for length in (reach, reach + 3)]
        within, beyond = (float(method.distance(shape(32), each[-1:], each).max()) for each in keys)
        assert within < 32 <= beyond


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    (
        "self_extend",
        {"group": 2},
        r"group=2, window=8\) reaches 56 tokens, not 256; leave its parameters out",
    ),
    ("self_extend", {"window": 64}, r"window=64 exceeds the 32 tokens .*; use window=32 or less"),
    ("self_extend", {"window": 32}, r"reaches 32 tokens, not 256; leave its parameters out"),
    ("rerope", {"window": 33}, r"window=33 exceeds the 32 tokens"),
    ("rerope", {"leak": 3.0}, r"window=8, leak=3\) reaches 80 tokens, not 256; leave its parameters out"),
    ("string", {}, r"reaches 62 tokens, not 256; .* or use self_extend"),
    ("string", {"shift": 3, "local": 4}, r"local=4 exceeds shift=3.*use local=3 or less"),
    ("jet_long", {"window": 40}, r"window=40 exceeds the 32 tokens"),
    ("sinks", {"window": 32}, r"sinks \+ window=36 exceeds the 32 tokens"),
    ("dual_chunk", {"chunk": 32}, r"chunk \+ local=36 exceeds the 32 tokens"),
    ("near_far", {"window": 33}, r"window=33 exceeds the 32 tokens"),
    ("near_far", {"far": "yarrn"}, r"no encoding is named 'yarrn'. Did you mean 'yarn'\?"),
    ("near_far", {"far": "sinks"}, r"far cannot be sinks, which has other regions.*; use a schedule such as"),
    ("near_far", {"far": "near_far"}, r"far cannot be near_far, which has near pairs and a temp.*; use a"),
    ("near_far", {"far": "xpos"}, r"far cannot be xpos, which makes near pairs lose weight too"),
    ("near_far", {"near": "dynamic_ntk"}, r"near must be one static table.*its table depends on the length"),
    ("near_far", {"far": {"name": "yarn", "factor": 2.0}}, r"reaches 64 tokens, not 256"),
    ("near_far(alibi)", {}, r"alibi is not a rotary method"),
    ("near_far(yarn)", {"chunk": 4}, r"unknown parameter 'chunk'; it takes factor, beta_fast"),
    ("resonance(near_far)", {}, r"resonance: inner must be a schedule of frequencies, but near_far"),
    ("abf(yarn)", {}, r"abf takes no method inside it; those that do: .*near_far.*resonance"),
]


@pytest.mark.parametrize(("name", "parameters", "message"), MISTAKES)
def test_mistakes_say_what_to_do(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(rx.RopeExtendError, match=message):
        for_target(name, 32, 256, **parameters)


COMPOSED = ("near_far", "near_far(dynamic_yarn)", "near_far(jet_long)", "near_far(resonance(yarn))")


@pytest.mark.parametrize("name", [*NAMES, *COMPOSED])
def test_a_method_is_stored_and_read_exactly(name: str) -> None:
    method = for_target(name, 32, 60)
    assert rx.Encoding.from_dict(method.to_dict()) == method
    assert method.remaps
    assert "distant pairs" in method.why_not_one_table(shape(32))


def test_near_and_far_from_the_target_length() -> None:
    """The window as in Jet-Long, YaRN for the target, and parameters go to the encoding that has them."""
    assert for_target("near_far", 32, 256) == rx.encoding(
        "near_far", far=rx.encoding("yarn", factor=8.0), window=16
    )
    assert for_target("near_far", 32_768, 262_144).borders == Bands(2048)
    for far, border in (("self_extend", 8), ("rerope", 8), ("jet_long", 9)):
        inner = for_target(far, 32, 256)
        assert for_target(f"near_far({far})", 32, 256) == rx.encoding("near_far", far=inner, window=border)
    method = for_target("near_far(yarn)", 32, 256, window=5, beta_fast=16.0)
    assert str(method) == "near_far(yarn(factor=8, beta_fast=16), window=5)"
    assert method.target_length(shape(32)) == 256
    both = for_target("near_far", 32, 256, near="ntk", far="dynamic_ntk")
    assert str(both) == "near_far(dynamic_ntk(factor=8), window=16, near=ntk(factor=8))"
