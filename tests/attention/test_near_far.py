"""One encoding for near pairs and another one for distant pairs: written out, and equal to its instances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import LENGTH, batch, in_parts, logits, tokens
from cases import TARGET, TRAINED, llama, stock
from test_attention import PLAIN, naive_llama
from tolerances import assert_same_but_rounding

import rope_extend as rx
from rope_extend.encodings import NearFar, RopeShape

SHAPE = RopeShape(16, 10_000.0, TRAINED)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_two_schedules_equal_both_written_out(implementation: str) -> None:
    """A larger base for near pairs and YaRN for the others, with its factor for queries that have such."""
    model, window = llama(head_dim=16, attn_implementation=implementation), 9
    yarn, factor = stock("yarn", factor=4.0)(SHAPE, TARGET)
    larger = [(10_000 * 2 ** (16 / 14)) ** (-i / 8) for i in range(8)]

    def rotation(query: int, position: int) -> tuple[list[float], float]:
        distance = query - position
        table = larger if distance < window else yarn
        return [-distance * frequency for frequency in table], factor if query >= window else 1.0

    expected = naive_llama(model, tokens(1, 40)[0], rotation)
    far, near = rx.encoding("yarn", factor=4.0), rx.encoding("ntk", factor=2.0)
    method = rx.encoding("near_far", far=far, near=near, window=window)
    with rx.patch_model(model, method):
        assert_same_but_rounding(logits(model, tokens(1, 40))[0].double(), expected)
        short = logits(model, tokens(1, 7))[0].double()  # all pairs are near, and not plain
    assert_same_but_rounding(short, naive_llama(model, tokens(1, 7)[0], rotation))


@pytest.mark.parametrize(
    ("far", "parameters", "window"),
    [
        ("jet_long", {"near": 5, "window": 16}, 6),
        ("self_extend", {"group": 4, "window": 8}, 8),
        ("rerope", {"window": 8}, 8),
        ("string", {"shift": 12, "local": 4}, 12),
    ],
)
def test_methods_with_one_border_are_instances(far: str, parameters: dict[str, Any], window: int) -> None:
    """Jet-Long above all: bit for bit, in a batch with padding and under a cache, and within the window."""
    model, data, inner = llama(head_dim=16), batch(), rx.encoding(far, **parameters)
    results = []
    for method in (inner, rx.encoding("near_far", far=inner, window=window)):
        with rx.patch_model(model, method, target_length=TARGET):
            whole, parts = logits(model, **data), in_parts(model, data, [40, 78, 79, LENGTH])
            results.append([whole, parts, logits(model, tokens(1, 9))])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_a_far_table_that_is_still_plain_leaves_texts_as_they_are() -> None:
    """Up to the end of the trained window, where the far table changes, or while all pairs are near."""
    for far in ("dynamic_yarn", "dynamic_ntk", "short_original(yarn)", "jet_long"):
        method = rx.encodings.rotary_method("near_far").for_target(SHAPE, TARGET, far=far)
        assert isinstance(method, NearFar)
        longest = max(n for n in range(1, 80) if method.is_plain(SHAPE, 0, n - 1))
        assert far == "jet_long" or method.factor_of_queries(SHAPE, torch.arange(longest)) is None
        assert longest == TRAINED
    static = rx.encodings.rotary_method("near_far").for_target(SHAPE, TARGET)
    assert isinstance(static, NearFar)
    assert [static.is_plain(SHAPE, 0, last) for last in (static.window - 1, static.window)] == [True, False]


def test_a_later_part_of_another_encoding_is_not_taken_for_plain() -> None:
    """The far part of SelfExtend changes pairs that SelfExtend itself would call near."""
    far = rx.encoding("self_extend", group=2, window=20)
    method = rx.encoding("near_far", far=far, window=4)
    assert isinstance(method, NearFar)
    assert far.is_plain(SHAPE, 0, 9)
    assert not method.is_plain(SHAPE, 0, 9)
    model, input_ids = llama(head_dim=16), tokens(1, 10)

    def rotation(query: int, position: int) -> tuple[list[float], float]:
        distance = query - position
        given = distance if distance < 4 else query // 2 + 10 - position // 2
        return [-given * frequency for frequency in PLAIN], 1.0

    with rx.patch_model(model, method):
        found = logits(model, input_ids)[0].double()
    assert_same_but_rounding(found, naive_llama(model, input_ids[0], rotation))
