"""An adapter is only put on the base model that it was trained on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import COMMON, llama
from integrity import IDS, RECORD, extended, logits, refused, rewritten, with_lora
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from tolerances import assert_same_but_rounding
from transformers import AutoConfig, AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.peft_models import base_fingerprint
from rope_extend.checkpoint.record import read_record, write_record
from rope_extend.evaluation.asking import Subjects
from rope_extend.models.load_options import LoadOptions


def test_a_base_model_that_was_exchanged_under_its_name_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    where = Path(shutil.copytree(checkpoints, tmp_path / "there"))
    adapter = where / "adapter"
    write_record(adapter, replace(read_record(adapter), base_model=str(where / "base")))
    expected = logits(rx.load(checkpoints / "adapter"))
    assert torch.equal(logits(rx.load(adapter)), expected)
    other = llama()
    other.model.layers[0].mlp.gate_proj.weight.data.mul_(1.5)
    other.save_pretrained(where / "base")
    for name in ("load", "merge", "export", "verify"):
        refused(adapter, r"was trained on .* has other weights", by=name)
    assert not torch.equal(logits(rx.load(adapter, check_base=False)), expected)


@pytest.mark.parametrize("init", ["pissa", "olora", "gaussian"])
def test_an_adapter_that_changes_its_base_model_is_put_on_the_unchanged_one(
    checkpoints: Path, tmp_path: Path, init: str
) -> None:
    """peft subtracts such adapters from the base model's weights, also on loading."""
    model = extended(model=AutoModelForCausalLM.from_pretrained(checkpoints / "base"))
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=init)
    model = get_peft_model(model, config).eval()
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.add_(0.1 * torch.randn_like(weight))
    adapter, expected = rx.save(model, tmp_path / "adapter"), logits(model)
    assert_same_but_rounding(logits(rx.load(adapter)), expected)
    merged = rx.merge(adapter, tmp_path / "merged")
    assert_same_but_rounding(logits(rx.load(merged)), expected)
    # The refusal comes after peft has changed the weights; they are restored.
    other = llama()
    other.model.layers[0].self_attn.q_proj.weight.data.mul_(1.5)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(RopeExtendError, match="has other weights"):
        rx.load_adapter(other, adapter)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_base_model_may_be_in_another_precision(
    checkpoints: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    rx.load(checkpoints / "adapter", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "base", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    # A base model that is rounded to bfloat16 on disk has the same fingerprint.
    rx.load(checkpoints / "adapter", base_model=str(tmp_path / "half"), dtype=dtype)


def test_a_base_model_in_float16_is_compared_as_far_as_that_goes(
    checkpoints: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unchecked = "so it cannot be checked which base model an adapter belongs to"
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(checkpoints / "base", dtype=torch.float16).save_pretrained(half)
    adapted = with_lora(extended(model=AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)))
    adapter = rx.save(adapted, tmp_path / "adapter")
    # If the base model itself is in float16, it is recognised in any dtype.
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rx.load(adapter, dtype=dtype)
    rx.merge(adapter, tmp_path / "merged")
    assert unchecked not in caplog.text
    # A model that was rounded to float16 may be the right one; a merge needs the original.
    rx.load(checkpoints / "adapter", base_model=str(half), dtype=torch.float16)
    assert caplog.text.count(unchecked) == 1
    with pytest.raises(RopeExtendError, match=r"has other weights .*give the former as base_model="):
        rx.merge(checkpoints / "adapter", tmp_path / "other", base_model=str(half))
    other = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float16)
    other.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    other.save_pretrained(half)
    refused(adapter, "has other weights", by="merge")
    with pytest.raises(RopeExtendError, match="has other weights"):
        rx.load(adapter, dtype=torch.float32)


def test_the_pinned_revision_of_a_base_model_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As peft's auto class does. The newest revision has other norms, which no fingerprint tells apart."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--me--base"
    (repository / "refs").mkdir(parents=True)
    for ref, commit, scale in (("v1", "a" * 40, 1.0), ("main", "b" * 40, 1.7)):
        (repository / "refs" / ref).write_text(commit)
        model = llama()
        model.model.norm.weight.data.mul_(scale)
        model.save_pretrained(repository / "snapshots" / commit)
    adapted = with_lora(extended(model=AutoModelForCausalLM.from_pretrained("me/base", revision="v1")))
    adapted.peft_config["default"].revision = "v1"
    adapter, expected = rx.save(adapted, tmp_path / "adapter"), logits(adapted)
    stock = AutoPeftModelForCausalLM.from_pretrained(adapter)
    assert torch.equal(logits(extended(model=stock)), expected)
    assert not torch.equal(logits(rx.load(adapter, base_revision="main")), expected)
    rewritten(adapter / RECORD, lambda data: {**data, "base_model": None})
    assert not torch.equal(
        logits(rx.load(adapter, base_model="me/base")), expected
    )  # of a name, not the model
    rewritten(adapter / RECORD, lambda data: {**data, "base_model": "me/base"})
    shutil.rmtree(repository / "snapshots" / ("b" * 40))  # nor is the newest one asked for
    (repository / "refs" / "main").unlink()
    for change in ({}, {"base_revision": None}):
        rewritten(adapter / RECORD, lambda data, change=change: {**data, **change})
        assert read_record(adapter).base_revision == "v1"
        assert torch.equal(logits(rx.load(adapter)), expected)
        merged = rx.merge(adapter, tmp_path / "merged", overwrite=True)
        assert_same_but_rounding(logits(rx.load(merged)), expected)
        assert read_record(merged).base_revision == "v1"
        assert rx.info(adapter).window == rx.load_any(adapter, empty=True).config.max_position_embeddings
        assert torch.equal(logits(rx.load_any(adapter)), expected)
        base = AutoModelForCausalLM.from_pretrained(rx.base_model_of(adapter))
        assert torch.equal(base.model.norm.weight, llama().model.norm.weight)
        subjects = Subjects.of(str(adapter), LoadOptions())
        *_, (_, answering) = ((label, logits(model)) for label, model in subjects.models())
        assert torch.equal(answering, expected)


def test_a_base_model_without_theta_is_refused(tmp_path: Path) -> None:
    """transformers silently fills in 10,000, but this model was pretrained with another base."""
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    llama(**theta).save_pretrained(tmp_path / "base")
    adapted = with_lora(extended(model=AutoModelForCausalLM.from_pretrained(tmp_path / "base")))
    adapter = rx.save(adapted, tmp_path / "adapter")
    rx.load(adapter)
    rewritten(
        tmp_path / "base" / "config.json", lambda data: data["rope_parameters"].pop("rope_theta") and None
    )
    for name in ("load", "merge", "export", "verify"):
        refused(adapter, r"rope_theta|theta=500000.0.*this one has", by=name)


def with_tokens(where: Path, indices: Any, **config: Any) -> tuple[Path, torch.Tensor]:
    """An adapter that also trains some tokens, on a base model that it saves, and its logits."""
    llama(**config).save_pretrained(where / "base")
    model = extended(model=AutoModelForCausalLM.from_pretrained(where / "base"))
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False,
        trainable_token_indices=indices,
    )  # fmt: skip
    adapted = get_peft_model(model, lora).eval()
    torch.manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "trainable_tokens_delta" in name:
            weight.data.add_(torch.randn_like(weight))
    return rx.save(adapted, where / "adapter"), logits(adapted)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("indices", [[3, 5], {"embed_tokens": [3]}, {"lm_head": [3]}], ids=str)
def test_an_adapter_that_trains_single_tokens_is_put_on_its_own_base(
    tmp_path: Path, indices: Any, tied: bool
) -> None:
    adapter, expected = with_tokens(tmp_path, indices, tie_word_embeddings=tied)
    assert read_record(adapter).base_fingerprint == base_fingerprint(llama(tie_word_embeddings=tied))
    assert torch.equal(logits(rx.load(adapter)), expected)
    merged = rx.merge(adapter, tmp_path / "merged")
    assert_same_but_rounding(logits(rx.load(merged)), expected)
    other = llama(tie_word_embeddings=tied)
    other.model.layers[0].mlp.gate_proj.weight.data.mul_(1.5)
    other.save_pretrained(tmp_path / "base")
    refused(adapter, "has other weights", by="load")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("saved", [["embed_tokens", "lm_head"], ["embed_tokens"], None], ids=str)
@pytest.mark.parametrize("rows", [64, 50])
def test_an_adapter_of_resized_embeddings_is_put_on_its_own_base(
    tmp_path: Path, tied: bool, saved: list[str] | None, rows: int
) -> None:
    """New rows are random, and in each process others; peft saves them all, and also loads them exactly."""

    def resized() -> Any:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model.resize_token_embeddings(rows)
        return model

    llama(tie_word_embeddings=tied, vocab_size=61).save_pretrained(tmp_path / "base")
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=saved
    )
    adapted = get_peft_model(extended(model=resized()), config).eval()
    ids = IDS.remainder(50)
    with torch.no_grad():
        expected = adapted(ids).logits
        adapter = rx.save(adapted, tmp_path / "adapter")
        stock = PeftModel.from_pretrained(extended(model=resized()), adapter)
        assert torch.equal(stock(ids).logits, expected)
        assert torch.equal(rx.load(adapter)(ids).logits, expected)
        assert torch.equal(rx.load_adapter(resized(), adapter).eval()(ids).logits, expected)
        merged = rx.merge(adapter, tmp_path / "merged")
        assert_same_but_rounding(AutoModelForCausalLM.from_pretrained(merged)(ids).logits, expected)
    base = llama(tie_word_embeddings=tied, vocab_size=61)
    with pytest.raises(RopeExtendError, match=rf"has {rows} embeddings, and .* has 61; call"):
        rx.load_adapter(base, adapter)
    base.model.layers[0].mlp.gate_proj.weight.data.mul_(1.5)
    base.save_pretrained(tmp_path / "base")
    refused(adapter, "has other weights", by="load")


def test_a_fingerprint_that_also_covers_what_the_adapter_replaces_is_recognised(
    checkpoints: Path, tmp_path: Path
) -> None:
    """That of earlier versions."""
    base = AutoModelForCausalLM.from_pretrained(checkpoints / "base")
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    adapter = rx.save(get_peft_model(extended(model=base), config), tmp_path / "adapter")
    before = read_record(adapter)
    assert before.base_fingerprint != base_fingerprint(llama())
    write_record(adapter, replace(before, base_fingerprint=base_fingerprint(llama())))
    rx.load(adapter)


def test_the_fingerprint_covers_matrices_of_experts() -> None:
    """Mixtral's experts are one tensor with three dimensions."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **COMMON, num_local_experts=4))
    before = base_fingerprint(model)
    experts = model.model.layers[0].mlp.experts.down_proj
    assert experts.ndim == 3
    experts.data.mul_(1.5)
    assert base_fingerprint(model) != before
