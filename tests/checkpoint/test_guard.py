"""A plugin-only checkpoint stops every stock reader, and rope_extend reads it as it was saved."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FAMILIES, TARGET, FamilyCase, llama, tiny_config
from huggingface_hub.errors import StrictDataclassError
from integrity import extended, logits
from tolerances import assert_same_but_rounding
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.model_type import MODEL_TYPE, guarded_config, plain_config


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A plugin-only checkpoint and its logits. Tests only read it."""
    model = extended("drope")
    return rx.save(model, tmp_path_factory.mktemp("guarded") / "model"), logits(model)


def config_of(directory: Path) -> Any:
    return json.loads((directory / "config.json").read_text())


def stock_config(family: FamilyCase) -> dict[str, Any]:
    """The contents of `config.json` of the family."""
    config = tiny_config(family)
    config.architectures = ["FamilyForCausalLM"]
    data: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return data


def test_the_config_of_every_family_is_restored_exactly() -> None:
    for family in FAMILIES:
        data = stock_config(family)
        other = guarded_config(data)
        assert other["architectures"] != data["architectures"] == ["FamilyForCausalLM"]
        assert guarded_config(other) == other
        assert plain_config(other) == data == stock_config(family)
        del data["architectures"]
        assert plain_config(guarded_config(data)) == data


SOME = ("llama", "gemma3", "zaya", "phi3", "phimoe", "blt", "mllama", "deepseek_v3")
"""One family of each form of rotary parameters, by layer type and in nested configs, and strict configs."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f.model_type in SOME else pytest.mark.slow, id=str(f)) for f in FAMILIES],
)
def test_a_class_that_ignores_the_model_type_stops_at_the_rotary_parameters(family: FamilyCase) -> None:
    """`LlamaForCausalLM.from_pretrained` only warns of another model type."""
    config, refusals = tiny_config(family), (KeyError, ValueError, StrictDataclassError)
    with pytest.raises(refusals, match=f"{MODEL_TYPE}|rope_parameters"), torch.device("meta"):
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](
            type(config).from_dict(guarded_config(stock_config(family)))
        )


def test_stock_readers_of_a_saved_checkpoint_stop(guarded: tuple[Path, torch.Tensor]) -> None:
    directory, _ = guarded
    with pytest.raises(KeyError, match=MODEL_TYPE):
        LlamaForCausalLM.from_pretrained(directory)
    # llama.cpp's converter reads `architectures`; transformers 4 reads `rope_scaling`.
    config = config_of(directory)
    assert config["model_type"] == MODEL_TYPE
    assert config["architectures"] == ["RopeExtendForCausalLM"]
    assert config["rope_parameters"] == config["rope_scaling"] == {"rope_type": MODEL_TYPE}


def test_rope_extend_reads_it_and_writes_it_again(guarded: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    directory, expected = guarded
    model = rx.load(directory)
    for loaded in (model, AutoModelForCausalLM.from_pretrained(directory)):
        assert torch.equal(logits(loaded), expected)
        assert loaded.config.architectures == ["LlamaForCausalLM"]
        assert not any("stock" in key for key in loaded.config.to_dict())
    assert rx.info(directory).encoding == str(rx.current_patch(model).encoding)
    again = rx.save(model, tmp_path / "again")
    assert torch.equal(logits(rx.load(again)), expected)
    assert config_of(again) == config_of(directory)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda config: pickle.loads(pickle.dumps(config))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_a_copy_of_the_config_loads_the_encoding_too(
    guarded: tuple[Path, torch.Tensor], copied: Callable[[Any], Any]
) -> None:
    directory, expected = guarded
    config = AutoConfig.from_pretrained(directory)
    other = copied(config)
    assert type(other) is type(config)
    assert other.to_dict() == config.to_dict()
    other.use_cache = not config.use_cache
    assert config.use_cache is not other.use_cache  # a copy of its own
    other.use_cache = config.use_cache
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(directory, config=other)), expected)


def test_a_family_s_own_class_refuses_the_config(guarded: tuple[Path, torch.Tensor]) -> None:
    """It would make the model of the family's config, without the encoding."""
    directory, _ = guarded
    config = AutoConfig.from_pretrained(directory)
    for make in (
        lambda: LlamaForCausalLM.from_pretrained(directory, config=config),
        lambda: LlamaForCausalLM(config),
    ):
        with pytest.raises(RopeExtendError, match=r"without its encoding; load it with rope_extend.load"):
            make()
    assert config.model_type == "llama"  # and the config still loads
    AutoModelForCausalLM.from_pretrained(directory, config=config, attn_implementation="eager")


@pytest.mark.parametrize("parameters", [{}, {"long_factor": (1.0, *(4.0,) * 7)}], ids=["ntk", "longrope"])
def test_a_table_for_each_query_is_guarded(tmp_path: Path, parameters: dict[str, Any]) -> None:
    """Stock transformers would use the table of the longest row of a batch."""
    model = llama()
    method = "longrope" if parameters else "dynamic_ntk"
    rx.patch_model(model, rx.encoding(method, factor=8.0, **parameters), target_length=TARGET)
    directory = rx.save(model, tmp_path / "saved")
    assert config_of(directory)["model_type"] == MODEL_TYPE
    assert_same_but_rounding(logits(AutoModelForCausalLM.from_pretrained(directory)), logits(model))
