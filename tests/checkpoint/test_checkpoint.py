"""A saved model computes the same logits once it is loaded, and a checkpoint that does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from cases import TARGET, TRAINED, llama
from hypothesis import given
from hypothesis import strategies as st
from integrity import IDS, extended, logits, other_weights, with_lora
from peft import LoraConfig, PeftModel, get_peft_model
from tolerances import assert_same_but_rounding
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from rope_extend import RopeExtendError, RopeShape, current_patch, encoding, extend, patch_model
from rope_extend.checkpoint.merging import merge
from rope_extend.checkpoint.record import Record, read_record, write_record
from rope_extend.checkpoint.restoring import load, load_adapter
from rope_extend.checkpoint.saving import save
from rope_extend.checkpoint.verifying import verify
from rope_extend.models.checkpoint_directory import RECORD_NAME
from rope_extend.models.parameters import learned_parameters


@pytest.fixture
def base(checkpoints: Path) -> Path:
    return checkpoints / "base"


def pretrained(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base)


def test_a_full_checkpoint_keeps_its_precision_in_half(tmp_path: Path) -> None:
    """Stock tables are float32; ours are float64, also after loading in bfloat16."""
    model = extended(model=llama().to(torch.bfloat16))
    save(model, tmp_path / "full")
    assert torch.equal(logits(load(tmp_path / "full", dtype=torch.bfloat16)), logits(model))


@pytest.mark.parametrize("trainable", [False, True])
def test_the_adapter_goes_onto_a_model_that_is_already_loaded(checkpoints: Path, trainable: bool) -> None:
    adapter = checkpoints / "adapter"
    expected = logits(load(adapter))
    for model in (pretrained(checkpoints / "base"), extended(model=pretrained(checkpoints / "base"))):
        patch = current_patch(model)
        adapted = load_adapter(model, adapter, is_trainable=trainable)
        assert torch.equal(logits(adapted.eval()), expected)
        assert patch in (None, current_patch(model))
        assert any(parameter.requires_grad for parameter in adapted.parameters()) == trainable


@pytest.mark.parametrize("directory", ["adapter"], indirect=True)
def test_a_base_that_moved_is_named(directory: Path, checkpoints: Path) -> None:
    write_record(directory, replace(read_record(directory), base_model=str(checkpoints / "bases")))
    said = r"Did you mean '.*base'\? \S*rope_extend\.json names .*; give base_model= if it has moved"
    with pytest.raises(RopeExtendError, match=said):
        load(directory)
    expected = logits(load(checkpoints / "adapter"))
    assert torch.equal(logits(load(directory, base_model=str(checkpoints / "base"))), expected)
    write_record(directory, replace(read_record(directory), base_model=None))
    with pytest.raises(RopeExtendError, match="names no base model; give base_model="):
        load(directory)


HEADS = {
    "SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering", "FEATURE_EXTRACTION": "ForFeatureExtraction", None: "",
}  # fmt: skip


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    return model.eval()(IDS)[0]


@pytest.mark.parametrize("task", HEADS)
def test_models_for_rewards_and_embeddings_are_saved_and_loaded(
    base: Path, tmp_path: Path, task: str | None
) -> None:
    options = {"num_labels": 3} if task in ("SEQ_CLS", "TOKEN_CLS") else {}
    peft_auto = getattr(peft, f"AutoPeftModel{HEADS[task]}")
    auto = getattr(transformers, f"AutoModel{HEADS[task].replace('ForFeatureExtraction', '')}")
    if task == "QUESTION_ANS":  # stock transformers puts this head on no language model
        auto.from_pretrained(base).save_pretrained(tmp_path / "base")
        base = tmp_path / "base"
    for method in ("yarn", "dynamic_yarn"):  # the second is plugin-only
        full = extended(method, auto.from_pretrained(base, **options))
        again = load(save(full, tmp_path / method))
        assert type(again) is type(full)
        assert torch.equal(outputs(again), outputs(full))
    config = LoraConfig(task_type=task, r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(extended(model=auto.from_pretrained(base, **options)), config)
    expected, adapter = outputs(adapted), save(adapted, tmp_path / "adapter")
    stock = peft_auto.from_pretrained(adapter, **options)
    extended(model=stock)
    assert torch.equal(outputs(stock), expected)
    assert torch.equal(outputs(load(adapter)), expected)
    assert torch.equal(outputs(load_adapter(auto.from_pretrained(base, **options), adapter)), expected)
    merged = merge(adapter, tmp_path / "merged")
    assert_same_but_rounding(outputs(load(merged)), expected)
    assert_same_but_rounding(outputs(auto.from_pretrained(merged)), expected)
    with pytest.raises(RopeExtendError, match="verify compares the logits of language models"):
        verify(merged)
    write_record(adapter, replace(read_record(adapter), base_fingerprint="0" * 64))
    with pytest.raises(RopeExtendError, match="has other weights"):
        load_adapter(auto.from_pretrained(base, **options), adapter)


def test_an_adapter_of_another_name_is_saved_at_the_top(base: Path, tmp_path: Path) -> None:
    model = with_lora(extended(model=pretrained(base)), "long")
    assert torch.equal(logits(load(save(model, tmp_path / "adapter"))), logits(model))


def test_an_adapter_directory_is_one_that_stock_loaders_know(checkpoints: Path) -> None:
    assert {path.name for path in (checkpoints / "adapter").iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", RECORD_NAME,
    }  # fmt: skip
    # AutoModel finds the base model through the adapter's config; a config.json next to it would break this.
    assert pretrained(checkpoints / "adapter").config.max_position_embeddings == TRAINED


def test_a_model_without_a_patch_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(RopeExtendError, match="carries no patch"):
        save(llama(), tmp_path / "full")
    assert not (tmp_path / "full").exists()
    with pytest.raises(RopeExtendError, match="rope_extend did not save it"):
        load(base)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RopeExtendError, match=r"peft wrote this adapter.*rope_extend.save"):
        load(tmp_path)


def mistral() -> Any:
    return MistralForCausalLM(MistralConfig(**{**llama().config.to_dict(), "model_type": "mistral"}))


OTHER_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


@pytest.mark.parametrize(
    ("make", "message", "check_base"),
    [
        (lambda: llama(head_dim=32), "the checkpoint is of a model with a window of 32 tokens, base", True),
        (lambda: llama(**OTHER_THETA), "10000 and 16 rotated channels, but this one has", True),
        (mistral, "was recorded as a llama model, but this one is mistral", True),
        (lambda: llama(hidden_size=64, head_dim=16), r"was trained on .* has other weights", True),
        (lambda: llama(num_hidden_layers=3), r"was trained on .* has other weights", True),
        (lambda: other_weights(llama()), r"was trained on .* has other weights", True),
        (lambda: llama(hidden_size=64, head_dim=16), "does not fit", False),
        (lambda: llama(num_hidden_layers=3), "does not fit", False),
    ],
    ids=["channels", "base", "family", "width", "layers", "weights", "width unchecked", "layers unchecked"],
)
def test_another_base_model_is_refused_and_left_as_it_was(
    checkpoints: Path, make: Any, message: str, check_base: bool
) -> None:
    model = make().eval()
    before, modules = logits(model), dict(model.named_modules())
    with pytest.raises(RopeExtendError, match=message):
        load_adapter(model, checkpoints / "adapter", check_base=check_base)
    assert current_patch(model) is None
    assert dict(model.named_modules()) == modules
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(logits(model), before)
    assert model.config.max_position_embeddings == TRAINED


def test_another_encoding_or_adapter_on_the_model_is_refused(checkpoints: Path) -> None:
    model = pretrained(checkpoints / "base")
    patch_model(model, encoding("linear", factor=4.0))
    with pytest.raises(RopeExtendError, match=r"is patched with linear\(.*remove the patch first"):
        load_adapter(model, checkpoints / "adapter")
    with pytest.raises(RopeExtendError, match="carries an adapter already"):
        load_adapter(load(checkpoints / "adapter"), checkpoints / "adapter")


@pytest.mark.parametrize("way", ["peft", "transformers", "from_pretrained"])
def test_an_adapter_of_another_encoding_is_not_put_on_by_other_libraries_either(
    checkpoints: Path, tmp_path: Path, way: str
) -> None:
    """They know no record, so the adapter would silently run under the encoding of the model."""

    def made(name: str, method: str, target: int = TARGET) -> Path:
        model = pretrained(checkpoints / "base")
        extend(model, target, method)
        for parameter in learned_parameters(model).values():
            parameter.data.add_(len(name))
        return save(with_lora(model), tmp_path / name)

    def put_on(model: Any, directory: Path) -> Any:
        if way == "peft":
            adapted = with_lora(model, "first")
            adapted.load_adapter(directory, adapter_name="second")
            adapted.set_adapter("second")
            return adapted
        if way == "from_pretrained":
            return PeftModel.from_pretrained(model, directory)
        model.load_adapter(str(directory), adapter_name="second")
        return model

    short, longer = made("short", "yarn"), made("longer", "yarn", 2 * TARGET)
    model = load(short).unload()
    with pytest.raises(RopeExtendError, match=r"factor=16\).*target_length \(512 there, 256 here\)"):
        put_on(model, longer)
    assert torch.equal(logits(put_on(load(short).unload(), short)), logits(load(short)))
    learns, other = made("learns", "fire"), made("otherwise", "fire")
    assert torch.equal(logits(put_on(load(learns).unload(), learns)), logits(load(learns)))
    if way == "from_pretrained":
        assert torch.equal(logits(put_on(load(learns).unload(), other)), logits(load(other)))
    else:
        with pytest.raises(RopeExtendError, match="they differ in learned parameters"):
            put_on(load(learns).unload(), other)
    model = load(short).unload()
    current_patch(model).remove()
    put_on(model, longer)  # without an encoding of its own, a model takes what stock peft does


RECORD = Record(encoding("yarn", factor=4.0), RopeShape(16, 10_000.0, 4096), 16_384, "llama", "some/model")


@given(
    factor=st.floats(1, 1e4),
    dim=st.integers(1, 256),
    theta=st.floats(2, 1e9),
    trained=st.integers(1, 2**20),
    target=st.integers(1, 2**24),
    base_model=st.none() | st.text(st.characters(exclude_characters="\0"), min_size=1),
)
def test_a_record_survives_json(
    factor: float, dim: int, theta: float, trained: int, target: int, base_model: str | None
) -> None:
    shape = RopeShape(2 * dim, theta, trained)
    record = Record(encoding("linear", factor=factor), shape, target, "llama", base_model)
    assert Record.from_dict(json.loads(json.dumps(record.to_dict()))) == record


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": 1}, r"unknown keys: \['extra'\]"),
        ({"extra": 1, "versions": {"rope_extend": "newest"}}, r"unknown keys: \['extra'\]"),
        ({"extra": 1, "versions": 99}, r"unknown keys: \['extra'\]"),
        ({"base_revision": 3}, "base_revision must be a branch, tag or commit; got 3"),
        ({"base_revision": "../../elsewhere"}, "base_revision must be .* got '../../elsewhere'"),
        ({"target_length": "16k"}, "target_length must be a whole number, at least 1; got '16k'"),
        ({"target_length": 0}, "target_length must be .* got 0"),
        ({"target_length": True}, "target_length must be .* got True"),
        ({"shape": {"dim": 16}}, "shape is"),
        ({"shape": {"dim": 15, "theta": 1e4, "trained_length": 32}}, "dim must be an even"),
        ({"encoding": {"name": "yran", "factor": 2.0}}, "Did you mean 'yarn'"),
        ({"encoding": {"name": "yarn", "factor": -1.0}}, "factor"),
        ({"base_model": 3}, "base_model must be a name that a model can have; got 3"),
        ({"base_model": "a\0b"}, r"base_model must be .* got 'a\\x00b'"),
        ({"base_model": "x" * 100_000}, "base_model must be .* got 'xxx"),
    ],
    ids=str,
)
def test_a_damaged_record_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / RECORD_NAME).write_text(json.dumps({**RECORD.to_dict(), **changes}))
    with pytest.raises(RopeExtendError, match=message) as error:
        read_record(tmp_path)
    assert RECORD_NAME in str(error.value)
    assert len(str(error.value).replace(str(tmp_path), "")) < 500
