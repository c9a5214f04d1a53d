"""Encodings as values: validation, round trips, and the properties that the formulas promise."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from cases import ENCODINGS, FLOAT32, YARN, EncodingCase, divisors, stock
from hypothesis import given
from hypothesis import strategies as st

import rope_extend as rx
from rope_extend import encodings
from rope_extend.encodings import (
    ComposedRope,
    RopeEncoding,
    RopeShape,
    ScaledRope,
    encoding_class,
    encoding_classes,
    method_named,
    rotary_method,
)
from rope_extend.encodings.core.encoding import Encoding
from rope_extend.method_names import method_names

SHAPES = st.builds(
    RopeShape,
    dim=st.integers(2, 64).map(lambda half: 2 * half),
    theta=st.floats(100, 1e8),
    trained_length=st.integers(16, 2**20),
)
FACTORS = st.floats(1, 1024)
SCALED = sorted(
    name
    for name in rx.encoding_names()
    if issubclass(cls := encoding_class(name), ScaledRope) and cls.required() == ["factor"]
)
COMPOSED = sorted(name for name in rx.encoding_names() if issubclass(encoding_class(name), ComposedRope))
ZEROS = {"clipped", "drope", "nope", "p_rope", "truncated"}
"""The methods in which a channel may have frequency zero."""
SHAPE = RopeShape(64, 10_000.0, 4096)
PHI3 = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 4096,
    "short_factor": divisors(SHAPE, 2.84), "long_factor": divisors(SHAPE, 64.84),
}  # fmt: skip
"""The form of Phi-3's checkpoints, which compute the factor from config.max_position_embeddings."""


@pytest.fixture(params=ENCODINGS, ids=str)
def case(request: pytest.FixtureRequest) -> EncodingCase:
    return request.param


def rotary(name: str, **parameters: Any) -> RopeEncoding:
    made = rx.encoding(name, **parameters)
    assert isinstance(made, RopeEncoding)
    return made


@pytest.mark.parametrize(
    "shape",
    [RopeShape(16, 10_000.0, 32), SHAPE, RopeShape(128, 500_000.0, 8192), RopeShape(8, 25_000.0, 1000)],
    ids=str,
)
def test_tables_equal_the_oracle(case: EncodingCase, shape: RopeShape) -> None:
    made, trained = case.build(shape), shape.trained_length
    for length in (trained // 2, trained, trained + 1, 3 * trained + 5, 20 * trained):
        table, factor = case.oracle(shape, length)
        expected = torch.tensor(table, dtype=torch.float64)
        torch.testing.assert_close(made.inv_freq(shape, length), expected, rtol=case.tolerance, atol=0)
        assert made.attention_factor(shape, length) == pytest.approx(factor, rel=1e-12)
    if made.depends_on_length:  # without a length: the table of the trained window
        assert torch.equal(made.inv_freq(shape), made.inv_freq(shape, trained))


def test_round_trip_hash_and_immutability(case: EncodingCase) -> None:
    made = case.build(SHAPE)
    again = Encoding.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert hash(again) == hash(made)
    assert pickle.loads(pickle.dumps(made)) == made
    assert str(again) == str(made)
    assert str(made).startswith(made.name)
    if made.parameters():
        with pytest.raises(FrozenInstanceError):
            setattr(made, made.parameters()[0], 2.0)


def test_native_rope_parameters_round_trip(case: EncodingCase) -> None:
    made = case.build(SHAPE)
    if not case.reloads:
        with pytest.raises(rx.RopeExtendError, match="no form that stock transformers can load"):
            made.rope_parameters(SHAPE)
        return
    parameters = made.rope_parameters(SHAPE)
    assert parameters["rope_theta"] is not None
    again = RopeEncoding.from_rope_parameters(json.loads(json.dumps(parameters)))
    assert again is not None
    if parameters["rope_type"] == made.rope_type:
        assert again == made
    elif parameters["rope_type"] == "longrope":
        torch.testing.assert_close(again.inv_freq(SHAPE, 10**6), made.inv_freq(SHAPE), rtol=1e-12, atol=0)
        assert again.attention_factor(SHAPE) == made.attention_factor(SHAPE)
        if made.target_length(SHAPE) is not None:  # the form states a window, which NoPE does not have
            assert again.target_length(SHAPE) == made.target_length(SHAPE)
        assert not again.depends_on_length


@pytest.mark.parametrize("cls", encoding_classes().values(), ids=lambda cls: cls.name)
def test_every_parameter_states_its_values(cls: type[Encoding]) -> None:
    """So a wrong value is refused when the encoding is made: of another type, or out of range."""
    examples = {"factor": 8.0, "long_factor": [2.0], "theta": 1e6, "far": YARN}
    others = {name: examples.get(name, 8) for name in cls.required()}
    for name in cls.parameters():
        for bad in (object(), "many", math.nan, -math.inf, -1):
            with pytest.raises(rx.RopeExtendError, match=f"{cls.name}: {name} must be"):
                rx.encoding(cls.name, **{**others, name: bad})


XPOS = {"name": "xpos"}
MISTAKES: list[tuple[Any, str]] = [
    ({"name": "yarm", "factor": 8.0}, "Did you mean 'yarn'"),
    ({"name": "yarn", "factr": 8.0}, "unknown parameter 'factr'; it takes factor"),
    ({"name": "yarn"}, "missing factor"),
    ({"name": "yarn", "factor": 8.0, "beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast must exceed"),
    ({"name": "yarn", "factor": 8.0, "mscale": 1.0}, "only act together"),
    ({"name": "yarn", "factor": 8.0, "ramp": "log"}, "ramp must be one of index, turns; got 'log'"),
    ({"name": "yarn", "factor": 8.0, "ramp": "turns", "truncate": False}, "truncate=False has no effect"),
    ({"name": "yarn", "factor": 8.0, "ramp": "turns", "critical": 3}, "leave out ramp='turns' and beta_slow"),
    ({"name": "dynamic_yarn", "beta_fast": 0.5}, "beta_fast must exceed"),
    ({"name": "longrope", "factor": 8.0, "long_factor": []}, "must be a list of numbers"),
    ({"name": "longrope", "factor": 8.0, "long_factor": [1.0, 0.0]}, r"long_factor\[1\] must be"),
    ({"name": "longrope", "factor": 8, "long_factor": [2], "short_factor": [1, 1]}, "got 2 and 1"),
    (lambda: rotary("longrope", factor=8.0, long_factor=[2.0] * 48).inv_freq(SHAPE), "has 48 .* rotates 32"),
    (
        lambda: rotary("longrope", factor=8.0, long_factor=[2.0]).attention_factor(RopeShape(2, 1e4, 1)),
        "trained window of 1 token",
    ),
    ({"name": "clipped", "channels": True}, "channels must be a whole number.* got True"),
    (lambda: rotary("clipped", channels=40).inv_freq(SHAPE), "channels is 40, but .* rotates 32"),
    ({"name": "truncated", "keep_above": 0.1, "between": 0.2}, "must not exceed keep_above"),
    (lambda: rotary("truncated", zero_below=0.1).inv_freq(SHAPE), "must not exceed keep_above"),
    (lambda: rotary("logn").logit_scale(RopeShape(8, 1e4, 1), torch.arange(2)), "2 or more tokens"),
    ({"name": "logn", "inner": "yarn"}, "inner must be a rotary schedule"),
    ({"name": "short_original", "inner": XPOS}, "give a schedule without xpos"),
    ({"name": "short_original", "inner": {"name": "logn", "inner": XPOS}}, "without xpos"),
    ({"name": "learned", "beyond": "interpolate"}, "the window to extend to; got length=None"),
    ({"name": "learned", "length": 64}, "takes no length; leave it out; got length=64"),
    ({"name": "learned", "rows": 64, "beyond": "fresh", "length": 64}, "length must exceed the 64 rows"),
    *[
        ({"name": "linear_attention", "inner": inner}, "linear_attention: ")
        for inner in ("yarn", {"name": "dynamic_ntk", "factor": 8.0}, XPOS, {"name": "alibi"})
    ],
    ({"factor": 8.0}, "a mapping such as"),
    ("yarn", "a mapping such as"),
    (lambda: RopeShape(7, 10_000.0, 64), "dim must be an even number"),
    (lambda: RopeShape(8, 1e4, 64.0), "trained_length must be a whole number"),
    (lambda: encoding_class("ntk").for_target(RopeShape(8, 1e4, 64), 128, factor=2.0), "follows from"),
    (lambda: rotary("ntk", factor=2.0).inv_freq(RopeShape(2, 1e4, 64)), "4 or more"),
    (lambda: rotary("ntk", factor=2.0, critical=32).inv_freq(SHAPE), "0 to 31; the theoretical"),
    (lambda: rotary("yarn", factor=2.0, critical=1).inv_freq(SHAPE), "critical must be above the pair where"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_mistakes_are_explained(make: Any, message: str) -> None:
    with pytest.raises(rx.RopeExtendError, match=message):
        make() if callable(make) else Encoding.from_dict(make)


@given(shape=SHAPES, case=st.sampled_from(ENCODINGS), stretch=st.floats(0.1, 40))
def test_every_row_is_finite_and_ordered(shape: RopeShape, case: EncodingCase, stretch: float) -> None:
    if shape.dim < 6:
        return
    made, length = case.build(shape), max(1, int(stretch * shape.trained_length))
    table = made.inv_freq(shape, length)
    assert table.dtype == torch.float64
    assert table.shape == (shape.dim // 2,)
    assert torch.isfinite(table).all()
    assert ((table >= 0) if made.name in ZEROS else (table > 0)).all()
    assert (table.diff() <= 0).all()
    assert made.attention_factor(shape, length) >= 1


@given(shape=SHAPES, name=st.sampled_from(SCALED))
def test_factor_one_is_the_identity(shape: RopeShape, name: str) -> None:
    made = rotary(name, factor=1.0)
    if name == "drope":  # removes the rotation at any factor; at 1 it scales nothing
        assert made.logit_scale(shape, torch.arange(4)) is None
        return
    if name == "dynamic_ntk":  # changes with the length even at factor 1; the identity within the window
        assert torch.equal(made.inv_freq(shape, shape.trained_length), shape.inv_freq())
        return
    if shape.dim >= 4:
        torch.testing.assert_close(made.inv_freq(shape), shape.inv_freq(), rtol=1e-12, atol=0)
        assert made.attention_factor(shape) == 1


@given(shape=SHAPES, factor=st.floats(1.01, 1024), name=st.sampled_from(SCALED))
def test_for_target_and_target_length_are_inverses(shape: RopeShape, factor: float, name: str) -> None:
    target = round(shape.trained_length * factor)
    cls = encoding_class(name)
    assert issubclass(cls, RopeEncoding)
    assert cls.for_target(shape, target).target_length(shape) == target


@given(shape=SHAPES, name=st.sampled_from(COMPOSED))
def test_what_goes_around_another_keeps_what_it_does_not_change(shape: RopeShape, name: str) -> None:
    inside = rotary("yarn", factor=4.0)
    made = rotary(name, inner=inside)
    assert made == Encoding.from_dict({"name": name, "inner": inside.to_dict()})
    assert str(made) == f"{name}(yarn(factor=4))"
    assert made.target_length(shape) == 4 * shape.trained_length
    assert made.attention_factor(shape, 2**30) == inside.attention_factor(shape)


def test_composed_by_name() -> None:
    made = rotary_method("p_rope(resonance(linear))").for_target(SHAPE, 8192, fraction=0.5)
    assert str(made) == "p_rope(resonance(linear(factor=2)), fraction=0.5)"
    inside = rotary("resonance", inner=rotary("linear", factor=2.0)).inv_freq(SHAPE)
    assert torch.equal(made.inv_freq(SHAPE)[:16], inside[:16])
    assert not made.inv_freq(SHAPE)[16:].any()


def test_longrope_reads_phi3() -> None:
    made = RopeEncoding.from_rope_parameters(PHI3, 131_072)
    assert made is not None
    assert made.to_dict() == {
        "name": "longrope", "factor": 32.0, "start_tokens": 0,
        "long_factor": PHI3["long_factor"], "short_factor": PHI3["short_factor"],
    }  # fmt: skip
    assert made.attention_factor(SHAPE) == pytest.approx(math.sqrt(17 / 12), rel=1e-12)  # ln 32 / ln 4096
    assert RopeEncoding.from_rope_parameters(PHI3) is None  # the factor is missing
    stated = RopeEncoding.from_rope_parameters({**PHI3, "attention_factor": 1.25})
    assert stated is not None
    assert stated.attention_factor(SHAPE) == 1.25
    assert torch.equal(stated.inv_freq(SHAPE, 9000), made.inv_freq(SHAPE, 9000))
    assert stated.target_length(SHAPE) == round(64.84 * 4096)


def test_lists_of_ones_and_equal_lists_are_static() -> None:
    ones = rotary("longrope", factor=2.0, long_factor=[2.0, 3.0], short_factor=(1, 1))
    assert ones == rotary("longrope", factor=2.0, long_factor=(2.0, 3.0))
    assert "short_factor" not in ones.to_dict()
    stock_form = ones.rope_parameters(RopeShape(4, 10_000.0, 64))  # stock transformers requires both lists
    assert (stock_form["short_factor"], stock_form["long_factor"]) == ([1.0, 1.0], [2.0, 3.0])
    for lists in ({"long_factor": [1.0, 1.0]}, {"long_factor": [2.0, 3.0], "short_factor": [2.0, 3.0]}):
        made = rotary("longrope", factor=2.0, **lists)
        assert not made.depends_on_length
        assert not pickle.loads(pickle.dumps(made)).rotates_in_attention


def test_the_end_of_yarns_ramp_is_bounded_by_channels_rather_than_pairs() -> None:
    """If the slowest pair turns more than once, the ramp ends beyond it, as in YaRN's code."""
    shape = RopeShape(64, 10_000.0, 65_536)
    table, _ = stock("yarn")(shape, 8 * 65_536)
    expected = torch.tensor(table, dtype=torch.float64)
    torch.testing.assert_close(rotary("yarn", factor=8.0).inv_freq(shape), expected, rtol=FLOAT32, atol=0)
    # By hand: the pair that turns once is 64 ln(65536 / 2 pi) / (2 ln 10000) = 32.14, beyond the last, 31.
    low = math.floor(64 * math.log(65_536 / (32 * 2 * math.pi)) / (2 * math.log(10_000)))
    ramp = (31 - low) / (33 - low)
    assert expected[31].item() == pytest.approx(10_000 ** (-31 / 32) * (ramp / 8 + 1 - ramp), rel=FLOAT32)


def test_a_table_may_be_truncated_at_given_frequencies() -> None:
    given = rotary("truncated", keep_above=0.5, zero_below=0.005, between=0.02)
    assert given.inv_freq(RopeShape(8, 10_000.0, 64)).tolist() == [1.0, 0.02, 0.02, 0.0]


def test_factors_of_inner_schedules_are_multiplied() -> None:
    """Each alone is compared with its equation in attention written out."""
    shape, positions = RopeShape(16, 10_000.0, 64), torch.tensor([[0, 1, 62], [63, 64, 4095]])
    logn = rotary("logn").logit_scale(shape, positions)
    drope = rotary("drope", factor=2.0, coefficient=0.412, per="target")
    both = rotary("logn", inner=drope).logit_scale(shape, positions)
    assert logn is not None
    assert both is not None
    torch.testing.assert_close(both, logn * (1 + 0.412 * math.log(2)), rtol=1e-12, atol=0)
    assert rotary("drope", factor=4.0, coefficient=0).logit_scale(shape, positions) is None
    decay, twice = (rotary("xpos", **inner).decay(shape) for inner in ({}, {"inner": {"name": "xpos"}}))
    assert decay is not None
    assert twice is not None
    assert torch.equal(twice, 2 * decay)
    assert torch.equal(rotary("resonance", inner=rotary("xpos")).decay(shape), decay)
    assert rotary("resonance", inner=YARN).decay(shape) is None


def test_longrope_has_two_tables_and_one_factor() -> None:
    made = rotary("longrope", factor=16.0, long_factor=divisors(SHAPE, 20.0))
    lengths = torch.tensor([[1, 4096], [4097, 1_000_000]])
    assert made.table_length(SHAPE, lengths).tolist() == [[4096, 4096], [4097, 4097]]
    assert made.attention_factor(SHAPE, 100) == made.attention_factor(SHAPE, 65_536)
    # Stock transformers reads the trained window from a field of its own, and the window from this one.
    assert made.max_position_embeddings(SHAPE, 65_536) == 65_536


def test_abf_finds_the_critical_base() -> None:
    # Llama 2 read at 32k: 2310.05209 gives 10000^(ln(32768/2pi)/ln(4096/2pi)).
    shape = RopeShape(128, 10_000.0, 4096)
    made = encoding_class("abf").for_target(shape, 32_768)
    expected = 10_000 ** (math.log(32_768 / (2 * math.pi)) / math.log(4096 / (2 * math.pi)))
    assert made.to_dict()["theta"] == pytest.approx(expected, rel=1e-12)
    # At that base the slowest channel that turned once within 4,096 tokens turns once within 32,768.
    assert math.log(expected) / math.log(10_000) == pytest.approx(1.32, abs=0.01)


def test_two_encodings_cannot_share_a_name() -> None:
    with pytest.raises(TypeError, match="two encodings are named 'linear'"):
        type("Another", (Encoding,), {"name": "linear"})


@given(
    shape=SHAPES,
    step=st.just(0.0) | st.floats(1 / 1024, 1),
    grown=st.lists(st.floats(0.01, 40), min_size=1, max_size=20),
)
def test_a_growing_table_serves_texts_up_to_its_own_length(
    shape: RopeShape, step: float, grown: list[float]
) -> None:
    made = rx.encoding("dynamic_ntk", factor=2.0, step=step)
    lengths = torch.tensor(sorted(max(1, int(shape.trained_length * by)) for by in grown))
    serving = made.table_length(shape, lengths)
    assert (serving >= lengths.clamp(min=shape.trained_length)).all()
    assert (serving <= (lengths * (1 + step)).clamp(min=shape.trained_length) + 1).all()
    assert (serving.diff() >= 0).all()
    assert (serving[lengths <= shape.trained_length] == shape.trained_length).all()
    # A text as long as a table's own length is served by that table.
    assert torch.equal(made.table_length(shape, serving), serving)


def test_every_method_is_exported_and_its_name_is_known_without_imports() -> None:
    assert method_names() == tuple(rx.encoding_names())
    for cls in encoding_classes().values():
        assert getattr(encodings, cls.__name__) is cls, "add it to rope_extend/encodings/__init__.py"


@pytest.mark.parametrize(
    ("method", "parameters", "reason"),
    [
        *[(name, {}, "") for name in ("none", "linear", "yarn", "resonance(yarn)", "nope", "power(linear)")],
        ("longrope", {"long_factor": [2.0] * 32, "short_factor": [2.0] * 32}, ""),
        ("drope", {"coefficient": 0}, ""),
        ("dynamic_ntk", {}, "length of the text"),
        ("short_original(yarn)", {}, "length of the text"),
        ("logn(yarn)", {}, "scales attention logits"),
        ("drope", {}, "scales attention logits"),
        ("drope", {"per": "target"}, "scales attention logits"),
        ("xpos", {}, "shrinks with their distance"),
        ("longrope", {"long_factor": [2.0] * 32, "start_tokens": 4}, "its first 4 positions"),
        ("resonance(longrope)", {"long_factor": [2.0] * 32, "start_tokens": 4}, "its first 4 positions"),
        ("self_extend", {}, "distant pairs"),
        ("alibi", {}, "inside attention"),
        ("shaw", {}, "inside attention"),
        ("linear_attention", {}, "inside attention"),
        ("sinusoidal", {}, "token embeddings"),
    ],
)
def test_what_one_table_does_not_say(method: str, parameters: dict[str, Any], reason: str) -> None:
    made = method_named(method).for_target(SHAPE, 8 * SHAPE.trained_length, **parameters)
    found = made.why_not_one_table(SHAPE)
    assert reason in found if reason else found == ""
    assert made.scales_by_position(SHAPE) == (method in ("logn(yarn)", "drope") and not parameters)
    turned = ("dynamic_ntk", "short_original(yarn)", "xpos", "self_extend")
    in_attention = method in turned or "start_tokens" in parameters
    assert getattr(made, "rotates_in_attention", False) == in_attention


def test_parameters_go_to_the_outermost_method_that_has_them() -> None:
    made = rotary_method("power(yarn)").for_target(SHAPE, 32_768, exponent=1.0, beta_fast=16.0)
    assert str(made) == "power(yarn(factor=8, beta_fast=16), exponent=1)"
    inner = {"name": "linear", "factor": 2.0}
    assert (
        str(rotary_method("resonance").for_target(SHAPE, 32_768, inner=inner))
        == "resonance(linear(factor=2))"
    )
    with pytest.raises(rx.RopeExtendError, match="yarn: unknown parameter 'inner'"):
        rotary_method("resonance(yarn)").for_target(SHAPE, 32_768, inner=inner)


@pytest.mark.parametrize("name", rx.encoding_names())
def test_what_replaces_rotation_says_so(name: str) -> None:
    cls = encoding_class(name)
    assert cls.replaces_rotation == (not issubclass(cls, RopeEncoding) or name in ("nope", "drope"))
    assert method_named(name).replaces_rotation == cls.replaces_rotation
