"""Encodings in six families: saved, sharded, adapted, merged, exported and verified, with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ENCODINGS, FAMILIES, TARGET, EncodingCase, FamilyCase, tiny_model
from integrity import logits
from peft import LoraConfig, PeftModel, get_peft_model
from tolerances import assert_same_but_rounding
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.export.support import support
from rope_extend.checkpoint.exporting import export
from rope_extend.checkpoint.model_type import MODEL_TYPE
from rope_extend.checkpoint.record import read_record
from rope_extend.models.rotary_tables import shape_of

SIX = [
    case
    for case in FAMILIES
    if case.model_type in ("llama", "qwen3", "gpt_neox", "gemma3_text", "glm", "phi3")
]
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


def same(model: Any, expected: torch.Tensor) -> None:
    assert_same_but_rounding(logits(model), expected)


def patched(model: Any, case: EncodingCase) -> Any:
    rx.patch_model(model, case.build(shape_of(model)), target_length=TARGET)
    return model


def adapted(base: Path, family: FamilyCase, case: EncodingCase) -> Any:
    """A LoRA adapter with random weights on the model of a directory."""
    model = patched(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), case)
    targets = {"gpt_neox": ["query_key_value"], "phi3": ["qkv_proj", "down_proj"]}
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, init_lora_weights=False,
        target_modules=targets.get(family.model_type, ["q_proj", "down_proj"]),
    )  # fmt: skip
    torch.manual_seed(1)
    return get_peft_model(model, config).eval()


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
    live = adapted(tmp_path / "base", family, case)
    tuned = logits(live)
    assert not torch.allclose(tuned, expected, atol=1e-2)
    adapter = rx.save(live, tmp_path / "adapter")
    loaded = rx.load(adapter)
    assert isinstance(loaded, PeftModel)
    same(loaded, tuned)
    same(rx.load_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter), tuned)

    merged = rx.merge(adapter, tmp_path / "merged")
    assert guarded(merged) == guarded(full)
    same(rx.load(merged), logits(live.merge_and_unload()))
    same(rx.load(merged), tuned)
    assert read_record(merged).encoding == encoding
    # As stock transformers loads it, or rope_extend where that does not support the encoding.
    auto = AutoModelForCausalLM.from_pretrained(merged)
    assert (rx.current_patch(auto) is None) == (not guarded(merged))
    same(auto, tuned)

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
        same(stock, reads)
        same(rx.load(output), reads)
