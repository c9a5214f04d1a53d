"""A model that was extended already is extended from its present table: `start="current"`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TRAINED, llama, scaling
from integrity import with_lora
from tolerances import assert_same_but_rounding
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.cli.main import main
from rope_extend.encodings import LongRoPE
from rope_extend.encodings.core.shapes import ExtendedShape

DIM = 16
PAIRS = DIM // 2
THETA = 1e4
NOW = 128
"""The window that the models were trained to read: four times that of pretraining."""
TARGET = 512
IDS = torch.randint(3, 60, (1, 200), generator=torch.Generator().manual_seed(0))
LONG, SHORT = [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 4.5, 4.6], [1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 1.3, 1.4]


def stock(rope_type: str, window: int = NOW, **parameters: Any) -> PreTrainedModel:
    """A model that stock transformers makes with scaling in its config."""
    return llama(max_position_embeddings=window, rope_parameters=scaling(rope_type, factor=4.0, **parameters))


def plain() -> list[float]:
    return [THETA ** (-2 * i / DIM) for i in range(PAIRS)]


def llama3_now() -> tuple[list[float], float]:
    """Llama 3.1's scaling in plain floats."""
    table = []
    for theta in plain():
        turns = TRAINED * theta / (2 * math.pi)
        keep = min(1.0, max(0.0, (turns - 1) / 3))
        table.append((1 - keep) * theta / 4 + keep * theta)
    return table, 1.0


def yarn_now() -> tuple[list[float], float]:
    """YaRN in plain floats."""
    low, high = (DIM * math.log(TRAINED / (n * 2 * math.pi)) / (2 * math.log(THETA)) for n in (32, 1))
    low, high = max(0, math.floor(low)), math.ceil(high)
    ramps = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(PAIRS)]
    table = [r * theta / 4 + (1 - r) * theta for r, theta in zip(ramps, plain(), strict=True)]
    return table, 0.1 * math.log(4) + 1


def longrope_now() -> tuple[list[float], float]:
    """The long list."""
    return [t / d for t, d in zip(plain(), LONG, strict=True)], 1.3


def index_in(table: list[float], turns: float) -> float:
    """Where a table falls to `turns` turns within NOW tokens; logarithms are interpolated."""
    goal = math.log(2 * math.pi * turns / NOW)
    logs = [math.log(f) for f in table]
    if logs[0] <= goal:
        return 0.0
    for i in range(PAIRS - 1):
        if logs[i + 1] <= goal:
            return i + (logs[i] - goal) / (logs[i] - logs[i + 1])
    return PAIRS - 1 + (logs[-1] - goal) / (2 * math.log(THETA) / DIM)


def yarn_divisors(table: list[float]) -> list[float]:
    """YaRN by the factor 4, whose ramp is where the present table has 32 turns and 1 turn."""
    low, high = math.floor(index_in(table, 32)), math.ceil(index_in(table, 1))
    low, high = max(low, 0), min(high, DIM - 1)
    ramps = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(PAIRS)]
    return [1 / (r / 4 + 1 - r) for r in ramps]


STARTS = {
    "llama3": (lambda: stock("llama3", low_freq_factor=1.0, high_freq_factor=4.0), llama3_now),
    "yarn": (lambda: stock("yarn"), yarn_now),
    "longrope": (
        lambda: stock("longrope", long_factor=LONG, short_factor=LONG, attention_factor=1.3),
        longrope_now,
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_yarn_on_a_scaled_model_is_the_product_of_both_tables(name: str) -> None:
    """Against a product in plain floats, with YaRN's ramp by the turns of the present table."""
    made, now = STARTS[name]
    table, factor = now()
    with rx.extend(made(), TARGET, "yarn", start="current") as patch:
        encoding, shape = patch.encoding, patch.shape
        assert isinstance(encoding, LongRoPE)
        assert shape == rx.RopeShape(DIM, THETA, TRAINED)
        assert not encoding.depends_on_length
        expected = [t / d for t, d in zip(table, yarn_divisors(table), strict=True)]
        assert encoding.inv_freq(shape).tolist() == pytest.approx(expected, rel=1e-14)
        assert encoding.attention_factor(shape) == pytest.approx(factor * (0.1 * math.log(4) + 1), rel=1e-14)


@pytest.mark.parametrize(
    ("method", "parameters", "divisors"),
    [
        ("linear", {}, [4.0] * PAIRS),
        ("ntk", {}, [4.0 ** (i / (PAIRS - 1)) for i in range(PAIRS)]),
        ("longrope", {"long_factor": LONG, "short_factor": LONG, "attention_scale": 1.5}, LONG),
        ("abf", {"theta": 1e6}, [100.0 ** (2 * i / DIM) for i in range(PAIRS)]),
    ],
)
def test_divisors_are_multiplied(method: str, parameters: dict[str, Any], divisors: list[float]) -> None:
    """Methods whose divisors do not depend on the turns: any table, as in LongRoPE's second stage."""
    table, factor = yarn_now()
    with rx.extend(stock("yarn"), TARGET, method, start="current", **parameters) as patch:
        expected = [t / d for t, d in zip(table, divisors, strict=True)]
        assert patch.rotary.inv_freq(patch.shape).tolist() == pytest.approx(expected, rel=1e-13)
        scale = parameters.get("attention_scale", 1.0)
        assert patch.rotary.attention_factor(patch.shape) == pytest.approx(factor * scale, rel=1e-6)


def test_a_live_patch_and_an_adapter_are_the_start() -> None:
    """Exact: the present table is ours, in float64."""
    model = llama()
    rx.extend(model, NOW, "yarn")
    adapted = with_lora(model)
    table, factor = yarn_now()
    patch = rx.extend(adapted, TARGET, "linear", start="current")
    assert patch.rotary.inv_freq(patch.shape).tolist() == pytest.approx([t / 4 for t in table], rel=1e-14)
    assert patch.rotary.attention_factor(patch.shape) == pytest.approx(factor, rel=1e-14)
    again = rx.extend(adapted, 2 * TARGET, "linear", start="current")
    assert again.rotary.inv_freq(again.shape).tolist() == pytest.approx([t / 8 for t in table], rel=1e-14)


def test_one_table_is_saved_and_stock_transformers_loads_it(tmp_path: Path) -> None:
    model = stock("llama3", low_freq_factor=1.0, high_freq_factor=4.0).eval()
    with rx.extend(model, TARGET, "yarn", start="current") as patch, torch.no_grad():
        expected = model(IDS).logits
        rx.save(model, tmp_path / "saved")
        encoding = patch.encoding
    assert rx.current_patch(model) is None
    with torch.no_grad():
        original = model(IDS).logits
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert again.config.rope_parameters["rope_type"] == "longrope"
    assert again.config.max_position_embeddings == TARGET
    ours = rx.load(tmp_path / "saved")
    assert rx.current_patch(ours).encoding == encoding  # type: ignore[union-attr]
    with torch.no_grad():
        assert_same_but_rounding(again(IDS).logits, expected)
        assert_same_but_rounding(ours(IDS).logits, expected)
    assert float((original - expected).abs().max()) > 1e-2
    # What was saved can be extended again, in stock transformers' hands too.
    for loaded in (again, ours):
        with rx.extend(loaded, 2 * TARGET, "linear", start="current") as patch:
            halved = (encoding.inv_freq(patch.shape) / 2).tolist()
            assert patch.rotary.inv_freq(patch.shape).tolist() == pytest.approx(halved, rel=1e-6)


def test_the_short_list_of_longrope_is_kept() -> None:
    """A checkpoint with two lists, such as Phi-3: only the table of long texts is extended."""
    model = stock("longrope", long_factor=LONG, short_factor=SHORT, attention_factor=1.3).eval()
    with rx.extend(model, TARGET, "linear", start="current") as patch:
        assert isinstance(patch.encoding, LongRoPE)
        assert patch.encoding.short_factor == tuple(SHORT)
        assert patch.encoding.attention_scale == 1.3
        assert patch.rotary.inv_freq(patch.shape, TARGET).tolist() == pytest.approx(
            [t / (4 * d) for t, d in zip(plain(), LONG, strict=True)], rel=1e-6
        )
        assert patch.rotary.inv_freq(patch.shape, TRAINED).tolist() == pytest.approx(
            [t / d for t, d in zip(plain(), SHORT, strict=True)], rel=1e-12
        )


def test_the_window_of_the_short_list_is_that_of_the_config() -> None:
    """Another one would silently use the short list for texts that have the long one."""
    model = stock("longrope", long_factor=LONG, short_factor=SHORT, attention_factor=1.3)
    with pytest.raises(
        RopeExtendError, match=r"trained_length=64 would use it for others; leave trained_length out"
    ):
        rx.extend(model, TARGET, "linear", start="current", trained_length=2 * TRAINED)
    with rx.extend(model, TARGET, "linear", start="current", trained_length=TRAINED) as patch:
        assert patch.shape.trained_length == TRAINED


def test_the_default_and_a_plain_model_are_as_before() -> None:
    model = stock("yarn")
    with rx.extend(model, TARGET, "yarn") as patch:
        assert patch.encoding == rx.encoding("yarn", factor=TARGET / TRAINED)
    with rx.extend(llama(), TARGET, "yarn", start="current") as patch:
        assert patch.encoding == rx.encoding("yarn", factor=TARGET / TRAINED)


def test_the_window_now_is_the_larger_one_of_the_config() -> None:
    """Qwen's config with YaRN has the window before the extension; Llama 3.1's is larger than its factor."""
    with rx.extend(stock("yarn", window=TRAINED), TARGET, "linear", start="current") as patch:
        assert patch.rotary.inv_freq(patch.shape)[-1] == pytest.approx(yarn_now()[0][-1] / 4)
    with rx.extend(stock("yarn", window=2 * NOW), TARGET, "linear", start="current") as patch:
        assert patch.rotary.inv_freq(patch.shape)[-1] == pytest.approx(yarn_now()[0][-1] / 2)
    with rx.extend(stock("yarn"), TARGET, "linear", start="current", current_length=64) as patch:
        assert patch.rotary.inv_freq(patch.shape)[-1] == pytest.approx(yarn_now()[0][-1] / 8)


@pytest.mark.parametrize(
    ("target", "method", "options", "message"),
    [
        (NOW, "yarn", {}, r"must exceed the 128 tokens that the model reads now, got 128"),
        (TARGET, "dynamic_ntk", {}, r"dynamic_ntk.* is not one table: its table depends on the length"),
        (TARGET, "logn(yarn)", {}, r"is not one table: it scales attention logits"),
        (TARGET, "alibi", {}, r"keeps the rotation that the model has, and alibi replaces it"),
        (TARGET, "nope", {}, r"keeps the rotation that the model has, and nope replaces it"),
        (TARGET, "short_original(yarn)", {}, r"is not one table: its table depends on the length"),
        (
            TARGET,
            "yarn",
            {"current_length": 0},
            r"current_length must be a whole number of tokens, at least 1",
        ),
        (TARGET, "yarn", {"current_length": 16}, r"current_length is 16, less than the 32 tokens"),
        (TARGET, "yarn", {"start": "now"}, r"start must be 'pretrained' or 'current', got 'now'"),
        (TARGET, "yarn", {"start": "pretrained", "current_length": 64}, r"leave current_length out"),
    ],
)
def test_mistakes_are_explained(target: int, method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeExtendError, match=message):
        rx.extend(stock("yarn"), target, method, **{"start": "current", **options})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("short_original(yarn)", r"this one has short_original\(.*: its table depends on the length"),
        ("alibi", r"this one has alibi: it acts inside attention"),
        ("dynamic_ntk", r"this one has dynamic_ntk"),
    ],
)
def test_a_model_without_one_table_is_refused(method: str, message: str) -> None:
    model = llama()
    rx.extend(model, NOW, method)
    with pytest.raises(RopeExtendError, match=message):
        rx.extend(model, TARGET, "yarn", start="current")
    with pytest.raises(RopeExtendError, match=r"dynamic"):
        rx.extend(stock("dynamic", window=TRAINED), TARGET, "yarn", start="current")


@pytest.mark.parametrize("turns", [0.01, 0.5, 1.0, 7.0, 100.0])
def test_the_index_of_plain_rope_is_the_formula(turns: float) -> None:
    """An extended shape with plain RoPE's table counts turns as the pretrained one."""
    shape = rx.RopeShape(DIM, THETA, TRAINED)
    same = ExtendedShape(DIM, THETA, TRAINED, tuple(shape.inv_freq().tolist()))
    assert same.index_with_turns(turns) == pytest.approx(shape.index_with_turns(turns), abs=1e-9)


def test_a_table_that_does_not_rotate_stays_so() -> None:
    model = llama()
    rx.extend(model, NOW, "clipped(linear)", channels=2)
    with rx.extend(model, TARGET, "linear", start="current") as patch:
        table = patch.rotary.inv_freq(patch.shape)
        assert table[-1] == 0
        assert table[:-1].tolist() == pytest.approx([t / 16 for t in plain()[:-1]], rel=1e-12)


@pytest.mark.parametrize("method", ["yarn", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("private_cache")
def test_a_recipe_extends_the_present_table(method: str, work: Path, tmp_path: Path) -> None:
    """The adapter holds the whole table; the control `none` keeps the present one in the longer window."""
    base = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(work / "model")
    with rx.extend(model, 2 * TRAINED, "yarn") as patch:
        table, factor = patch.rotary.inv_freq(patch.shape), patch.rotary.attention_factor(patch.shape)
        model.save_pretrained(base)
    AutoTokenizer.from_pretrained(work / "model").save_pretrained(base)
    recipe = rx.Recipe(
        model=str(base), data=str(work / "data"), output_dir=str(tmp_path / "run"), method=method,
        target_length=4 * TRAINED, start="current", steps=1, gradient_accumulation=1, lora_rank=2,
    )  # fmt: skip
    rx.finetune(recipe)
    patch = rx.current_patch(rx.load(tmp_path / "run"))
    assert patch is not None
    assert (patch.target_length, patch.shape.trained_length) == (4 * TRAINED, TRAINED)
    tuned = patch.rotary.inv_freq(patch.shape)
    if method == "none":
        assert tuned.tolist() == pytest.approx(table.tolist(), rel=1e-14)
        assert patch.rotary.attention_factor(patch.shape) == pytest.approx(factor, rel=1e-14)
    else:
        with (
            rx.extend(model, 2 * TRAINED, "yarn"),
            rx.extend(model, 4 * TRAINED, "yarn", start="current") as p,
        ):
            assert patch.encoding == p.encoding
    with pytest.raises(RopeExtendError, match="leave current_length out"):
        replace(recipe, start="pretrained", current_length=64)


@pytest.mark.parametrize(
    ("made", "window", "start", "reason"),
    [
        (llama, TRAINED, "pretrained", "plain RoPE"),
        (
            lambda: stock("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
            NOW,
            "current",
            "know the present",
        ),
        (lambda: stock("yarn"), NOW, "current", "know the present"),
        (lambda: stock("yarn", window=TRAINED), NOW, "pretrained", "max_position_embeddings is 32, so the"),
        (lambda: stock("yarn", window=TRAINED, finetuned=True), NOW, "current", "finetuned: true"),
        (lambda: stock("yarn", finetuned=False), NOW, "pretrained", "finetuned: false"),
        (lambda: stock("dynamic", window=TRAINED), TRAINED, "pretrained", "not one for all texts"),
    ],
)
def test_info_says_which_start_suits(
    made: Any, window: int, start: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rx.info(made())
    assert (found.current_length, found.start) == (window, start)
    assert reason in found.start_reason
    made().save_pretrained(tmp_path)
    capsys.readouterr()
    main(["info", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"present window  {window} tokens" in printed
    assert f"to extend       start={start}, because " in printed
