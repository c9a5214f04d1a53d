"""Encodings as values: validation, round trips, and the properties the formulas promise."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from cases import ENCODINGS, EncodingCase
from hypothesis import given
from hypothesis import strategies as st

import rope_extend as rx
from rope_extend.encodings import RopeEncoding, RopeShape, ScaledRope, encoding_class
from rope_extend.encodings.base import MAX_FACTOR, Encoding

SHAPES = st.builds(
    RopeShape,
    dim=st.integers(2, 64).map(lambda half: 2 * half),
    theta=st.floats(100, 1e8),
    trained_length=st.integers(16, 2**20),
)
FACTORS = st.floats(1, 1024)
SCALED = sorted(name for name in rx.encodings() if issubclass(encoding_class(name), ScaledRope))
BAD_NUMBERS = [math.nan, math.inf, -math.inf, 0, -1, -8.0, True, "8", None, [8], 8j, 1e30, 0.5]


@pytest.fixture(params=ENCODINGS, ids=str)
def case(request: pytest.FixtureRequest) -> EncodingCase:
    return request.param


def test_round_trip_hash_and_immutability(case: EncodingCase) -> None:
    made = rx.encoding(case.name, **case.parameters)
    again = Encoding.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert hash(again) == hash(made)
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.name in str(made)
    if made.parameters():
        with pytest.raises(FrozenInstanceError):
            setattr(made, made.parameters()[0], 2.0)


def test_native_rope_parameters_round_trip(case: EncodingCase) -> None:
    made = rx.encoding(case.name, **case.parameters)
    assert isinstance(made, RopeEncoding)
    shape = RopeShape(64, 10_000.0, 4096)
    if not case.reloads:
        with pytest.raises(rx.RopeExtendError, match="no form that stock transformers can load"):
            made.rope_parameters(shape)
        return
    parameters = made.rope_parameters(shape)
    assert parameters["rope_theta"] is not None
    if made.rope_type is not None:
        assert RopeEncoding.from_rope_parameters(parameters) == made


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("factor", BAD_NUMBERS, ids=repr)
def test_bad_factors_are_refused(name: str, factor: Any) -> None:
    with pytest.raises(rx.RopeExtendError, match=f"{name}: factor must be a finite number") as error:
        rx.encoding(name, factor=factor)
    assert repr(factor) in str(error.value)


@pytest.mark.parametrize("value", [bad for bad in BAD_NUMBERS if bad is not None and bad != 0.5], ids=repr)
@pytest.mark.parametrize(
    ("name", "field"),
    [("yarn", "beta_fast"), ("yarn", "attention_scale"), ("llama3", "high_freq_factor"), ("abf", "theta")],
)
def test_other_bad_numbers_are_refused(name: str, field: str, value: Any) -> None:
    others = {} if name == "abf" else {"factor": 8.0}
    with pytest.raises(rx.RopeExtendError, match=field):
        rx.encoding(name, **others, **{field: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rx.encoding("yarm", factor=8.0), "Did you mean 'yarn'"),
        (lambda: rx.encoding("yarn", factr=8.0), "unknown parameter 'factr'; it takes factor"),
        (lambda: rx.encoding("yarn"), "missing factor"),
        (lambda: rx.encoding("yarn", factor=8.0, beta_fast=1.0, beta_slow=2.0), "beta_fast must exceed"),
        (lambda: rx.encoding("yarn", factor=8.0, mscale=1.0), "only act together"),
        (lambda: rx.encoding("yarn", factor=8.0, truncate="no"), "truncate must be true or false"),
        (lambda: rx.encoding("llama3", factor=8.0, low_freq_factor=4.0), "high_freq_factor must exceed"),
        (lambda: rx.encoding("ntk_by_parts", factor=8.0, alpha=40.0), "beta must exceed"),
        (lambda: rx.encoding("dynamic_yarn", beta_fast=0.5), "beta_fast must exceed"),
        (lambda: Encoding.from_dict({"factor": 8.0}), "a mapping such as"),
        (lambda: Encoding.from_dict("yarn"), "a mapping such as"),
        (lambda: RopeShape(7, 10_000.0, 64), "dim must be an even whole number"),
        (lambda: RopeShape(True, 10_000.0, 64), "dim must be an even whole number"),
        (lambda: RopeShape(8, 1.0, 64), "theta must be a finite number above 1"),
        (lambda: RopeShape(8, 1e4, 64.0), "trained_length must be a whole number"),
        (lambda: RopeShape(8, 1e4, 0), "trained_length must be between"),
        (lambda: encoding_class("ntk").for_target(RopeShape(8, 1e4, 64), 128, factor=2.0), "follows from"),
        (lambda: rx.encoding("ntk", factor=2.0).inv_freq(RopeShape(2, 1e4, 64)), "4 or more"),
    ],
)
def test_mistakes_are_explained(make: Any, message: str) -> None:
    with pytest.raises(rx.RopeExtendError, match=message):
        make()


@given(shape=SHAPES, factor=FACTORS, name=st.sampled_from(SCALED), stretch=st.floats(0.1, 4))
def test_frequencies_are_finite_positive_and_ordered(
    shape: RopeShape, factor: float, name: str, stretch: float
) -> None:
    if shape.dim < 4:
        return
    made = rx.encoding(name, factor=factor)
    length = max(1, int(stretch * factor * shape.trained_length))
    table = made.inv_freq(shape, length)
    assert table.dtype == torch.float64
    assert table.shape == (shape.dim // 2,)
    assert bool(torch.isfinite(table).all())
    assert bool((table > 0).all())
    assert bool((table.diff() <= 0).all())
    assert bool((table <= shape.inv_freq() * (1 + 1e-12)).all())
    assert made.attention_factor(shape, length) >= 1


@given(shape=SHAPES, name=st.sampled_from(SCALED))
def test_factor_one_is_the_identity(shape: RopeShape, name: str) -> None:
    made = rx.encoding(name, factor=1.0)
    if name == "dynamic_ntk":  # grows with the length even at factor 1; within the window it is the identity
        assert torch.equal(made.inv_freq(shape, shape.trained_length), shape.inv_freq())
        return
    if shape.dim >= 4:
        torch.testing.assert_close(made.inv_freq(shape), shape.inv_freq(), rtol=1e-12, atol=0)
        assert made.attention_factor(shape) == 1


@given(shape=SHAPES, factor=FACTORS)
def test_the_invariant_of_each_method(shape: RopeShape, factor: float) -> None:
    plain = shape.inv_freq()
    linear = rx.encoding("linear", factor=factor).inv_freq(shape)
    torch.testing.assert_close(linear * factor, plain, rtol=1e-12, atol=0)
    if shape.dim >= 4:
        ntk = rx.encoding("ntk", factor=factor).inv_freq(shape)
        assert ntk[0] == plain[0]
        torch.testing.assert_close(ntk[-1] * factor, plain[-1], rtol=1e-9, atol=0)
    for name in ("yarn", "llama3", "ntk_by_parts"):
        between = rx.encoding(name, factor=factor).inv_freq(shape)
        assert bool((between <= plain * (1 + 1e-12)).all())
        assert bool((between >= linear * (1 - 1e-12)).all())


@given(shape=SHAPES, factor=st.floats(1.01, 1024), name=st.sampled_from(SCALED))
def test_for_target_and_target_length_are_inverses(shape: RopeShape, factor: float, name: str) -> None:
    target = round(shape.trained_length * factor)
    cls = encoding_class(name)
    assert issubclass(cls, RopeEncoding)
    assert cls.for_target(shape, target).target_length(shape) == target


def test_abf_finds_the_critical_base() -> None:
    # Llama 2 read at 32k: 2310.05209 gives 10000^(ln(32768/2pi)/ln(4096/2pi)).
    shape = RopeShape(128, 10_000.0, 4096)
    made = rx.encodings() and encoding_class("abf").for_target(shape, 32_768)
    expected = 10_000 ** (math.log(32_768 / (2 * math.pi)) / math.log(4096 / (2 * math.pi)))
    assert made.to_dict()["theta"] == pytest.approx(expected, rel=1e-12)
    # At that base the slowest channel that turned once within 4,096 tokens turns once within 32,768.
    assert math.log(expected) / math.log(10_000) == pytest.approx(1.32, abs=0.01)


def test_a_published_attention_factor() -> None:
    # YaRN, equation 15 and table 2: s = 16 gives sqrt(1/t) = 0.1 ln 16 + 1 = 1.277.
    assert rx.encoding("yarn", factor=16.0).attention_factor(RopeShape(128, 1e4, 4096)) == pytest.approx(
        1.277, abs=5e-4
    )


def test_a_schedule_without_stock_form_travels_as_longrope() -> None:
    shape = RopeShape(16, 10_000.0, 64)
    for name in ("linear", "yarn", "llama3", "ntk"):
        made = rx.encoding(name, factor=8.0)
        assert isinstance(made, RopeEncoding)
        form = made.longrope_parameters(shape)
        factors = torch.tensor(form["long_factor"], dtype=torch.float64)
        torch.testing.assert_close(shape.inv_freq() / factors, made.inv_freq(shape))
        assert form["short_factor"] == form["long_factor"]
    with pytest.raises(rx.RopeExtendError, match="no form"):
        rx.encoding("dynamic_ntk", factor=8.0).longrope_parameters(shape)


def test_the_largest_factor_is_accepted() -> None:
    assert rx.encoding("linear", factor=MAX_FACTOR).to_dict()["factor"] == MAX_FACTOR


def test_two_encodings_cannot_share_a_name() -> None:
    with pytest.raises(TypeError, match="two encodings are named 'linear'"):
        type("Another", (Encoding,), {"name": "linear"})
