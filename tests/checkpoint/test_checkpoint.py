"""A saved model computes the same logits once it is loaded, and a checkpoint that does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from tolerances import assert_same_but_rounding
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rope_extend import RopeExtendError, RopeShape, current_patch, encoding, extend, patch_model
from rope_extend.checkpoint.manifest import RECORD_NAME
from rope_extend.checkpoint.record import SCHEMA_VERSION, Record, read_record, write_record
from rope_extend.checkpoint.restoring import load, load_adapter
from rope_extend.checkpoint.saving import save

TRAINED, TARGET = 32, 128
IDS = torch.arange(2 * TARGET).remainder(61).view(2, TARGET)
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": TRAINED,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "linear": {}, "ntk": {}, "dynamic_ntk": {"per": "row"}, "yarn": {"beta_fast": 16.0}, "llama3": {},
    "abf": {"theta": 1e6},
}  # fmt: skip


def tiny(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).eval()


def with_lora(model: Any) -> PeftModel:
    """A LoRA adapter with weights that change the logits."""
    torch.manual_seed(1)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    return get_peft_model(model, config).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """The directory of an adapter on the base model with YaRN."""
    model = AutoModelForCausalLM.from_pretrained(base)
    extend(model, TARGET)
    return save(with_lora(model), tmp_path / "adapter")


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_reloads_with_its_encoding(base: Path, tmp_path: Path, method: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    plain = logits(model)
    patch = extend(model, TARGET, method, **METHODS[method])
    model = with_lora(model)
    save(model, tmp_path / "adapter")
    reloaded = load(tmp_path / "adapter")
    assert isinstance(reloaded, PeftModel)
    assert torch.equal(logits(reloaded), logits(model))
    again = current_patch(reloaded)
    assert (again.encoding, again.shape, again.target_length) == (patch.encoding, patch.shape, TARGET)
    # peft alone loads the same adapter with the original window. The record makes the difference.
    forgetful = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert not torch.allclose(logits(forgetful), logits(model), atol=1e-3)
    assert not torch.allclose(plain, logits(model), atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_a_full_checkpoint_reloads_here_and_in_stock_transformers(tmp_path: Path, method: str) -> None:
    model = tiny()
    extend(model, TARGET, method, **METHODS[method])
    save(model, tmp_path / "full")
    reloaded = load(tmp_path / "full")
    assert torch.equal(logits(reloaded), logits(model))
    assert current_patch(reloaded).encoding == current_patch(model).encoding
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    assert_same_but_rounding(logits(stock), logits(model))


def test_a_full_checkpoint_keeps_its_precision_in_half(tmp_path: Path) -> None:
    """Stock tables are float32; ours are float64, also after loading in bfloat16."""
    model = tiny().to(torch.bfloat16)
    extend(model, TARGET)
    save(model, tmp_path / "full")
    assert torch.equal(logits(load(tmp_path / "full", dtype=torch.bfloat16)), logits(model))


def test_the_adapter_goes_onto_a_model_that_is_already_loaded(base: Path, adapter: Path) -> None:
    expected = logits(load(adapter))
    model = AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(logits(load_adapter(model, adapter)), expected)
    model = AutoModelForCausalLM.from_pretrained(base)
    patch = extend(model, TARGET)  # the same encoding, already patched in
    assert torch.equal(logits(load_adapter(model, adapter)), expected)
    assert current_patch(model) is patch


def test_only_a_trainable_adapter_takes_gradients(base: Path, adapter: Path) -> None:
    for wanted in (False, True):
        model = load_adapter(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=wanted)
        assert any(parameter.requires_grad for parameter in model.parameters()) == wanted


def test_a_base_that_moved_is_named(base: Path, adapter: Path) -> None:
    expected = logits(load(adapter))
    moved = base.rename(base.with_name("moved"))
    with pytest.raises(RopeExtendError, match="give base_model= if it has moved"):
        load(adapter)
    assert torch.equal(logits(load(adapter, base_model=str(moved))), expected)


def test_an_adapter_of_another_name_is_saved_at_the_top(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    extend(model, TARGET)
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(model, config, adapter_name="long").eval()
    save(model, tmp_path / "adapter")
    assert torch.equal(logits(load(tmp_path / "adapter")), logits(model))


def test_an_adapter_directory_is_one_that_stock_loaders_know(adapter: Path) -> None:
    assert {path.name for path in adapter.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", RECORD_NAME,
    }  # fmt: skip
    # AutoModel finds the base model through the adapter's config; a config.json next to it would break this.
    assert AutoModelForCausalLM.from_pretrained(adapter).config.max_position_embeddings == TRAINED


def test_a_checkpoint_is_not_overwritten_unasked(adapter: Path) -> None:
    model = tiny()
    extend(model, TARGET, "linear")
    (adapter / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in adapter.iterdir()}
    with pytest.raises(RopeExtendError, match=r"already holds a checkpoint .*overwrite=True"):
        save(model, adapter)
    assert {path.name: path.read_bytes() for path in adapter.iterdir()} == before
    save(model, adapter, overwrite=True)
    assert torch.equal(
        logits(load(adapter)), logits(model)
    )  # a full checkpoint: no file of the adapter is left
    assert not (adapter / "adapter_config.json").exists()
    assert (adapter / "notes.txt").read_text() == "mine"


def test_a_save_that_fails_leaves_what_was_there(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in adapter.iterdir()}
    model = tiny()
    extend(model, TARGET, "linear")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("rope_extend.checkpoint.saving.seal", full)
    with pytest.raises(RopeExtendError, match=r"cannot save to .*: no space .*before is intact"):
        save(model, adapter, overwrite=True)
    assert {path.name: path.read_bytes() for path in adapter.iterdir()} == before


def test_a_model_without_a_patch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RopeExtendError, match="carries no patch"):
        save(tiny(), tmp_path / "full")
    assert not (tmp_path / "full").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny(head_dim=32), "the checkpoint is of a model with RopeShape"),
        (
            lambda: tiny(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            "is of a model with RopeShape",
        ),
        (
            lambda: MistralForCausalLM(MistralConfig(**SHAPE)),
            "was recorded as a llama model, but this one is mistral",
        ),
        (lambda: tiny(hidden_size=64, head_dim=16), r"was trained on .* has other weights"),
        (lambda: tiny(num_hidden_layers=3), r"was trained on .* has other weights"),
        (lambda: tiny(seed=1), r"was trained on .* has other weights"),
    ],
    ids=["rotated channels", "base", "family", "width", "layers", "weights"],
)
def test_another_base_model_is_refused_and_left_as_it_was(adapter: Path, make: Any, message: str) -> None:
    check_refusal(make(), adapter, message)


@pytest.mark.parametrize("changes", [{"hidden_size": 64, "head_dim": 16}, {"num_hidden_layers": 3}], ids=str)
def test_an_adapter_that_cannot_fit_is_refused_unchecked_too(adapter: Path, changes: dict[str, int]) -> None:
    check_refusal(tiny(**changes), adapter, "does not fit", check_base=False)


def test_an_adapter_that_fits_another_base_model_goes_on_it_when_asked(adapter: Path) -> None:
    model = load_adapter(tiny(seed=1), adapter, check_base=False)
    assert not torch.allclose(logits(model), logits(load(adapter)), atol=1e-3)


def check_refusal(model: Any, adapter: Path, message: str, **options: Any) -> None:
    """The adapter is refused, and the model is unchanged."""
    before, modules = logits(model), dict(model.named_modules())
    with pytest.raises(RopeExtendError, match=message):
        load_adapter(model, adapter, **options)
    assert current_patch(model) is None
    assert dict(model.named_modules()) == modules
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(logits(model), before)
    assert model.config.max_position_embeddings == TRAINED


def test_another_encoding_or_adapter_on_the_model_is_refused(base: Path, adapter: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    patch_model(model, encoding("linear", factor=4.0))
    with pytest.raises(RopeExtendError, match=r"is patched with linear\(.*remove the patch first"):
        load_adapter(model, adapter)
    with pytest.raises(RopeExtendError, match="carries an adapter already"):
        load_adapter(load(adapter), adapter)


RECORD = Record(encoding("yarn", factor=4.0), RopeShape(16, 10_000.0, 4096), 16_384, "llama", "some/model")


@given(
    factor=st.floats(1, 1e4),
    dim=st.integers(1, 256),
    theta=st.floats(2, 1e9),
    trained=st.integers(1, 2**20),
    target=st.integers(1, 2**24),
    base_model=st.none() | st.text(min_size=1),
)
def test_a_record_survives_json(
    factor: float, dim: int, theta: float, trained: int, target: int, base_model: str | None
) -> None:
    shape = RopeShape(2 * dim, theta, trained)
    record = Record(encoding("linear", factor=factor), shape, target, "llama", base_model)
    assert Record.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_a_record_says_what_made_it(tmp_path: Path) -> None:
    data = json.loads(write_record(tmp_path, RECORD).read_text())
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["versions"]["torch"] == torch.__version__
    assert read_record(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == [RECORD_NAME]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 3}, "schema_version is 3, and this version of rope_extend reads 2;"),
        ({"schema_version": None}, "schema_version is None"),
        ({"extra": 1}, r"unknown keys: \['extra'\]"),
        ({"target_length": "16k"}, "target_length is '16k'"),
        ({"target_length": 0}, "target_length is 0"),
        ({"target_length": True}, "target_length is True"),
        ({"shape": {"dim": 16}}, "shape is"),
        ({"shape": {"dim": 15, "theta": 1e4, "trained_length": 32}}, "dim must be an even"),
        ({"encoding": {"name": "yran", "factor": 2.0}}, "Did you mean 'yarn'"),
        ({"encoding": {"name": "yarn", "factor": -1.0}}, "factor"),
        ({"base_model": 3}, "base_model is 3"),
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / RECORD_NAME).write_text(json.dumps({**RECORD.to_dict(), **changes}))
    with pytest.raises(RopeExtendError, match=message) as error:
        read_record(tmp_path)
    assert RECORD_NAME in str(error.value)


@pytest.mark.parametrize("key", sorted(RECORD.to_dict().keys() - {"schema_version"}))
def test_a_record_with_a_missing_key_is_refused(tmp_path: Path, key: str) -> None:
    data = RECORD.to_dict()
    del data[key]
    (tmp_path / RECORD_NAME).write_text(json.dumps(data))
    with pytest.raises(RopeExtendError, match=rf"missing keys: \['{key}'\]"):
        read_record(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', b"\xff\xfe"])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / RECORD_NAME).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RopeExtendError, match=RECORD_NAME):
        read_record(tmp_path)


def test_a_directory_without_a_record_is_refused(base: Path) -> None:
    with pytest.raises(RopeExtendError, match="not a checkpoint of rope_extend"):
        load(base)


def test_a_record_without_a_base_model_asks_for_it(adapter: Path) -> None:
    write_record(adapter, replace(read_record(adapter), base_model=None))
    with pytest.raises(RopeExtendError, match="names no base model; give base_model="):
        load(adapter)
