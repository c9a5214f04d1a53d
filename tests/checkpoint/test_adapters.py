"""Adapters of every kind: saved, loaded in each way and merged, they compute what the live model did."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import COMMON, llama
from covering import few
from integrity import extended, logits, other_weights, tensors_of
from peft import (
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from tolerances import assert_same_but_rounding
from transformers import AutoConfig, AutoModelForCausalLM

import rope_extend as rx
from rope_extend.models.parameters import learned_parameters


def lora(*targets: str, **options: Any) -> LoraConfig:
    given = {"r": 2, "init_lora_weights": False, **options}
    return LoraConfig(task_type="CAUSAL_LM", target_modules=list(targets or ("q_proj",)), **given)


def mixtral() -> Any:
    """Its files have one tensor for each expert, and its module has one for all of them."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **COMMON, num_local_experts=4))


@dataclass(frozen=True)
class Case:
    """An adapter, and what it is put on."""

    adapter: PeftConfig
    base: dict[str, Any] = field(default_factory=dict)
    make: Callable[..., Any] = llama
    method: str = "yarn"
    rows: int | None = None
    """Embeddings of the base model after it was resized: new ones are random, in each process others."""
    exact: bool = True
    """Whether loading is exact: peft subtracts some adapters from the base model, also on loading."""
    unmerged: str = ""
    """Why the adapter is not merged."""


BIASES, TIED = {"attention_bias": True}, {"tie_word_embeddings": True}
ALL_PARTS = ["embed_tokens", "lm_head"]
KINDS = {
    "lora": Case(lora("q_proj", "down_proj")),
    "rslora": Case(lora("q_proj", "down_proj", use_rslora=True, r=4)),
    "dora": Case(lora("q_proj", "down_proj", use_dora=True)),
    "patterns": Case(
        lora("q_proj", "down_proj", rank_pattern={"q_proj": 4}, alpha_pattern={"down_proj": 5})
    ),
    "lora_bias": Case(lora(lora_bias=True), BIASES),
    "bias": Case(lora(bias="all"), BIASES),
    "saved": Case(lora(modules_to_save=["norm", "lm_head"])),
    "embeddings": Case(lora("embed_tokens", "lm_head", "q_proj")),
    "embeddings-dora": Case(lora("embed_tokens", use_dora=True)),
    "tied, saved": Case(lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True), TIED),
    "parameters": Case(lora("q_proj", target_parameters=["mlp.up_proj.weight"])),
    "learned": Case(lora(), method="fire"),
    "mixtral": Case(lora(), make=mixtral),
    "experts": Case(lora(target_parameters=["mlp.experts.down_proj"]), make=mixtral),
    **{name: Case(lora(init_lora_weights=name), exact=name == "gaussian")
       for name in ("pissa", "olora", "gaussian")},
    **{f"tokens {indices} {tied}": Case(lora(trainable_token_indices=indices), tied)
       for indices in ([3, 5], {"embed_tokens": [3]}, {"lm_head": [3]}) for tied in ({}, TIED)},
    **{f"resized {rows} {saved} {tied}": Case(
        lora(modules_to_save=saved), {"vocab_size": 61, **tied}, rows=rows)
       for rows in (64, 50) for saved in (ALL_PARTS, ["embed_tokens"], None) for tied in ({}, TIED)},
    "replicated": Case(lora(layer_replication=[(0, 2), (0, 2)]), unmerged="repeats layers .*use it with"),
    **{name: Case(adapter, unmerged=f"{adapter.peft_type.value} adapter and only LoRA is merged")
       for name, adapter in {
           "ia3": IA3Config(task_type="CAUSAL_LM", target_modules=["v_proj"], feedforward_modules=[]),
           "vera": VeraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]),
           "norms": LNTuningConfig(task_type="CAUSAL_LM", target_modules=["norm"]),
           "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
       }.items()},
}  # fmt: skip
HALF = list(KINDS)[: list(KINDS).index("parameters")]
CASES = [*((name, torch.float32) for name in KINDS), *((name, torch.bfloat16) for name in HALF)]


def live(case: Case, base: Any) -> PeftModel:
    """The adapter on its base model, with other values than the first in all that it trains."""
    model = get_peft_model(extended(case.method, base), copy.deepcopy(case.adapter)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight)) if "magnitude" not in name else weight.mul_(1.2)
        for weight in learned_parameters(model).values():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


@pytest.mark.parametrize(("name", "dtype"), few(CASES, 5), ids=str)
def test_an_adapter_survives_every_way_of_saving_and_loading(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    case = KINDS[name]
    case.make(**case.base).to(dtype).save_pretrained(tmp_path / "base")

    def base() -> Any:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        if case.rows:
            model.resize_token_embeddings(case.rows)
        return model

    model = live(case, base())
    adapter, expected = rx.save(model, tmp_path / "adapter"), logits(model)
    loads = [lambda: rx.load(adapter, dtype=torch.float32), lambda: rx.load_adapter(base(), adapter)]
    if case.method == "yarn":
        loads.append(lambda: PeftModel.from_pretrained(extended(model=base()), adapter))
    for load in loads:
        if case.exact:
            assert torch.equal(logits(load()), expected)
        else:
            assert_same_but_rounding(logits(load()), expected)
    if case.unmerged:
        with pytest.raises(rx.RopeExtendError, match=case.unmerged):
            rx.merge(adapter, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
    else:
        check_merge(case, rx.merge(adapter, tmp_path / "merged"), tmp_path / "base", model, dtype, expected)
    if case.rows:
        with pytest.raises(rx.RopeExtendError, match=rf"has {case.rows} embeddings, and .* has 61; call"):
            rx.load_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter)
    if case.make is llama:
        other = other_weights(base())  # some adapters change it before the refusal
        before = {key: tensor.clone() for key, tensor in other.state_dict().items()}
        with pytest.raises(rx.RopeExtendError, match="has other weights"):
            rx.load_adapter(other, adapter)
        assert other.state_dict().keys() == before.keys()
        assert all(torch.equal(tensor, before[key]) for key, tensor in other.state_dict().items())


def check_merge(
    case: Case, merged: Path, base: Path, model: PeftModel, dtype: torch.dtype, expected: torch.Tensor
) -> None:
    """The weights are those of peft's own merge in float32, rounded once, and of others the base model's."""
    loaded, stock = rx.load(merged, dtype="auto"), AutoModelForCausalLM.from_pretrained(merged)
    if dtype == torch.float32:
        assert_same_but_rounding(logits(loaded), expected)
        assert_same_but_rounding(logits(stock), expected)
    assert (rx.current_patch(stock) is None) == (case.method == "yarn")
    found, before = tensors_of(merged), tensors_of(base)
    head = {"lm_head.weight"}  # an adapter on one of two tied matrices takes them apart
    assert found.keys() - head == before.keys() - head
    assert (stock.lm_head.weight is stock.model.embed_tokens.weight) == (found.keys().isdisjoint(head))
    assert stock.config.tie_word_embeddings == found.keys().isdisjoint(head)
    assert not any("rope_extend" in name for name in found)
    if case.make is not llama or case.rows or not case.exact or found.keys() != before.keys():
        return  # peft's own merge changes both of two tied matrices
    oracle = model.merge_and_unload().state_dict()
    for name, tensor in found.items():
        assert tensor.dtype == dtype, name
        assert torch.equal(tensor, oracle[name].to(dtype)), name
        if torch.equal(oracle[name], before[name].float()):
            assert torch.equal(tensor, before[name]), name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in found.items())


@pytest.mark.filterwarnings("ignore:.*PEFT for a second time", "ignore:Already found a `peft_config`")
def test_an_adapter_around_an_adapter_is_refused(tmp_path: Path) -> None:
    """Its weights have names that no loader finds."""
    model = get_peft_model(get_peft_model(extended("yarn"), lora()), lora())
    with pytest.raises(rx.RopeExtendError, match=r"around another PeftModel.*call get_peft_model once"):
        rx.save(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
