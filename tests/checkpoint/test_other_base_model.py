"""An adapter is only put on the base model that it was trained on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import COMMON, llama
from integrity import RECORD, extended, logits, other_weights, refused, rewritten, tuned, with_lora
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
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
    other_weights(llama()).save_pretrained(where / "base")
    for name in ("load", "merge", "export", "verify"):
        refused(adapter, r"was trained on .* has other weights", by=name)
    assert not torch.equal(logits(rx.load(adapter, check_base=False)), expected)


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
    adapter = rx.save(tuned(half), tmp_path / "adapter")
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
    other_weights(AutoModelForCausalLM.from_pretrained(half, dtype=torch.float16)).save_pretrained(half)
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
    adapter = rx.save(tuned(tmp_path / "base"), tmp_path / "adapter")
    rx.load(adapter)
    rewritten(
        tmp_path / "base" / "config.json", lambda data: data["rope_parameters"].pop("rope_theta") and None
    )
    for name in ("load", "merge", "export", "verify"):
        refused(adapter, r"rope_theta|base 500000.*this one has .* base 10000", by=name)


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
