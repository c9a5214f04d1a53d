"""Attention in parts without a mask: each part and their merge against dense attention in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import rounding
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rope_extend.attention import log_sum_exp
from rope_extend.attention.log_sum_exp import merge_partials, partial_attention

SCALE = 0.3


def states(
    heads: tuple[int, int], tokens: tuple[int, int], widths: tuple[int, int], seed: int
) -> list[Tensor]:
    """Query, key and value of two rows, float64."""
    make = torch.Generator().manual_seed(seed)
    sizes = [
        (heads[0], tokens[0], widths[0]),
        (heads[1], tokens[1], widths[0]),
        (heads[1], tokens[1], widths[1]),
    ]
    return [torch.randn(2, *size, dtype=torch.float64, generator=make) for size in sizes]


def dense(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax over all logits, or over those of the keys that each query sees."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    logits = SCALE * torch.einsum("bhqd,bhkd->bhqk", query, key)
    if seen is not None:
        logits = torch.where(seen, logits, -math.inf)
    return torch.einsum("bhqk,bhkd->bhqd", logits.softmax(-1), value), logits.logsumexp(-1)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, terms: int) -> None:
    bound = rounding(dtype, terms, max(1.0, float(expected.abs().max())))
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


class EqualHeads(TorchDispatchMode):
    """Up to torch 2.8, the kernel of a CPU misreads keys that several heads share."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "flash" not in str(func) or len({part.shape[1] for part in args[:3]}) == 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["kernel", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel, and as on devices that have none."""
    if request.param == "plain":
        monkeypatch.setattr(log_sum_exp, "_has_kernel", lambda *_: False)


LAYOUTS = st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.sampled_from([4, 6, 16])
)


@pytest.mark.usefixtures("way")
@given(LAYOUTS, st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_a_part_equals_dense_attention(layout: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    kv_heads, groups, queries, keys, width = layout
    keys = queries if causal else keys
    exact = states((kv_heads * groups, kv_heads), (queries, keys), (width, 8), seed=keys)
    rounded = [part.to(dtype) for part in exact]
    with EqualHeads():
        output, sums = partial_attention(*rounded, causal=causal, scale=SCALE)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril() if causal else None
    expected, expected_sums = dense(*(part.double() for part in rounded), seen)
    assert (output.dtype, sums.dtype) == (dtype, dtype)
    assert_near(output, expected, dtype, keys * width)
    assert_near(sums, expected_sums, dtype, keys * width)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.sampled_from([torch.float32, torch.bfloat16]))
def test_parts_merge_to_attention_over_all_keys(sizes: list[int], dtype: torch.dtype) -> None:
    """Sets without keys count as nothing, also if all are empty."""
    exact = states((4, 2), (7, sum(sizes)), (16, 16), seed=sum(sizes))
    query, key, value = (part.to(dtype) for part in exact)
    output, sums = torch.zeros(2, 4, 7, 16), torch.full((2, 4, 7), -math.inf)
    for part in zip(key.split(sizes, dim=2), value.split(sizes, dim=2), strict=True):
        output, sums = merge_partials(
            (output, sums), partial_attention(query, *part, causal=False, scale=SCALE)
        )
    assert (output.dtype, sums.dtype) == (torch.float32, torch.float32)
    if sum(sizes) == 0:
        assert (output == 0).all()
        assert (sums == -math.inf).all()
        return
    expected, expected_sums = dense(*(part.double() for part in (query, key, value)))
    assert_near(output, expected, dtype, sum(sizes) * 16)
    assert_near(sums, expected_sums, dtype, sum(sizes) * 16)  # kernels approximate exp in bfloat16


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("widths", [(16, 16), (16, 8), (8, 12)])
@pytest.mark.parametrize(("heads", "dtype"), [((4, 2), torch.float64), ((2, 2), torch.float32)])
def test_gradients_through_the_merge_equal_those_of_dense_attention(
    heads: tuple[int, int], dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    """Of a square of causal attention and a part that sees all its keys, merged; one query sees no more."""
    sizes, total = (9, 5), 14
    exact = states(heads, (9, total), widths, seed=3)
    leaves = [part.to(dtype).requires_grad_() for part in exact]
    query, key, value = leaves
    (k1, k2), (v1, v2) = key.split(sizes, dim=2), value.split(sizes, dim=2)
    one = partial_attention(query, k1, v1, causal=True, scale=SCALE)
    two = partial_attention(query, k2, v2, causal=False, scale=SCALE)
    nothing = partial_attention(query, key[:, :, :0], value[:, :, :0], causal=False, scale=SCALE)
    output, sums = merge_partials(merge_partials(one, two), nothing)
    wished = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    (output * wished.to(dtype)).sum().backward(retain_graph=True)
    (0.7 * sums.sum()).backward()

    dense_leaves = [part.detach().double().requires_grad_() for part in leaves]
    seen = torch.ones(9, total, dtype=torch.bool).tril() | (torch.arange(total) >= 9)
    output, sums = dense(*dense_leaves, seen)
    ((output * wished).sum() + 0.7 * sums.sum()).backward()
    for leaf, expected in zip(leaves, dense_leaves, strict=True):
        assert leaf.grad is not None and expected.grad is not None  # noqa: PT018
        assert_near(leaf.grad, expected.grad, dtype, total * 16)


def test_gradients_in_bfloat16_lose_no_more_than_its_own_rounding() -> None:
    """The gradient of the log-sum-exp is carried with the precision of float32."""
    leaves = [part.to(torch.bfloat16).requires_grad_() for part in states((2, 1), (12, 12), (16, 16), seed=5)]
    _, sums = partial_attention(*leaves, causal=True, scale=SCALE)
    (1000 * sums).sum().backward()
    exact = [part.detach().double().requires_grad_() for part in leaves]
    (1000 * dense(*exact, torch.ones(12, 12, dtype=torch.bool).tril())[1]).sum().backward()
    for leaf, expected in zip(leaves[:2], exact[:2], strict=True):
        assert leaf.grad is not None and expected.grad is not None  # noqa: PT018
        assert_near(leaf.grad / 1000, expected.grad / 1000, torch.bfloat16, 12)


def test_causal_attention_is_square() -> None:
    query, key, value = states((1, 1), (3, 4), (8, 8), seed=0)
    with pytest.raises(ValueError, match="3 queries to 4 keys is not square"):
        partial_attention(query, key, value, causal=True, scale=SCALE)


def test_autocast_computes_in_its_own_dtype() -> None:
    query, key, value = (part.float() for part in states((2, 1), (6, 6), (8, 8), seed=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, sums = partial_attention(query, key.bfloat16(), value, causal=True, scale=SCALE)
    assert (output.dtype, sums.dtype) == (torch.bfloat16, torch.float32)
