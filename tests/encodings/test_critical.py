"""Closed forms with a moved critical pair: published indices, plain floats, and stock transformers."""

from __future__ import annotations

import math

import pytest
import torch
from cases import FLOAT32, stock
from hypothesis import given
from hypothesis import strategies as st

import rope_extend as rx
from rope_extend.encodings import NTK, YaRN, critical_range

LLAMA3 = rx.RopeShape(128, 5e5, 8192)

shapes = st.builds(
    rx.RopeShape,
    dim=st.integers(4, 128).map(lambda n: 2 * n),
    theta=st.floats(1e3, 1e7),
    trained_length=st.integers(256, 65_536),
)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (LLAMA3, (24, 35)),
        (rx.RopeShape(96, 1e4, 2048), (19, 31)),  # Phi-3-mini
        (rx.RopeShape(128, 1e4, 4096), (30, 46)),  # Llama 2
    ],
)
def test_critical_pairs_are_those_of_longrope2(shape: rx.RopeShape, expected: tuple[int, int]) -> None:
    assert critical_range(shape) == expected


@given(shape=shapes)
def test_the_critical_pair_is_the_first_with_at_most_one_turn(shape: rx.RopeShape) -> None:
    periods = [2 * math.pi * shape.theta ** (2 * i / shape.dim) for i in range(shape.dim // 2)]
    for count, pair in zip((10, 1), critical_range(shape), strict=True):
        # A period that is equal to the window but for rounding may count either way.
        few = [i for i, period in enumerate(periods) if period * count >= shape.trained_length * (1 - 1e-9)]
        expected = max(1, few[0]) if few else len(periods) - 1
        assert pair in (expected, min(expected + 1, len(periods) - 1)) or not few
        assert abs(pair - expected) <= (abs(periods[expected] * count / shape.trained_length - 1) < 1e-6)


@pytest.mark.parametrize("critical", [24, 30, 35, "theoretical"])
def test_ntk_with_a_critical_pair_meets_the_factor_there(critical: int | str) -> None:
    encoding, pair = NTK(16.0, critical=critical), 35 if critical == "theoretical" else int(critical)
    table = encoding.inv_freq(LLAMA3)
    for i in range(64):
        divisor = 16.0 ** min(1.0, i / pair)
        assert float(table[i]) == pytest.approx(5e5 ** (-i / 64) / divisor, rel=1e-12)
    form = encoding.rope_parameters(LLAMA3)
    assert form["rope_type"] == "longrope"
    assert form["long_factor"] == form["short_factor"]


def test_without_a_critical_pair_the_methods_are_as_published() -> None:
    assert torch.equal(NTK(4.0).inv_freq(LLAMA3), LLAMA3.inv_freq(5e5 * 4.0 ** (128 / 126)))
    assert "critical" not in NTK(4.0).to_dict() | YaRN(4.0).to_dict()
    assert torch.equal(YaRN(4.0).inv_freq(LLAMA3), YaRN(4.0, critical="theoretical").inv_freq(LLAMA3))


@pytest.mark.parametrize("truncate", [True, False])
@given(shape=shapes, pair=st.integers(1, 64), factor=st.floats(1.5, 64))
def test_yarn_with_a_critical_pair_divides_from_there_on(
    truncate: bool, shape: rx.RopeShape, pair: int, factor: float
) -> None:
    encoding = YaRN(factor, critical=pair, truncate=truncate)
    start = shape.dim * math.log(shape.trained_length / (32 * 2 * math.pi)) / (2 * math.log(shape.theta))
    low = max(0, math.floor(start) if truncate else start)
    if pair >= shape.dim // 2 or pair <= low:
        with pytest.raises(rx.RopeExtendError, match="critical"):
            encoding.inv_freq(shape)
        return
    divisors = shape.inv_freq() / encoding.inv_freq(shape)
    for i, divisor in enumerate(divisors.tolist()):
        ramp = min(1.0, max(0.0, (i - low) / (pair - low)))
        assert divisor == pytest.approx(1 / (ramp / factor + 1 - ramp), rel=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_stock_yarn_computes_the_same_table(truncate: bool) -> None:
    encoding = YaRN(16.0, critical=30, truncate=truncate)
    table, factor = stock(**encoding.rope_parameters(LLAMA3))(LLAMA3, 131_072)
    torch.testing.assert_close(
        torch.tensor(table, dtype=torch.float64), encoding.inv_freq(LLAMA3), rtol=FLOAT32, atol=0
    )
    assert factor == pytest.approx(encoding.attention_factor(LLAMA3))
    read = YaRN.from_rope_parameters(encoding.rope_parameters(LLAMA3))
    assert read is not None
    torch.testing.assert_close(read.inv_freq(LLAMA3), encoding.inv_freq(LLAMA3), rtol=1e-12, atol=0)
