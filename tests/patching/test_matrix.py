"""Methods in families: logits, removal of the patch, decoding, padding, training, stock loading.

`covering` says which pairs of a method and a family each check uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import LENGTH, batch, logits, tokens
from cases import (
    ALL_FAMILIES,
    ALTERNATIVES,
    ENCODINGS,
    FACTOR,
    FAMILIES,
    TARGET,
    TRAINED,
    AlternativeCase,
    EncodingCase,
    FamilyCase,
    plain,
    tiny_model,
)
from covering import families, in_families
from peft import get_peft_model
from tolerances import assert_same_but_rounding
from transformers import AutoModelForCausalLM, PreTrainedModel

import rope_extend as rx
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.checkpoint.exporting import export
from rope_extend.encodings import AbsoluteEncoding, GrowingRope, RopeEncoding, RopeShape
from rope_extend.encodings.composed import ShortOriginal
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.loss import next_token_loss
from rope_extend.models.config_facts import rotary_part
from rope_extend.models.decoders import unwrap
from rope_extend.models.families import family_for
from rope_extend.models.parameters import learned_parameters
from rope_extend.models.rotary_tables import shape_of
from rope_extend.patching import current_patch
from rope_extend.training.lora import TextReach, lora_config, text_reach


@cache
def model_of(model_type: str) -> PreTrainedModel:
    """The model of a family, which all checks share: each patches it and removes the patch."""
    return tiny_model(model_type)


@cache
def reach_of(model_type: str) -> TextReach:
    """What text reaches in a family: a dry run, which does not depend on the encoding."""
    return text_reach(model_of(model_type))


@cache
def stock(model_type: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits and config of the model before any patch: computed once, so each check sees what others left."""
    model = model_of(model_type)
    return logits(model, tokens(2, LENGTH)), model.config.to_dict()


@pytest.fixture(params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> FamilyCase:
    return request.param


@pytest.fixture
def model(family: FamilyCase) -> PreTrainedModel:
    stock(family.model_type)
    return model_of(family.model_type)


@pytest.fixture
def patch(
    family: FamilyCase, model: PreTrainedModel, case: EncodingCase | AlternativeCase
) -> Iterator[rx.Patch]:
    """The model patched with a case. A family that does not support it refuses it, and stays as it was."""
    made = case.build(shape_of(model)) if isinstance(case, EncodingCase) else case.build()
    if refused(family, made):
        before, state = logits(model, tokens(1, 20)), list(model.state_dict())
        with pytest.raises(rx.RopeExtendError), rx.patch_model(model, made, target_length=TARGET):
            logits(model, tokens(1, 20))
        assert torch.equal(logits(model, tokens(1, 20)), before)
        assert list(model.state_dict()) == state
        pytest.skip("refused, and left as it was")
    with rx.patch_model(model, made, target_length=TARGET) as patch:
        yield patch


def rotaries(model: PreTrainedModel) -> list[Any]:
    return list(family_for(model.config.model_type).rotary_modules(unwrap(model).base_model).values())


def rotation(module: Any, model: PreTrainedModel, position_ids: torch.Tensor) -> torch.Tensor:
    """The rotation of each pair of channels by a rotary module, as `cos + i sin`, `[batch, T, pairs]`."""
    family = family_for(model.config.model_type)
    kind = family.layer_type(model.config)
    result = module(torch.zeros(1), position_ids, *([] if kind is None else [kind]))
    if family.layout == "complex":
        return result.to(torch.complex128)
    cos, sin = result
    if family.layout == "once":
        return torch.complex(cos.double(), sin.double())
    axis, sizes = (-2, (2, -1)) if family.layout == "halves" else (-1, (-1, 2))
    both = torch.complex(cos.double(), sin.double()).unflatten(-1, sizes)
    once, again = both.unbind(axis)
    assert torch.equal(once, again)
    return once


def test_every_supported_family_and_method_has_a_row() -> None:
    assert sorted(case.model_type for case in ALL_FAMILIES) == rx.supported_families()
    assert sorted({case.name for case in (*ENCODINGS, *ALTERNATIVES)}) == rx.encoding_names()


def test_the_patched_module_equals_the_stock_module(model: PreTrainedModel) -> None:
    """In layout, dtype and values; bit for bit in layers that are not patched."""
    family = family_for(model.config.model_type)
    config, _ = rotary_part(model.config)
    kind = family.layer_type(model.config)
    kinds = [None] if kind is None else sorted(k for k, v in config.rope_parameters.items() if v)
    positions = [torch.arange(LENGTH)[None], torch.tensor([[40, 3, 77], [0, 1, 2]])]
    if family.sections:
        positions = [p.expand(3, -1, -1) for p in positions]
        positions.append(torch.stack([positions[1][0], positions[1][0] + 5, positions[1][0] + 11]))

    def outputs() -> list[tuple[str | None, torch.Tensor]]:
        found = []
        for module, each, position_ids in product(rotaries(model), kinds, positions):
            if each is None or each in module.layer_types:
                for x in (torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)):
                    result = module(x, position_ids, *([] if each is None else [each]))
                    found += [(each, r) for r in (result if isinstance(result, tuple) else [result])]
        return found

    before = outputs()
    with rx.patch_model(model, rx.encoding("none"), target_length=TARGET):
        assert {type(module).__module__ for module in rotaries(model)} == {"rope_extend.models.rotary"}
        for (stock_kind, stock), (our_kind, ours) in zip(before, outputs(), strict=True):
            assert stock_kind == our_kind
            # One bfloat16 step, where float64 and float32 angles round to neighbours.
            torch.testing.assert_close(
                ours, stock, rtol=0, atol=4e-3 if ours.dtype == torch.bfloat16 else 2e-5
            )
    if kind is not None:
        with rx.extend(model, TARGET, "linear"):
            for (stock_kind, stock), (_, ours) in zip(before, outputs(), strict=True):
                assert torch.equal(ours, stock) == (stock_kind != kind)


@in_families(ENCODINGS)
def test_logits_change_and_come_back_bit_for_bit(
    family: FamilyCase, model: PreTrainedModel, case: EncodingCase, patch: rx.Patch
) -> None:
    input_ids = tokens(2, LENGTH)
    patched, state = logits(model, input_ids), list(model.state_dict())
    assert patch.changed == (case.name != "none")
    patch.remove()
    assert list(model.state_dict()) == state
    before, config = stock(family.model_type)
    change = (patched - before).abs().max().item()
    if case.name == "none":
        assert change < 2e-4  # float64 angles against the stock module's float32
    else:
        assert change > (1e-2 if rotates_otherwise(patch, case) else 0)
    assert torch.equal(logits(model, input_ids), before)
    assert model.config.to_dict() == config


def rotates_otherwise(patch: rx.Patch, case: EncodingCase) -> bool:
    """Whether a method rotates any pair by at least a tenth of a radian more or less over LENGTH tokens."""
    table, factor = case.oracle(patch.shape, LENGTH)
    by = LENGTH * (torch.tensor(table).double() - torch.tensor(plain(patch.shape)).double()).abs().max()
    return bool(by > 0.1) or factor != 1 or patch.encoding.rotates_in_attention


DECODED = ((TRAINED - 2, 4), (TARGET // 4 - 2, 4))
"""Tokens of the prompt, and tokens that are decoded: across the trained window, and across sliding ones."""


def cached_and_whole(
    family: FamilyCase, model: PreTrainedModel, prefilled: int, decoded: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt and of tokens decoded one by one after it, and those of one forward."""
    input_ids = tokens(2, prefilled + decoded)
    whole = logits(model, input_ids)
    with torch.no_grad():
        output = model(input_ids[:, :prefilled], use_cache=True)
        steps = [output.logits]
        for position in range(prefilled, prefilled + decoded):
            here = {} if family.counts_cached else {"position_ids": torch.tensor([[position]])}
            output = model(
                input_ids[:, position : position + 1],
                past_key_values=output.past_key_values,
                use_cache=True,
                **here,
            )
            steps.append(output.logits)
    return torch.cat(steps, dim=1), whole


class Inside(ShortOriginal):
    """Its inner schedule for texts of any length, but applied inside attention."""

    @staticmethod
    def _is_short(shape: RopeShape, seq_len: int | None) -> bool:
        return False

    def table_length(self, shape: RopeShape, lengths: torch.Tensor) -> torch.Tensor:
        return torch.full_like(lengths, TARGET)


def test_rotation_inside_attention_is_that_of_the_rotary_module(model: PreTrainedModel) -> None:
    """The handler knows the pairs, the rotated channels and the rotated layers of each family."""
    input_ids, yarn = tokens(2, LENGTH), rx.encoding("yarn", factor=FACTOR)
    with rx.patch_model(model, yarn):
        expected = logits(model, input_ids)
    if family_for(model.config.model_type).unreachable:
        with pytest.raises(UnsupportedModelError, match="acts inside attention"):
            rx.patch_model(model, Inside(yarn))
        return
    with rx.patch_model(model, Inside(yarn)):
        assert_same_but_rounding(logits(model, input_ids), expected)


def padded_and_alone(model: PreTrainedModel) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of three rows, padded on the left and each alone."""
    data = batch()
    ids, mask = data["input_ids"], data["attention_mask"]
    together = logits(model, ids, attention_mask=mask)  # positions are counted from the mask
    for row, there, found in zip(ids, mask.bool(), together, strict=True):
        yield found[there], logits(model, row[None, there])[0]


@in_families([*ENCODINGS, *ALTERNATIVES], 0, ("length-dependent", "remap", "bias"))
def test_caches_and_padding_change_nothing(
    family: FamilyCase, model: PreTrainedModel, case: EncodingCase | AlternativeCase, patch: rx.Patch
) -> None:
    """Each family under a method that needs positions in attention, and each method in one family."""
    if case.name == "linear_attention" and family.model_type in ONE_STATE:
        with pytest.raises(PatchError, match=r"cannot use this DynamicCache.*use_cache=False"):
            cached_and_whole(family, model, 40, 4)
        return
    if "cache" not in family.limits:
        for prefilled, decoded in DECODED:
            assert_same_but_rounding(*cached_and_whole(family, model, prefilled, decoded))
    if "padding" not in family.limits:
        for padded, alone in padded_and_alone(model):
            assert_same_but_rounding(padded, alone)


LIMITS = [(case, limit) for case in FAMILIES for limit in case.limits]


@pytest.mark.parametrize(("limited", "limit"), LIMITS, ids=str)
def test_limits_are_those_of_the_unpatched_model(limited: FamilyCase, limit: str) -> None:
    model = tiny_model(limited)
    pairs = padded_and_alone(model) if limit == "padding" else [cached_and_whole(limited, model, 40, 4)]
    assert any((one - other).abs().max() > 1e-2 for one, other in pairs)


@pytest.mark.parametrize("family", families())
def test_lora_trains_in_every_family(family: FamilyCase) -> None:
    """One step of fine-tuning: the loss is the family's own, and only the adapter has gradients."""
    model = tiny_model(family)
    recipe = rx.Recipe(model="unused", data="unused", output_dir="unused", target_length=TARGET, lora_rank=2)
    input_ids = tokens(1, LENGTH)
    with rx.extend(model, TARGET):
        expected = model(input_ids, labels=input_ids, use_cache=False).loss
        wrapped = get_peft_model(model, lora_config(model, recipe, reach_of(family.model_type)))
        loss = next_token_loss(wrapped, input_ids)
        # Mixture-of-experts models may add a router term of their own to the stock loss; here it is off.
        assert_same_but_rounding(loss, expected)
        loss.backward()
    trained = {name: weight for name, weight in wrapped.named_parameters() if weight.requires_grad}
    assert trained
    for name, weight in wrapped.named_parameters():
        assert (weight.grad is not None) == ("lora_" in name), name
    assert any(weight.grad.abs().max() > 0 for weight in trained.values())


@in_families(ENCODINGS, 1, few=True)
def test_saved_checkpoint_reloads_in_stock_transformers(
    family: FamilyCase, model: PreTrainedModel, case: EncodingCase, patch: rx.Patch, tmp_path: Path
) -> None:
    input_ids = tokens(1, LENGTH)
    expected = logits(model, input_ids)
    model.save_pretrained(tmp_path)
    loader = AutoModelForCausalLM if family.auto_reloads else type(model)
    loaded = loader.from_pretrained(tmp_path).eval()
    assert type(rotaries(loaded)[0]).__module__.startswith("transformers.")
    config, parameters = rotary_part(loaded.config)
    # A config class that loads only `default` and `longrope`, such as Phi-3's, takes static tables and lists.
    narrow = family_for(model.config.model_type).stock_rope_types is not None
    grows = isinstance(patch.encoding, GrowingRope)
    carried = case.reloads and (family.reloads is None or str(case) in family.reloads)
    if not carried or (narrow and grows):
        # Patching warns about it. Stock transformers then loads the model as it was pretrained.
        assert parameters["rope_type"] in ("default", "proportional")
        assert parameters.get("factor", 1.0) == 1.0
        assert config.max_position_embeddings == TRAINED
    else:
        # Beyond the trained window, stock transformers goes by the longest row, and we by each query.
        same = TRAINED if patch.encoding.rotates_in_attention else LENGTH
        read = logits(loaded, input_ids[:, :same])
        assert_same_but_rounding(read, expected[:, :same])
    # The plugin recognises its own config, and never takes the target for the trained window.
    with rx.patch_model(loaded, patch.encoding, target_length=TARGET) as again:
        assert again.shape == patch.shape
        assert_same_but_rounding(logits(loaded, input_ids), expected)


NO_ONE_STREAM = ("gemma3n_text", "hrm_text", "hy_v4")
"""Families without one stream of vectors into the first layer, to which absolute vectors could be added."""
NO_SUMS = (
    "afmoe", "cohere2", "cohere2_moe", "cwm", "doge", "exaone4", "exaone_moe", "flint", "gemma2", "gpt_oss",
    "granite_swa", "granitemoe_swa", "kolibri1", "llama4_text", "mistral", "moshi", "vaultgemma",
)  # fmt: skip
"""Families with a sliding window or weights in the mask, which linear attention does not support."""
ONE_STATE = ("diffllama", "falcon_h1", "hrm_text", "zaya")
"""Families whose cache has no entry for the state of linear attention, or one entry for several layers."""


def refused(family: FamilyCase, made: rx.Encoding) -> bool:
    """Whether a family cannot be patched with an encoding."""
    if isinstance(made, AbsoluteEncoding):
        return family.model_type in NO_ONE_STREAM
    if made.name == "linear_attention" and family.model_type in NO_SUMS:
        return True
    shape = RopeShape(16, 10_000.0, TRAINED)
    inside = not isinstance(made, RopeEncoding) or made.rotates_in_attention or made.scales_logits(shape)
    return inside and bool(family_for(family.model_type).unreachable)


@in_families(ALTERNATIVES)
def test_an_alternative_changes_the_logits_and_is_removed_bit_for_bit(
    family: FamilyCase, model: PreTrainedModel, case: AlternativeCase, patch: rx.Patch
) -> None:
    input_ids = tokens(2, LENGTH)
    patched, weights = logits(model, input_ids), list(model.state_dict())
    assert patch.changed
    for module in rotaries(model):
        (values,) = rotation(module, model, torch.arange(LENGTH)[None])
        assert (values == 1).all()
    config = model.config.to_dict()
    patch.remove()
    before, _ = stock(family.model_type)
    state = list(model.state_dict())
    assert (patched - before).abs().max() > 1e-2
    assert [name for name in weights if "rope_extend" not in name] == state
    with rx.patch_model(model, case.build(), target_length=TARGET):
        assert torch.equal(logits(model, input_ids), patched)
        assert model.config.to_dict() == config
    assert torch.equal(logits(model, input_ids), before)


@in_families(ALTERNATIVES, 2, few=True)
def test_an_alternative_is_saved_and_loaded_by_the_plugin_alone(
    family: FamilyCase, model: PreTrainedModel, case: AlternativeCase, patch: rx.Patch, tmp_path: Path
) -> None:
    learned = learned_parameters(model)
    with torch.no_grad():
        for value in learned.values():
            value.add_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(2)))
    input_ids = tokens(1, LENGTH)
    expected = logits(model, input_ids)
    if not family.auto_reloads:
        pytest.skip("AutoModelForCausalLM does not load it")
    directory = rx.save(model, tmp_path / "saved")
    assert (directory / "encoding.safetensors").exists() == bool(learned)
    for loaded in (rx.load(directory), AutoModelForCausalLM.from_pretrained(directory).eval()):
        assert_same_but_rounding(logits(loaded, input_ids), expected)
        assert current_patch(loaded).encoding == patch.encoding
    # A process without rope_extend fails on a model type that it does not know.
    assert '"model_type": "rope_extend"' in (directory / "config.json").read_text()
    for target in TARGETS:
        with pytest.raises(rx.RopeExtendError, match=rf"cannot be exported to {target}.*rope_extend\.load"):
            export(directory, tmp_path / target, target, gguf=tmp_path if target == "llama.cpp" else None)
        assert not (tmp_path / target).exists()
