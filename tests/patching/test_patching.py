"""A patch can be undone exactly, and mistakes are refused with a way out."""

from __future__ import annotations

import json
import logging
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from alternative_cases import ALTERNATIVES
from cases import ENCODINGS, FACTOR, TARGET, TRAINED, FamilyCase, family, llama, scaling, tiny_model
from integrity import with_lora
from tolerances import assert_same_but_rounding, logit_tolerance
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    PreTrainedModel,
)

import rope_extend as rx
from rope_extend import patching
from rope_extend.checkpoint.model_type import plain_config
from rope_extend.encodings import RopeShape
from rope_extend.encodings.core.rope import GrowingRope
from rope_extend.models.config_facts import trained_length_of
from rope_extend.models.decoders import unwrap
from rope_extend.models.families import family_for
from rope_extend.models.rotary import ExtendedRotaryEmbedding
from rope_extend.models.rotary_tables import length_groups, shape_of

IDS = torch.randint(3, 64, (1, 90), generator=torch.Generator().manual_seed(0))
YARN = rx.encoding("yarn", factor=FACTOR)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


class Tokenizer:
    """A tokenizer with the attribute that patching changes."""

    model_max_length = TRAINED


def snapshot(model: PreTrainedModel) -> tuple[Any, ...]:
    """Everything a patch may touch, by value and by identity."""
    base = unwrap(model)
    return (
        base.config.to_dict(),
        base.generation_config.to_dict(),
        [(name, id(module)) for name, module in base.named_modules()],
        sorted(vars(base)),
        base.config.rope_parameters,
    )


def test_extend_is_one_dial_and_reversible() -> None:
    model, tokenizer = llama(), Tokenizer()
    model.generation_config.max_length = TRAINED
    before, config = logits(model), snapshot(model)
    patch = rx.extend(model, TARGET, tokenizer=tokenizer)
    assert patch.encoding == YARN
    assert patch.changed
    assert rx.current_patch(model) is patch
    assert model.config.max_position_embeddings == TARGET
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.config.rope_parameters["rope_theta"] == 10_000.0
    assert model.generation_config.max_length == TARGET
    assert tokenizer.model_max_length == TARGET
    assert not torch.equal(logits(model), before)
    patch.remove()
    assert torch.equal(logits(model), before)
    assert snapshot(model) == config
    assert tokenizer.model_max_length == TRAINED
    assert rx.current_patch(model) is None
    patch.remove()  # removing twice does nothing
    assert "removed" in repr(patch)


@pytest.mark.parametrize("case", [*ENCODINGS, *ALTERNATIVES], ids=str)
def test_the_window_in_memory_is_extended_and_files_have_that_of_stock(case: Any, tmp_path: Path) -> None:
    """lm-eval, generation and others ask the model in memory how much it reads. What stock transformers loads
    must have the trained window if its tables follow from it, or if stock has no such method."""
    model, tokenizer = llama(), Tokenizer()
    encoding = case.build() if case in ALTERNATIVES else case.build(shape_of(model))
    patch = rx.patch_model(model, encoding, target_length=TARGET, tokenizer=tokenizer)
    assert (model.config.max_position_embeddings, tokenizer.model_max_length) == (TARGET, TARGET)
    carried = getattr(case, "reloads", False) and not isinstance(patch.encoding, GrowingRope)
    model.save_pretrained(tmp_path / "stock")
    (tmp_path / "config").mkdir()
    model.config.to_json_file(tmp_path / "config" / "config.json")
    rx.save(model, tmp_path / "ours")
    for name in ("stock", "config", "ours"):
        saved = plain_config(json.loads((tmp_path / name / "config.json").read_text()))
        assert saved["max_position_embeddings"] == (TARGET if carried else TRAINED), name
    assert rx.load(tmp_path / "ours").config.max_position_embeddings == TARGET
    assert model.config.max_position_embeddings == TARGET
    patch.remove()
    assert (model.config.max_position_embeddings, tokenizer.model_max_length) == (TRAINED, TRAINED)


@pytest.mark.parametrize("extended", ["decoder", "whole"])
def test_files_of_a_model_and_of_its_text_part_have_that_of_stock(extended: str, tmp_path: Path) -> None:
    """Whichever of the two is extended, and whichever is saved."""
    model: Any = llama().model if extended == "decoder" else tiny_model("gemma3")
    with rx.extend(model, TARGET, "dynamic_ntk"):
        whole = LlavaConfig(text_config=model.config) if extended == "decoder" else model.config
        for name, config in (("whole", whole), ("part", whole.text_config)):
            config.save_pretrained(tmp_path / name)
            saved = json.loads((tmp_path / name / "config.json").read_text())
            assert saved.get("text_config", saved)["max_position_embeddings"] == TRAINED
        assert whole.text_config.max_position_embeddings == TARGET


@pytest.mark.parametrize("stock", [{}, {"stock_window": "x"}, {"stock_window": 64}], ids=str)
def test_a_config_with_somebody_elses_record_is_saved_as_it_is(stock: dict[str, Any], tmp_path: Path) -> None:
    for config in (BertConfig(), LlamaConfig()):
        config.rope_extend = {"target_length": 4096, **stock}
        config.save_pretrained(tmp_path)
        assert type(config).from_pretrained(tmp_path).to_dict() == config.to_dict()


@pytest.mark.parametrize("failing", ["_update_config", "_replace"])
def test_an_exception_half_way_leaves_nothing_behind(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = llama(), Tokenizer()
    before, config = logits(model), snapshot(model)
    original = getattr(rx.Patch, failing)

    def fail(self: rx.Patch, *arguments: Any) -> None:
        original(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(rx.Patch, failing, fail)
    with pytest.raises(KeyboardInterrupt):
        rx.extend(model, TARGET, tokenizer=tokenizer)
    assert snapshot(model) == config
    assert torch.equal(logits(model), before)
    assert rx.current_patch(model) is None


def test_nested_patches_unwind_in_order() -> None:
    model = llama()
    plain = logits(model)
    outer = rx.extend(model, TARGET, "linear")
    under_linear, config = logits(model), snapshot(model)
    inner = rx.extend(model, 2 * TARGET, "ntk")
    assert inner.shape == outer.shape  # the trained window, not the first patch's target
    assert inner.encoding == rx.encoding("ntk", factor=2 * FACTOR)
    with pytest.raises(
        rx.PatchError, match=r"cannot remove linear\(factor=8\): ntk\(factor=16\) was applied after"
    ):
        outer.remove()
    inner.remove()
    assert torch.equal(logits(model), under_linear)
    assert snapshot(model) == config
    outer.remove()
    assert torch.equal(logits(model), plain)


def test_the_original_window_of_a_config_comes_back() -> None:
    """Phi-3 has the trained window outside `rope_parameters` too. A patch sets it to the one it was given."""
    model = tiny_model(FamilyCase("phi3", {"pad_token_id": 0}))
    name, encoding = "original_max_position_embeddings", rx.encoding("yarn", factor=FACTOR)
    before = model.config.to_dict()
    with rx.patch_model(model, encoding, trained_length=TRAINED // 2):
        assert getattr(model.config, name) == TRAINED // 2 != before[name]
        with rx.patch_model(model, encoding, trained_length=TRAINED):
            assert getattr(model.config, name) == TRAINED
        assert getattr(model.config, name) == TRAINED // 2
    assert model.config.to_dict() == before


@pytest.mark.parametrize(
    ("model_type", "size"), [("cohere2", "sliding_window"), ("llama4_text", "attention_chunk_size")]
)
def test_a_model_that_rotates_within_windows_only_is_warned_about(
    model_type: str, size: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If their windows are within the trained one, a change of the tables does not extend the context."""
    case = family(model_type)
    for window, warned in ((TRAINED, True), (TARGET, False)):
        model = tiny_model(replace(case, config={**case.config, size: window}))
        caplog.clear()
        with rx.extend(model, TARGET):
            found = f"rotates only in layers that see {window} tokens" in caplog.text
        assert found == warned


def test_peft_before_and_after_are_the_same() -> None:
    first = llama()
    patch_first = rx.extend(first, TARGET)
    patched_then_lora = logits(with_lora(first))
    second = with_lora(llama())
    plain = logits(second)
    patch_second = rx.extend(second, TARGET)
    assert torch.equal(logits(second), patched_then_lora)
    assert rx.current_patch(second) is patch_second
    assert any(isinstance(module, ExtendedRotaryEmbedding) for module in second.modules())
    patch_second.remove()
    assert torch.equal(logits(second), plain)
    patch_first.remove()
    assert torch.equal(logits(first), plain)  # peft changes the model it wraps in place


def test_a_compiled_model_is_patched_inside() -> None:
    model = llama()
    compiled = torch.compile(model, backend="eager")
    with rx.extend(compiled, TARGET) as patch:
        assert rx.current_patch(model) is patch


ALREADY_SCALED = {
    "llama3": scaling("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": scaling("yarn", factor=4.0),
    "dynamic": scaling("dynamic"),
    "longrope": scaling("longrope", factor=4.0, short_factor=[1.0] * 8, long_factor=[4.0] * 8),
}


def test_what_is_replaced_is_said_once_for_each_method(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation patches the model again for each document. Python shows the first line alone."""
    model = llama()
    with caplog.at_level(logging.INFO, "rope_extend"):
        for _document in range(3):
            for method in ("linear", "yarn"):
                rx.extend(model, TARGET, method).remove()
    said = [record.message for record in caplog.records]
    assert [message.partition(" replaced by ")[2].partition("(")[0] for message in said] == ["linear", "yarn"]
    caplog.clear()
    logger = logging.getLogger("rope_extend.patching")
    monkeypatch.setattr(logger, "hasHandlers", lambda: False)
    patching._SAID.clear()
    rx.extend(model, TARGET, "linear").remove()
    rx.extend(model, TARGET, "yarn").remove()
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", said[0])]


def test_a_record_that_repeats_the_config_replaces_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = llama(rope_parameters=dict(ALREADY_SCALED["yarn"]), max_position_embeddings=4 * TRAINED)
    with caplog.at_level(logging.INFO, "rope_extend"):
        rx.patch_model(model, rx.encoding("yarn", factor=4.0), target_length=4 * TRAINED)
        assert not caplog.messages
        rx.patch_model(model, rx.encoding("yarn", factor=8.0), target_length=TARGET)
        assert len(caplog.messages) == 1


@pytest.mark.parametrize("rope_type", sorted(ALREADY_SCALED))
def test_scaling_that_the_checkpoint_carries_is_replaced_knowingly(
    rope_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    window = TRAINED if rope_type == "dynamic" else 4 * TRAINED  # the trained one in stock dynamic
    model = llama(rope_parameters=dict(ALREADY_SCALED[rope_type]), max_position_embeddings=window)
    assert trained_length_of(model.config) == TRAINED
    before = logits(model)
    with caplog.at_level(logging.WARNING, "rope_extend"):  # the level that Python shows
        patch = rx.extend(model, TARGET, "linear")
    assert patch.encoding == rx.encoding("linear", factor=FACTOR)  # over the trained window, not on top
    assert f"{rope_type} (window {window}) replaced by linear(factor=8)" in caplog.text
    fresh = llama()
    with rx.extend(fresh, TARGET, "linear"):
        assert_same_but_rounding(logits(model), logits(fresh))
    patch.remove()
    assert torch.equal(logits(model), before)
    # Nor does it stay in the module that rotates plainly, for a method that turns inside attention.
    with rx.extend(model, TARGET, "dynamic_linear"), rx.extend(fresh, TARGET, "dynamic_linear"):
        assert_same_but_rounding(logits(model), logits(fresh))


def test_linear_scaling_without_the_trained_length_is_refused() -> None:
    model = llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0})
    with pytest.raises(
        rx.RopeExtendError, match=r"does not say which window it was pretrained on.*trained_length="
    ):
        rx.extend(model, TARGET)
    assert rx.extend(model, TARGET, trained_length=TRAINED).encoding == YARN


def test_a_second_extension_says_that_the_model_is_extended() -> None:
    """As when a cell of a notebook runs twice."""
    model = llama()
    first = rx.extend(model, TARGET, "yarn")
    with pytest.raises(rx.PatchError, match=rf"extended already, by {re.escape(str(YARN))} to {TARGET} tok"):
        rx.extend(model, TARGET, "yarn")
    assert rx.current_patch(model) is first
    first.remove()


def test_the_same_scaling_again_is_a_no_op_and_refused() -> None:
    model = llama(rope_parameters=scaling("yarn"), max_position_embeddings=TARGET)
    config = snapshot(model)
    with pytest.raises(rx.PatchError, match="leaves the rotary tables as they were"):
        rx.extend(model, TARGET, "yarn")
    assert snapshot(model) == config
    with rx.patch_model(model, YARN) as patch:  # on purpose, for its exact tables
        assert not patch.changed


def test_a_saved_and_reloaded_model_knows_its_trained_window(tmp_path: Path) -> None:
    model = llama()
    rx.extend(model, TARGET, "ntk")  # saved as a larger theta, which alone would hide the trained one
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert shape_of(reloaded) == RopeShape(16, 10_000.0, TRAINED)
    assert rx.extend(reloaded, 2 * TARGET, "linear").encoding == rx.encoding("linear", factor=2 * FACTOR)


def test_a_record_overtaken_by_an_edit_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    rx.extend(model, TARGET, "ntk")
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 20_000.0}
    with caplog.at_level(logging.WARNING, "rope_extend"):
        assert trained_length_of(config) == TARGET
    assert "is ignored" in caplog.text


def test_a_damaged_record_is_named() -> None:
    model = llama()
    model.config.rope_extend = {"encoding": {"name": "yarn"}}
    with pytest.raises(rx.RopeExtendError, match=r"config\.rope_extend is damaged"):
        rx.extend(model, TARGET)


def test_families_without_rope_are_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64))
    with pytest.raises(rx.UnsupportedModelError, match="no support for model_type 'gpt2'") as error:
        rx.extend(model, TARGET)
    assert "llama" not in str(error.value)  # not the list of all families


def test_unknown_families_are_refused_with_the_way_to_add_one() -> None:
    with pytest.raises(rx.UnsupportedModelError, match="Did you mean 'llama'") as error:
        family_for("lama")
    assert "patches/lama.py" in str(error.value)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda model: rx.extend(model, TRAINED), "must exceed the trained window of 32 tokens, got 32"),
        (lambda model: rx.extend(model, "32kb"), "not a length in tokens"),
        (lambda model: rx.extend("some/model", 64), "Load it first"),
        (lambda model: rx.extend(model, TARGET, "yarm"), "Did you mean 'yarn'"),
        (lambda model: rx.extend(model, TARGET, "short_original(dynamic_yarn)"), "be a static schedule"),
        (lambda model: rx.extend(model, TARGET, factor=8.0), "factor follows from target_length"),
        (lambda model: rx.extend(model, TARGET, "none"), "leaves the rotary tables as they were"),
        (lambda model: rx.patch_model(model, "yarn"), "patch_model takes an encoding"),
        (lambda model: rx.extend(nn.Linear(2, 2), TARGET), "needs a transformers model"),
    ],
)
def test_mistakes_are_explained_and_change_nothing(act: Any, message: str) -> None:
    model = llama()
    config = snapshot(model)
    with pytest.raises(rx.RopeExtendError, match=message):
        act(model)
    assert snapshot(model) == config


def test_length_groups() -> None:
    model = llama()
    lengths = [16, TRAINED, 64, 128, 64]
    assert length_groups(model, lengths) == [[16, 32, 64, 128]]
    with rx.extend(model, TARGET, "yarn"):
        assert length_groups(model, lengths) == [[16, 32, 64, 128]]
    with rx.extend(model, TARGET, "dynamic_ntk"):  # each query uses its own length, so one pass serves all
        assert length_groups(model, lengths) == [[16, 32, 64, 128]]
    stock = llama(rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10_000.0})
    assert length_groups(stock, lengths) == [[16, 32], [64], [128]]
    longrope = llama(rope_parameters=dict(ALREADY_SCALED["longrope"]), max_position_embeddings=4 * TRAINED)
    assert length_groups(longrope, lengths) == [[16, 32], [64, 128]]


def test_mixtral_saves_a_head_dim_that_stock_scaling_needs(tmp_path: Path) -> None:
    model = tiny_model(FamilyCase("mixtral", {"num_local_experts": 2}))
    assert model.config.head_dim is None
    with rx.extend(model, TARGET):
        model.save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path).head_dim == 16
    assert model.config.head_dim is None


def test_dynamic_ntk_gives_a_model_with_that_scaling_an_exact_cache() -> None:
    """Stock's tables follow the longest row, so what was cached before has another one."""
    rope = {"rope_type": "dynamic", "factor": FACTOR, "rope_theta": 10_000.0}
    model, ids = llama(rope_parameters=rope), torch.randint(3, 64, (1, 80))
    for exact in (False, True):
        with rx.extend(model, TARGET, "dynamic_ntk") if exact else nullcontext(), torch.no_grad():
            cache = model(ids[:, :70], use_cache=True).past_key_values
            cached = model(ids[:, 70:], past_key_values=cache).logits
            whole = model(ids, use_cache=False).logits[:, 70:]
        assert ((cached - whole).abs().max() < logit_tolerance(whole)) == exact


def test_a_patch_changes_the_config_of_its_own_model_only() -> None:
    """Two models may have one config; what is set while patches are active stays."""
    config = llama().config
    one, other = (type(llama())(config).eval() for _ in range(2))
    before = config.to_dict()
    first = rx.extend(one, TARGET, "dynamic_ntk")
    assert other.config is config
    assert config.to_dict() == before
    second = rx.extend(other, TARGET, "yarn")
    assert one.config.rope_parameters["rope_type"] == "dynamic"
    one.set_attn_implementation("eager")
    first.remove()
    second.remove()
    for model in (one, other):
        assert all(module.config is config for module in model.modules() if hasattr(module, "config"))
    assert config.to_dict() == before
    assert config._attn_implementation == "eager"


def test_a_patched_decoder_is_saved_by_the_model_around_it(tmp_path: Path) -> None:
    model = llama()
    with rx.extend(model.model, TARGET, "yarn"):
        expected = logits(model)
        model.save_pretrained(tmp_path)
    assert_same_but_rounding(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)
    assert model.config.rope_parameters["rope_type"] == "default"
