"""`rx.info` reports adapters that were loaded without their encoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FAMILIES, TARGET, TRAINED, llama, tiny_model
from covering import few
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from tolerances import assert_same_but_rounding
from transformers import AutoConfig, AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError

IDS = torch.arange(TARGET).remainder(61)[None]
ENCODINGS = {
    "yarn": {"factor": 8.0}, "linear": {"factor": 8.0}, "ntk": {"factor": 8.0},
    "ntk_by_parts": {"factor": 8.0}, "clipped": {}, "nope": {}, "dynamic_ntk": {"factor": 8.0}, "xpos": {},
    "logn": {}, "drope": {"factor": 8.0},
    "short_original(yarn)": {"inner": {"name": "yarn", "factor": 8.0}},
}  # fmt: skip


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits


def lora(model: Any, name: str = "default") -> Any:
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(model, config, adapter_name=name)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def stock(base: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, **options)


def made(name: str) -> rx.Encoding:
    return rx.encoding(name.partition("(")[0], **ENCODINGS[name])


def adapter_of(base: Path, encoding: rx.Encoding, directory: str = "adapter", **options: Any) -> Path:
    model = stock(base)
    rx.patch_model(model, encoding, target_length=TARGET, **options)
    return rx.save(lora(model), base.parent / directory)


def unapplied(model: Any, caplog: pytest.LogCaptureFixture) -> str | None:
    """The field `unapplied`; checks that there is a warning exactly if the field is not None."""
    caplog.clear()
    found = rx.info(model).unapplied
    warned = [r for r in caplog.records if "its output cannot be trusted" in r.getMessage()]
    assert len(warned) == (found is not None)
    if warned:
        assert found in warned[0].getMessage()
    return found


@pytest.mark.parametrize("name", few(ENCODINGS, 4))
def test_stock_peft_is_caught(base: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    encoding = made(name)
    adapter = adapter_of(base, encoding)
    expected = logits(rx.load(adapter))
    unpatched = PeftModel.from_pretrained(stock(base), str(adapter))
    assert unapplied(unpatched, caplog) == str(encoding)
    assert not torch.allclose(logits(unpatched), expected, atol=1e-3)  # its output is really wrong
    # With the patch it is right, in any order of patch and adapter; without it, wrong again.
    patch = rx.patch_model(unpatched, encoding, target_length=TARGET)
    assert unapplied(unpatched, caplog) is None
    assert torch.equal(logits(unpatched), expected)
    patch.remove()
    assert unapplied(unpatched, caplog) == str(encoding)
    patched = stock(base)
    rx.patch_model(patched, encoding, target_length=TARGET)
    assert unapplied(PeftModel.from_pretrained(patched, str(adapter)), caplog) is None


def test_other_stock_ways_to_load_are_caught(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = adapter_of(base, made("yarn"))
    integrated = stock(base)
    integrated.load_adapter(str(adapter))
    second = lora(stock(base), "first")
    second.load_adapter(str(adapter), "second")
    assert unapplied(second, caplog) is None  # not active
    second.set_adapter("second")
    for model in (
        integrated,
        second,
        AutoModelForCausalLM.from_pretrained(adapter),
        AutoPeftModelForCausalLM.from_pretrained(str(adapter)),
    ):
        assert unapplied(model, caplog) == "yarn(factor=8)"


def test_our_ways_to_load_do_not_warn(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = adapter_of(base, made("yarn"))
    assert unapplied(rx.load(adapter), caplog) is None
    assert unapplied(rx.load_adapter(stock(base), adapter), caplog) is None
    live = stock(base)
    rx.patch_model(live, made("yarn"), target_length=TARGET)
    assert unapplied(lora(live), caplog) is None  # in training, not saved yet
    merged = rx.merge(adapter, base.parent / "merged")
    assert unapplied(stock(merged), caplog) is None
    for where in (str(adapter), adapter, str(base), base):
        assert unapplied(where, caplog) is None


def test_another_patch_is_caught(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = adapter_of(base, made("yarn"))
    others: list[tuple[rx.Encoding, dict[str, Any]]] = [
        (rx.encoding("yarn", factor=4.0), {}),
        (rx.encoding("yarn", factor=8.0, truncate=False), {}),
        (rx.encoding("linear", factor=8.0), {}),
        (rx.encoding("none"), {}),
        (
            rx.encoding("yarn", factor=8.0),
            {"trained_length": 2 * TRAINED},
        ),  # for another window
    ]
    expected = logits(rx.load(adapter))
    for encoding, options in others:
        model = stock(base)
        rx.patch_model(model, encoding, target_length=TARGET, **options)
        unpatched = PeftModel.from_pretrained(model, str(adapter))
        assert unapplied(unpatched, caplog) == "yarn(factor=8)", encoding
        assert not torch.allclose(logits(unpatched), expected, atol=1e-4), encoding


@pytest.mark.parametrize("name", few(["yarn", "linear", "ntk", "ntk_by_parts", "clipped", "nope"], 3))
def test_a_config_with_the_same_encoding_is_accepted(
    base: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """As the card's lines for stock peft do: the base model gets the encoding's stock config."""
    adapter = adapter_of(base, made(name))
    model = stock(base)
    with rx.patch_model(model, made(name), target_length=TARGET):
        settings = {key: getattr(model.config, key) for key in ("rope_parameters", "max_position_embeddings")}
    config = AutoConfig.from_pretrained(base)
    for key, value in settings.items():
        setattr(config, key, value)
    right = PeftModel.from_pretrained(stock(base, config=config), str(adapter))
    assert unapplied(right, caplog) is None
    assert_same_but_rounding(logits(right), logits(rx.load(adapter)))
    # A base model that was extended and saved before training is accepted too.
    extended = stock(base)
    rx.patch_model(extended, made(name), target_length=TARGET)
    where = rx.save(extended, base.parent / "extended")
    assert unapplied(PeftModel.from_pretrained(stock(where), str(adapter)), caplog) is None
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
    config.original_max_position_embeddings = TRAINED
    wrong = PeftModel.from_pretrained(stock(base, config=config), str(adapter))
    assert unapplied(wrong, caplog) == str(made(name))


def test_plain_rope_does_not_warn_if_the_base_model_has_it(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = adapter_of(base, rx.encoding("none"))
    assert unapplied(PeftModel.from_pretrained(stock(base), str(adapter)), caplog) is None
    # A base model with scaling, such as Llama 3.1, was patched to plain RoPE in training.
    scaled = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": TRAINED,
    }  # fmt: skip
    llama(rope_parameters=scaled, max_position_embeddings=TARGET).save_pretrained(
        tmp_path / "scaled" / "base"
    )
    adapter = adapter_of(tmp_path / "scaled" / "base", rx.encoding("none"))
    model = stock(tmp_path / "scaled" / "base")
    assert unapplied(PeftModel.from_pretrained(model, str(adapter)), caplog) == "none"


def test_an_adapter_without_our_record_does_not_warn(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    lora(stock(base)).save_pretrained(base.parent / "theirs")
    assert unapplied(PeftModel.from_pretrained(stock(base), str(base.parent / "theirs")), caplog) is None
    assert unapplied(lora(stock(base)), caplog) is None
    assert unapplied(stock(base), caplog) is None


@pytest.mark.parametrize(
    "mark",
    [{}, [], "yarn", 5, {"encoding": None}, {"encoding": {"name": "yran"}}, {"encoding": {}, "shape": {}}],
    ids=str,
)
def test_a_damaged_mark_is_one_error(base: Path, mark: Any) -> None:
    adapter = adapter_of(base, made("yarn"))
    data = json.loads((adapter / "adapter_config.json").read_text())
    data["auto_mapping"] = {"rope_extend": mark}
    (adapter / "adapter_config.json").write_text(json.dumps(data))
    model = PeftModel.from_pretrained(stock(base), str(adapter))
    with pytest.raises(RopeExtendError, match=r"encoding in the config of the adapter .* is damaged"):
        rx.info(model)


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"model_type": "llama", "hidden_size": "x"}'])
def test_a_config_that_cannot_be_read_is_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RopeExtendError):
        rx.info(tmp_path)


def test_a_directory_of_an_adapter_without_a_record_is_refused(base: Path, tmp_path: Path) -> None:
    lora(stock(base)).save_pretrained(tmp_path / "theirs")
    with pytest.raises(RopeExtendError):
        rx.info(tmp_path / "theirs")


@pytest.mark.slow
def test_a_checkpoint_that_stock_transformers_cannot_represent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its config names the encoding; after stock `from_pretrained`, its tables are those of pretraining."""
    case = next((case for case in FAMILIES if case.model_type == "gemma4_text"), None)
    if case is None:
        pytest.skip("this transformers has no gemma4_text")
    model = tiny_model(case)
    rx.extend(model, TARGET, "yarn")
    encoding = rx.info(model).encoding
    model.save_pretrained(tmp_path / "stock")
    rx.save(model, tmp_path / "ours")
    assert unapplied(model, caplog) is None
    loaded = stock(tmp_path / "stock")
    found = rx.info(loaded)
    assert (found.unapplied, found.start) == (encoding, "pretrained")
    assert found.encoding != encoding
    assert "load it with rope_extend.load" in caplog.text
    with pytest.raises(RopeExtendError, match=r"names yarn.* load it with rope_extend\.load"):
        rx.extend(loaded, 2 * TARGET, "linear", start="current")
    # The directory is described as rope_extend.load loads it.
    ours = rx.info(tmp_path / "ours")
    assert (ours.encoding, ours.unapplied) == (encoding, None)
    loaded = rx.load(tmp_path / "ours")
    assert unapplied(loaded, caplog) is None
    assert torch.equal(logits(loaded), logits(model))
