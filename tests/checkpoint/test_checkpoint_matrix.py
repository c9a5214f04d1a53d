"""Encodings and families: saved, sharded, adapted, merged and exported, with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ENCODINGS, FAMILIES, TARGET, EncodingCase, FamilyCase, family, tiny_model
from integrity import logits
from peft import PeftModel, get_peft_model
from tolerances import assert_same_but_rounding
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.export.support import support
from rope_extend.checkpoint.exporting import export
from rope_extend.checkpoint.model_type import MODEL_TYPE
from rope_extend.checkpoint.record import read_record
from rope_extend.models.decoders import unwrap
from rope_extend.models.rotary_tables import shape_of
from rope_extend.training.lora import lora_config

SIX = [family(name) for name in ("gemma3_text", "glm", "gpt_neox", "llama", "phi3", "qwen3")]
"""With a table for each kind of layer, neighbouring pairs, some of the channels, plain, a config class that
refuses most `rope_type`s, and normalised queries and keys."""
FIRST = {case.name: case for case in reversed(ENCODINGS)}
"""The first case of each method."""


REFUSED = ("phi3", "dynamic_ntk")
"""A pair that is saved in addition: a `rope_type` of transformers that the family's own config refuses."""


def mark(family: int, encoding: int) -> Any:
    """Every sixth method in one family by default, each encoding in one when slow, in all with `--full`."""
    turn, case = (family - encoding) % len(SIX), ENCODINGS[encoding]
    if (str(SIX[family]), str(case)) == REFUSED:
        return pytest.mark.slow
    if turn == 0 and FIRST[case.name] is case and list(FIRST).index(case.name) % 6 == 0:
        return ()
    return pytest.mark.full if turn else pytest.mark.slow


PAIRS = [
    pytest.param(family, case, id=f"{family}-{case}", marks=mark(number, index))
    for number, family in enumerate(SIX)
    for index, case in enumerate(ENCODINGS)
]
PAIRS += [
    pytest.param(family, FIRST[method], id=f"{family}-{method}", marks=marks)
    for family in FAMILIES
    if family.auto_reloads and family not in SIX
    for method, marks in (("yarn", pytest.mark.slow), ("ntk_by_parts", pytest.mark.full))
]


def same(model: Any, expected: torch.Tensor, *, merged: bool = False) -> None:
    found = logits(model)
    if merged and unwrap(model).config.model_type == "hrm_text":  # it is recurrent, and amplifies rounding
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-2)
    else:
        assert_same_but_rounding(found, expected)


def patched(model: Any, case: EncodingCase) -> Any:
    rx.patch_model(model, case.build(shape_of(model)), target_length=TARGET)
    return model


def adapted(base: Path, case: EncodingCase) -> Any:
    """An adapter with random weights on the default modules of a recipe, on the model of a directory."""
    model = patched(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), case)
    recipe = rx.Recipe(model="unused", data="unused", output_dir="unused", target_length=TARGET, lora_rank=2)
    adapted = get_peft_model(model, lora_config(model, recipe)).eval()
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted


def guarded(directory: Path) -> bool:
    return json.loads((directory / "config.json").read_text())["model_type"] == MODEL_TYPE


@pytest.mark.parametrize(("family", "case"), PAIRS)
def test_logits_survive_every_way_of_saving(family: FamilyCase, case: EncodingCase, tmp_path: Path) -> None:
    model = patched(tiny_model(family), case)
    expected, encoding = logits(model), rx.current_patch(model).encoding

    full = rx.save(model, tmp_path / "full", max_shard_size="20KB")
    assert len(list(full.glob("model-*.safetensors"))) > 1
    loaded = rx.load(full)
    same(loaded, expected)
    again, patch = rx.current_patch(loaded), rx.current_patch(model)
    assert (again.encoding, again.shape, again.target_length) == (encoding, patch.shape, TARGET)
    # Stock transformers would load this with the old window, so only the plugin loads it.
    if guarded(full):
        same(AutoModelForCausalLM.from_pretrained(full), expected)

    tiny_model(family).save_pretrained(tmp_path / "base")
    live = adapted(tmp_path / "base", case)
    tuned = logits(live)
    assert not torch.allclose(tuned, expected, atol=1e-2)
    adapter = rx.save(live, tmp_path / "adapter")
    loaded = rx.load(adapter)
    assert isinstance(loaded, PeftModel)
    same(loaded, tuned)
    same(rx.load_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter), tuned)

    merged = rx.merge(adapter, tmp_path / "merged")
    assert guarded(merged) == guarded(full)
    same(rx.load(merged, dtype=torch.float32), tuned, merged=True)
    assert read_record(merged).encoding == encoding
    # As stock transformers loads it, or rope_extend where that does not support the encoding.
    auto = AutoModelForCausalLM.from_pretrained(merged)
    assert (rx.current_patch(auto) is None) == (not guarded(merged))
    same(auto, tuned, merged=True)

    for source, reads in ((full, expected), (merged, tuned)):
        output = tmp_path / f"{source.name}-exported"
        record = read_record(source)
        found = support(encoding, record.shape, "transformers", family.model_type, target_length=TARGET)
        refusal = ""
        try:
            export(source, output, verify=False)
        except RopeExtendError as error:
            refusal = str(error)
        if refusal:  # of the encoding, or of a config class of this family
            assert found.reason in refusal
            assert not output.exists()
            assert not found.possible or guarded(source)
            continue
        assert found.possible
        stock = AutoModelForCausalLM.from_pretrained(output)
        assert rx.current_patch(stock) is None
        same(stock, reads, merged=True)
        same(rx.load(output), reads, merged=True)
