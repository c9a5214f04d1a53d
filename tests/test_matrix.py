"""Every method in every family: tables, logits, restoring, decoding, padding, and stock reloading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ALL_FAMILIES, ENCODINGS, FAMILIES, TARGET, TRAINED, EncodingCase, FamilyCase, tiny_model
from peft import get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import rope_extend as rx
from rope_extend.encodings import encoding_class
from rope_extend.loss import NextTokenLoss
from rope_extend.patching import unwrap
from rope_extend.training import lora_config

LENGTH = 80


@pytest.fixture(params=FAMILIES, ids=str, scope="module")
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    case: FamilyCase = request.param
    return tiny_model(case)


@pytest.fixture(params=ENCODINGS, ids=str)
def case(request: pytest.FixtureRequest) -> EncodingCase:
    return request.param


@pytest.fixture
def patch(model: PreTrainedModel, case: EncodingCase) -> Iterator[rx.Patch]:
    with rx.patch_model(model, rx.encoding(case.name, **case.parameters), target_length=TARGET) as patch:
        yield patch


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(1))


def rotary(model: PreTrainedModel) -> Any:
    return unwrap(model).base_model.rotary_emb


@torch.no_grad()
def logits(model: PreTrainedModel, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    return model(input_ids, **inputs).logits


def test_every_supported_family_and_method_has_a_row() -> None:
    assert sorted(case.model_type for case in ALL_FAMILIES) == rx.supported_families()
    assert sorted({case.name for case in ENCODINGS}) == rx.encodings()


def test_tables_equal_the_oracle(model: PreTrainedModel, case: EncodingCase, patch: rx.Patch) -> None:
    for length in (20, 33, 100, TARGET):
        expected, factor = case.oracle(patch.shape, length)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.tensor(
            expected, dtype=torch.float64
        )
        cos, sin = rotary(model)(torch.zeros(1), torch.arange(length)[None])
        assert cos.shape == sin.shape == (1, length, patch.shape.dim)
        # The stock functions work in float32: a relative 2e-7 of the angle, which is at most `length`.
        tolerance = {"rtol": 0, "atol": 1e-6 * length}
        for half in (slice(None, patch.shape.dim // 2), slice(patch.shape.dim // 2, None)):
            torch.testing.assert_close(cos[0, :, half].double(), angles.cos() * factor, **tolerance)
            torch.testing.assert_close(sin[0, :, half].double(), angles.sin() * factor, **tolerance)


def test_logits_change_and_come_back_bit_for_bit(model: PreTrainedModel, case: EncodingCase) -> None:
    input_ids = tokens(2, LENGTH)
    before, config, state = logits(model, input_ids), model.config.to_dict(), list(model.state_dict())
    with rx.patch_model(model, rx.encoding(case.name, **case.parameters), target_length=TARGET) as patch:
        patched = logits(model, input_ids)
        assert list(model.state_dict()) == state
        assert patch.changed == (case.name != "none")
    change = (patched - before).abs().max().item()
    if case.name == "none":
        assert change < 2e-4  # float64 angles against the stock module's float32
    else:
        assert change > 1e-2
    assert torch.equal(logits(model, input_ids), before)
    assert model.config.to_dict() == config


STATIC = [case for case in ENCODINGS if not encoding_class(case.name).depends_on_length]


@pytest.mark.parametrize("case", STATIC, ids=str)
def test_cached_decoding_equals_one_forward(
    model: PreTrainedModel, case: EncodingCase, patch: rx.Patch
) -> None:
    input_ids = tokens(2, LENGTH)
    whole = logits(model, input_ids)
    with torch.no_grad():
        output = model(input_ids[:, :40], use_cache=True)
        steps = [output.logits]
        for position in range(40, LENGTH):
            output = model(
                input_ids[:, position : position + 1], past_key_values=output.past_key_values, use_cache=True
            )
            steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-4)


def test_left_padding_and_batch_equal_the_single_rows(model: PreTrainedModel, patch: rx.Patch) -> None:
    rows = [tokens(1, LENGTH), tokens(1, LENGTH - 17), tokens(1, 21)]
    batch, mask = torch.zeros(3, LENGTH, dtype=torch.long), torch.zeros(3, LENGTH, dtype=torch.long)
    for index, row in enumerate(rows):
        batch[index, -row.shape[1] :], mask[index, -row.shape[1] :] = row, 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    together = logits(model, batch, attention_mask=mask, position_ids=positions)
    for index, row in enumerate(rows):
        alone = logits(model, row)[0]
        torch.testing.assert_close(together[index, -row.shape[1] :], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_lora_trains_in_every_family(family: FamilyCase) -> None:
    """One step of what fine-tuning does: the family's own loss, gradients in the adapter and nowhere else."""
    model = tiny_model(family)
    recipe = rx.Recipe(model="unused", data="unused", output_dir="unused", target_length=TARGET, lora_rank=2)
    input_ids = tokens(1, LENGTH)
    with rx.extend(model, TARGET):
        expected = model(input_ids, labels=input_ids, use_cache=False).loss
        wrapped = get_peft_model(model, lora_config(model, recipe))
        loss = NextTokenLoss(wrapped)(input_ids)
        # Mixture-of-experts models may add a router term of their own to the stock loss; here it is off.
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-4)
        loss.backward()
    trained = {name: weight for name, weight in wrapped.named_parameters() if weight.requires_grad}
    assert trained
    for name, weight in wrapped.named_parameters():
        assert (weight.grad is not None) == ("lora_" in name), name
    assert any(weight.grad.abs().max() > 0 for weight in trained.values())


def test_saved_checkpoint_reloads_in_stock_transformers(
    model: PreTrainedModel, case: EncodingCase, patch: rx.Patch, tmp_path: Path
) -> None:
    input_ids = tokens(1, LENGTH)
    expected = logits(model, input_ids)
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(rotary(stock)).__module__.startswith("transformers.")
    phi3 = model.config.model_type == "phi3"  # whose config class loads only `default` and `longrope`
    if not case.reloads or (phi3 and patch.encoding.depends_on_length):
        # Patching says so; what stock transformers then sees is the model as it was pretrained.
        assert stock.config.rope_parameters["rope_type"] == "default"
        assert stock.config.max_position_embeddings == TRAINED
    else:
        torch.testing.assert_close(logits(stock, input_ids), expected, rtol=0, atol=2e-4)
    # Ours recognises its own work in the reloaded config, and never takes the target for the trained window.
    with rx.patch_model(stock, patch.encoding, target_length=TARGET) as again:
        assert again.shape == patch.shape
        torch.testing.assert_close(logits(stock, input_ids), expected, rtol=0, atol=1e-5)
