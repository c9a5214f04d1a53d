"""The list of families is complete and documented; families with special shapes behave as described."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path

import pytest
import torch
import transformers
from batches import tokens
from cases import FAMILIES, TARGET, FamilyCase, tiny_config, tiny_model
from rotary_cases import TRAINED, scaling
from tolerances import assert_same_but_rounding
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import rope_extend as rx
from rope_extend.models.config_facts import rotary_part
from rope_extend.models.decoders import decoder_layers
from rope_extend.models.families import REFUSED, family_for
from rope_extend.models.rotary_tables import shape_of

ROOT = Path(__file__).parents[2]
MODELS = Path(transformers.__file__).parent / "models"


def rotates(model_type: str) -> bool:
    """Whether a family of the installed transformers has a rotary module for text, by its source."""
    folder = model_type_to_module_name(model_type)
    source = MODELS / folder / f"modeling_{folder}.py"
    return source.exists() and bool(re.search(r"(?<!Vision)(?<!Audio)RotaryEmbedding", source.read_text()))


def case_of(model_type: str) -> FamilyCase:
    """The row of a family; skips if the installed transformers does not have it."""
    found = [case for case in FAMILIES if case.model_type == model_type]
    if not found:
        pytest.skip(f"no {model_type} in this version of transformers")
    return found[0]


def test_every_causal_family_is_supported_or_refused_with_its_reason() -> None:
    """By transformers' own list, in each version. A larger model counts by its text decoder."""
    listed = {*rx.supported_families(), *REFUSED}
    rotating = {
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING and rotates(name)
    }
    assert len(rotating) > 80
    for name in rotating - listed:
        text = getattr(CONFIG_MAPPING[name], "sub_configs", {}).get("text_config")
        assert getattr(text, "model_type", None) in listed, name
    assert not set(rx.supported_families()) & set(REFUSED)
    assert len(rx.supported_families()) >= 100
    assert all(len(reason) > 20 for reason in REFUSED.values())


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refusal_gives_the_reason(model_type: str) -> None:
    with pytest.raises(rx.UnsupportedModelError, match=REFUSED[model_type][:40]):
        family_for(model_type)


def test_the_page_of_families_matches_the_code() -> None:
    page = runpy.run_path(str(ROOT / "tools" / "write_families.py"))["page"]()
    assert (ROOT / "docs" / "families.md").read_text(encoding="utf-8") == page, "run tools/write_families.py"


def test_a_model_without_a_layer_of_the_extended_type_is_refused() -> None:
    case = case_of("laguna")
    sliding = {"layer_types": ["sliding_attention"] * 2}
    model = tiny_model(FamilyCase(case.model_type, {**case.config, **sliding}))
    with pytest.raises(rx.UnsupportedModelError, match="for layers of type full_attention"):
        rx.extend(model, TARGET)


def test_a_native_form_that_stock_misreads_is_not_written(tmp_path: Path) -> None:
    """With several layer types, transformers looks for YaRN's `truncate` outside of their parameters."""
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
        assert_same_but_rounding(stock(tokens(1, 80)).logits, expected)
    with rx.patch_model(model, rx.encoding("yarn", factor=8.0), target_length=TARGET):
        assert rotary_part(model.config)[1]["rope_type"] == "yarn"


OWN, OTHER = {"mscale": 0.7, "mscale_all_dim": 1.3}, {"mscale": 1.0, "mscale_all_dim": 0.5}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
_LATENT = """
axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 longcat_flash
minicpm3 sarvam_mla youtu
"""
LATENT = _LATENT.split()


def test_every_family_whose_softmax_scale_depends_on_the_factor_has_a_row() -> None:
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    found = {path.parent.name for path in files if "yarn_apply_mscale" in path.read_text(encoding="utf-8")}
    assert found & set(rx.supported_families()) <= set(LATENT)


@pytest.mark.parametrize("model_type", LATENT)
def test_the_softmax_scale_is_that_of_the_stock_model_with_the_same_scaling(
    model_type: str, tmp_path: Path
) -> None:
    """`mscale_all_dim` also scales the logits of channels that do not rotate. YaRN keeps the model's own."""
    case, ids = case_of(model_type), tokens(1, 80)
    for own in ({}, OWN):
        before = scaling("yarn", factor=4.0, **own) if own else PLAIN
        config = {"rope_parameters": before, "max_position_embeddings": 128 if own else TRAINED}
        model = tiny_model(FamilyCase(model_type, {**case.config, **config}))
        with torch.no_grad():
            unpatched = model(ids).logits
        for ours, expected in (
            (rx.encoding("none"), PLAIN),
            (rx.encoding("linear", factor=8.0), {**PLAIN, "rope_type": "linear", "factor": 8.0}),
            (rx.encoding("yarn", factor=8.0), scaling("yarn", **own)),
            (rx.encoding("yarn", factor=8.0, **OTHER), scaling("yarn", **OTHER)),
            (rx.encoding("yarn", factor=8.0, ramp="turns", **OTHER), None),  # saved as longrope
        ):
            with rx.patch_model(model, ours, target_length=TARGET) as patch, torch.no_grad():
                logits = model(ids).logits
                model.save_pretrained(tmp_path)
            stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
            with torch.no_grad():
                assert_same_but_rounding(stock(ids).logits, logits)
                assert torch.equal(model(ids).logits, unpatched)
                if expected is not None:
                    values = {**model.config.to_dict(), "rope_parameters": expected}
                    stock = type(model)(type(model.config)(**values))
                    stock.load_state_dict(model.state_dict())
                    assert_same_but_rounding(stock.eval()(ids).logits, logits)
            assert patch.changed == (ours.name != "none" or bool(own))


def test_scaling_of_the_softmax_is_kept_when_it_is_extended_again() -> None:
    """The logits of channels that do not rotate are multiplied by both factors, as in DeepSeek's own YaRN."""
    scaled = scaling("yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0)
    config = {"rope_parameters": scaled, "max_position_embeddings": 128}
    model = tiny_model(FamilyCase("deepseek_v3", {**case_of("deepseek_v3").config, **config}))
    attention = model.base_model.layers[0].self_attn
    now = attention.qk_head_dim**-0.5 * (0.1 * math.log(4) + 1) ** 2
    assert attention.scaling == pytest.approx(now, rel=1e-12)
    for method, factor in (("linear", 1.0), ("yarn", 0.1 * math.log(2) + 1)):
        with rx.extend(model, TARGET, method, start="current") as patch:
            assert attention.scaling == pytest.approx(now * factor**2, rel=1e-12)
            assert patch.rotary.attention_factor(patch.shape) == pytest.approx(1.0, rel=1e-12)
    with rx.extend(model, TARGET, "linear"), rx.extend(model, TARGET, "yarn") as patch:  # also over another
        scaled = attention.qk_head_dim**-0.5 * (0.1 * math.log(patch.encoding.factor) + 1) ** 2
        assert attention.scaling == pytest.approx(scaled, rel=1e-12)
    with rx.extend(model, TARGET, "yarn", start="current", **OTHER):
        assert attention.scaling == pytest.approx(now * (0.05 * math.log(2) + 1) ** 2, rel=1e-12)
    with pytest.raises(rx.RopeExtendError, match="current_length is 32, less than the 33 tokens"):
        rx.extend(model, TARGET, "yarn", start="current", current_length=TRAINED)
    with pytest.raises(rx.UnsupportedModelError, match="leave out mscale and mscale_all_dim"):
        rx.extend(model, TARGET, "short_original(yarn)", **OTHER)
    assert attention.scaling == pytest.approx(now, rel=1e-12)


def test_proportional_rotary_counts_the_pairs_that_rotate() -> None:
    """Gemma 4 rotates a quarter of the pairs, with exponents over all channels."""
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


def test_one_position_equals_three_equal_parts() -> None:
    model = tiny_model(case_of("qwen3_5_text"))
    ids = torch.arange(5)[None] * 100
    with rx.extend(model, TARGET):
        rotary = model.base_model.rotary_emb
        for one, three in zip(
            rotary(torch.zeros(1), ids), rotary(torch.zeros(1), ids.expand(3, -1, -1)), strict=True
        ):
            assert torch.equal(one, three)


def test_a_patch_logs_which_layers_it_extends(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(case_of("gemma3_text"))
    with caplog.at_level("INFO", logger="rope_extend"), rx.extend(model, TARGET):
        assert "only full_attention layers are extended" in caplog.text


@pytest.mark.parametrize("model_type", ["gemma3_text", "moshi"])
def test_a_model_moved_to_meta_and_back_under_a_patch_is_whole_again(model_type: str) -> None:
    """As `from_pretrained` does with the tables of rotary modules, ours and the stock ones inside."""
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
        assert_same_but_rounding(model(tokens(1, 80)).logits, expected)
    assert not hasattr(model.config, "rope_extend")


def test_the_layers_of_a_decoder_are_found_in_every_family() -> None:
    """One list of all layers, except in families whose layers are in several lists or stand for two."""
    several = {"blt", "hrm_text", "longcat_flash"}
    families = {case.model_type: case for case in FAMILIES}
    for model_type, case in families.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(case))
        found = decoder_layers(model)
        assert (found is not None and found.complete) == (model_type not in several), model_type
        if found is not None:
            assert getattr(found.parent, found.name) is found.layers
            assert decoder_layers(model.base_model) == found
