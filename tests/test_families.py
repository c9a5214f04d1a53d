"""The list of families: complete, documented, and what sets the special shapes apart."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from cases import FAMILIES, TARGET, FamilyCase, tiny_model
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.families import REFUSED, adapter_for
from rope_extend.inspection import rotary_part, shape_of

ROOT = Path(__file__).parent.parent
NAMES = """
afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam bitnet blt cohere cohere2 cohere2_moe
cwm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots3_note_text ernie4_5 ernie4_5_moe
exaone4 exaone_moe falcon falcon_h1 flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text
gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2
gpt_neox gpt_neox_japanese gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
hrm_text hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 lfm3 llama
llama4_text longcat_flash mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral3
mistral mixtral mllama modernbert-decoder moshi moss_transcribe_diarize nanochat olmo olmo2 olmo3
olmo_hybrid olmoe persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text
qwen3_5_text qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3 solar_open stablelm starcoder2
vaultgemma youtu zaya
"""
CAUSAL = NAMES.split()
"""Every causal family of transformers 5.23 that has a rotary module."""


def case_of(model_type: str) -> FamilyCase:
    """The row of a family; skips where the installed transformers does not know it."""
    found = [case for case in FAMILIES if case.model_type == model_type]
    if not found:
        pytest.skip(f"no {model_type} in this version of transformers")
    return found[0]


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def test_every_causal_family_is_supported_or_refused_with_its_reason() -> None:
    assert len(CAUSAL) == len(set(CAUSAL)) == 110
    assert set(CAUSAL) == {*rx.supported_families(), *REFUSED}
    assert not set(rx.supported_families()) & set(REFUSED)
    assert len(rx.supported_families()) >= 100
    assert all(len(reason) > 20 for reason in REFUSED.values())


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refusal_gives_the_reason(model_type: str) -> None:
    with pytest.raises(rx.UnsupportedModelError, match=REFUSED[model_type][:40]):
        adapter_for(model_type)


def test_the_page_of_families_is_what_the_code_says() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "families.py"))["page"]()
    assert (ROOT / "docs" / "families.md").read_text(encoding="utf-8") == page, "run scripts/families.py"


def test_a_model_without_a_layer_of_the_extended_kind_is_refused() -> None:
    case = case_of("laguna")
    sliding = {"layer_types": ["sliding_attention"] * 2}
    model = tiny_model(FamilyCase(case.model_type, {**case.config, **sliding}))
    with pytest.raises(rx.UnsupportedModelError, match="for layers of kind full_attention"):
        rx.extend(model, TARGET)


def test_native_form_that_stock_would_misread_is_not_written(tmp_path: Path) -> None:
    """For layers of several kinds, transformers looks for YaRN's `truncate` outside of their parameters."""
    model = tiny_model(case_of("olmo3"))
    options = {"truncate": False, "beta_fast": 4.0, "beta_slow": 0.5}
    with (
        rx.patch_model(model, rx.encoding("yarn", factor=8.0, **options), target_length=TARGET),
        torch.no_grad(),
    ):
        assert rotary_part(model.config)[1]["rope_type"] == "longrope"
        expected = model(tokens(1, 80)).logits
        model.save_pretrained(tmp_path)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(stock(tokens(1, 80)).logits, expected, rtol=0, atol=2e-4)
    with rx.patch_model(model, rx.encoding("yarn", factor=8.0), target_length=TARGET):
        assert rotary_part(model.config)[1]["rope_type"] == "yarn"


def test_scale_of_the_softmax_stays_what_it_was(tmp_path: Path) -> None:
    """DeepSeek's attention reads `mscale_all_dim` for itself, so it is never written, and never lost."""
    case = case_of("deepseek_v2")
    trained = {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    ours = rx.encoding("yarn", factor=8.0, mscale=0.7, mscale_all_dim=0.3)
    for config in ({}, {"rope_parameters": trained, "max_position_embeddings": 128}):
        model = tiny_model(FamilyCase(case.model_type, {**case.config, **config}))
        with rx.patch_model(model, ours, target_length=TARGET), torch.no_grad():
            expected = model(tokens(1, 80)).logits
            model.save_pretrained(tmp_path)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            torch.testing.assert_close(stock(tokens(1, 80)).logits, expected, rtol=0, atol=2e-4)


def test_proportional_rotary_counts_the_pairs_that_turn() -> None:
    """Gemma 4 turns a quarter of the pairs, with exponents over all channels: `theta^(1/4)` over those."""
    model = tiny_model(case_of("gemma4_text"))
    shape = shape_of(model)
    _, parameters = rotary_part(model.config)
    assert (shape.dim, shape.trained_length) == (8, 32)
    assert shape.theta == pytest.approx(parameters["rope_theta"] ** 0.25)
    stock = [parameters["rope_theta"] ** (-2 * i / 32) for i in range(4)]
    assert shape.inv_freq().tolist() == pytest.approx(stock)


def test_lengths_of_blt_count_patches() -> None:
    model = tiny_model(case_of("blt"))
    before = model.config.to_dict()
    assert shape_of(model).trained_length == model.config.global_config.max_position_embeddings == 32
    with rx.extend(model, TARGET):
        assert model.config.global_config.max_position_embeddings == TARGET
        assert model.config.max_position_embeddings == before["max_position_embeddings"]
        assert model.config.encoder_config.max_position_embeddings == 24_576


def test_positions_in_one_part_are_those_in_three_equal_parts() -> None:
    model = tiny_model(case_of("qwen3_5_text"))
    ids = torch.arange(5)[None] * 100
    with rx.extend(model, TARGET):
        rotary = model.base_model.rotary_emb
        for one, three in zip(
            rotary(torch.zeros(1), ids), rotary(torch.zeros(1), ids.expand(3, -1, -1)), strict=True
        ):
            assert torch.equal(one, three)


def test_a_patch_says_which_layers_it_leaves_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(case_of("gemma3_text"))
    with caplog.at_level("INFO", logger="rope_extend"), rx.extend(model, TARGET):
        assert "only full_attention layers are extended" in caplog.text


@pytest.mark.parametrize("model_type", ["gemma3_text", "moshi"])
def test_a_model_moved_to_meta_and_back_under_a_patch_is_whole_again(model_type: str) -> None:
    """What `from_pretrained` does to the tables of rotary modules, ours and the stock ones inside."""
    model = tiny_model(case_of(model_type))
    with torch.no_grad(), rx.extend(model, TARGET):
        expected, state = model(tokens(1, 80)).logits, {k: v.clone() for k, v in model.state_dict().items()}
        model.to("meta").to_empty(device="cpu")
        for module in model.modules():
            if "RotaryEmbedding" in type(module).__name__:
                model._init_weights(module)
        model.load_state_dict(state, strict=False)
        for name, buffer in tiny_model(case_of(model_type)).named_buffers():
            if "inv_freq" not in name:
                model.get_buffer(name).copy_(buffer)
        torch.testing.assert_close(model(tokens(1, 80)).logits, expected, rtol=0, atol=1e-5)
    assert not hasattr(model.config, "rope_extend")
