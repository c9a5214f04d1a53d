"""Annealing a model to another encoding: exact at both ends, and as the default recipe says."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TRAINED, tiny_llama
from covering import few
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tolerances import assert_same_but_rounding
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

import rope_extend as rx
from rope_extend import PatchError, RopeExtendError
from rope_extend.encodings import encoding_names, method_named
from rope_extend.models.parameters import LEARNED_FILE
from rope_extend.training import loop
from rope_extend.training.annealing import share_at
from rope_extend.training.finetune import finetune
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import check_continues, checkpoints, read_state

TARGET = 128
IDS = torch.arange(2 * 100).remainder(251).view(2, 100)
REPLACED: dict[str, dict[str, Any]] = {
    "alibi": {}, "t5_bias": {}, "kerple": {}, "fire": {"width": 8}, "sandwich": {}, "shaw": {"values": True},
    "sinusoidal": {}, "learned": {"rows": TARGET}, "nope": {}, "drope": {"factor": 4.0, "coefficient": 0.4},
    "linear_attention": {},
}  # fmt: skip
SCHEDULES = {"yarn": {"factor": 4.0}, "linear": {"factor": 4.0}}
MIXED = REPLACED | SCHEDULES


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama().eval()


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(IDS, use_cache=False, **inputs).logits
    return out


def patched(model: Any, name: str) -> rx.Patch:
    return rx.patch_model(model, rx.encoding(name, **MIXED[name]), target_length=TARGET)


@pytest.mark.parametrize("name", MIXED)
def test_both_ends_are_exact(model: Any, name: str) -> None:
    before = logits(model)
    with patched(model, name) as patch:
        encoded = logits(model)
        assert (encoded - before).abs().max() > 1e-4
        patch.mix(0)
        assert torch.equal(logits(model), before)
        patch.mix(0.5)
        assert (logits(model) - before).abs().max() > 1e-4
        assert (logits(model) - encoded).abs().max() > 1e-4
        patch.mix(1)
        assert torch.equal(logits(model), encoded)
        patch.mix(0.3)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", MIXED)
def test_the_way_has_no_jump(model: Any, name: str) -> None:
    """Near either end, the logits are close to those at the end, in proportion to the distance."""
    with patched(model, name) as patch:
        for end, near in ((0.0, 1e-4), (1.0, 1 - 1e-4)):
            patch.mix(end)
            there = logits(model)
            patch.mix(near)
            assert 0 < (logits(model) - there).abs().max() < 0.02
            patch.mix(0.5 * (end + near))
            closer = (logits(model) - there).abs().max()
            patch.mix(near)
            assert closer < (logits(model) - there).abs().max()


@given(share=st.floats(0.01, 0.99))
def test_rotation_slows_down_as_when_positions_are_interpolated(share: float) -> None:
    """Annealing to no rotation equals position interpolation by 1 / (1 - share)."""
    model = tiny_llama().eval()
    with rx.patch_model(model, rx.encoding("linear", factor=1 / (1 - share)), target_length=TARGET):
        interpolated = logits(model)
    with rx.patch_model(model, rx.encoding("nope"), target_length=TARGET) as patch:
        patch.mix(share)
        assert_same_but_rounding(logits(model), interpolated)


def weakened(name: str, values: dict[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    """Learned parameters with which the bias or the vectors are `share` of their former values."""
    if name == "fire":  # linear in its last layer
        return {key: value * (share if key.endswith("2") else 1) for key, value in values.items()}
    if name == "kerple":  # -r1 ln(1 + r2 r), and the logarithm of r1 is learned
        return {key: value + math.log(share) * key.endswith("r1") for key, value in values.items()}
    return {key: share * value for key, value in values.items()}


GAPS = torch.cat([torch.arange(30), torch.arange(40, 110)]).expand(2, -1)


@pytest.mark.parametrize("inputs", [{}, {"position_ids": GAPS}], ids=["in a row", "with a gap"])
@pytest.mark.parametrize("name", ["t5_bias", "kerple", "fire", "shaw", "learned"])
def test_what_is_learned_acts_by_its_share(model: Any, name: str, inputs: dict[str, Any]) -> None:
    """A share of a bias equals a weaker bias under the same rotation."""
    share = 0.25
    with patched(model, name) as patch:
        assert patch.learned is not None
        patch.mix(share)
        mixed = logits(model, **inputs)
        patch.mix(0.9)
        assert (logits(model, **inputs) - mixed).abs().max() > 1e-4
        patch.mix(share)
        patch.learned.put(weakened(name, dict(patch.learned.state_dict()), share), "test")
        patch._handler.share = 1.0  # type: ignore[union-attr]
        assert_same_but_rounding(logits(model, **inputs), mixed)


def test_linear_attention_that_is_mixed_has_no_cache_to_go_on_from(model: Any) -> None:
    with patched(model, "linear_attention") as patch, torch.no_grad():
        patch.mix(0.5)
        out = model(IDS, use_cache=True)
        with pytest.raises(PatchError, match="blended with softmax attention and cannot use a cache"):
            model(IDS[:, :1], past_key_values=out.past_key_values)


def test_linear_attention_is_mixed_with_softmax_by_outputs(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    outputs: list[torch.Tensor] = []
    hook = attention.o_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    try:
        with patched(model, "linear_attention") as patch:
            for share in (0, 1, 0.25):
                patch.mix(share)
                logits(model)
        softmax, linear, mixed = outputs
    finally:
        hook.remove()
    assert (softmax - linear).abs().max() > 1e-3
    torch.testing.assert_close(mixed, 0.75 * softmax + 0.25 * linear, rtol=0, atol=1e-6)


def test_the_scale_of_logits_is_blended(model: Any) -> None:
    """The logit factor of drope grows linearly from 1 to its final value."""
    encoding = rx.encoding("drope", factor=4.0, coefficient=0.4, per="target")
    other = rx.encoding("drope", factor=4.0, coefficient=0.2, per="target")
    with rx.patch_model(model, encoding, target_length=TARGET) as patch:
        patch.mix(0.5)
        mixed = logits(model)
    with rx.patch_model(model, other, target_length=TARGET) as patch:
        patch.mix(0.5)
        patch._handler.share = 1.0  # type: ignore[union-attr]
        assert_same_but_rounding(logits(model), mixed)


def test_a_model_with_scaling_of_its_own_starts_from_that() -> None:
    scaling = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": TRAINED,
    }
    scaled = tiny_llama(rope_parameters=scaling, max_position_embeddings=2 * TRAINED).eval()
    before = logits(scaled)
    with rx.patch_model(scaled, rx.encoding("nope"), target_length=TARGET) as patch:
        patch.mix(0)
        assert torch.equal(logits(scaled), before)
        patch.mix(1e-6)
        assert_same_but_rounding(logits(scaled), before)


def test_a_family_of_another_layout_and_parts_of_a_head() -> None:
    config = GPTNeoXConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=TRAINED, rotary_pct=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    neox = GPTNeoXForCausalLM(config).eval()
    before = logits(neox)
    for name in ("alibi", "sinusoidal", "linear_attention", "nope"):
        with patched(neox, name) as patch:
            encoded = logits(neox)
            patch.mix(1e-4)
            assert 0 < (logits(neox) - before).abs().max() < 1e-2
            patch.mix(0)
            assert torch.equal(logits(neox), before)
            patch.mix(1)
            assert torch.equal(logits(neox), encoded)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("dynamic_ntk", {"factor": 4.0}), ("short_original", {"inner": {"name": "linear", "factor": 4.0}}),
        ("xpos", {}),
    ],
)  # fmt: skip
def test_there_is_no_way_to_what_has_more_than_one_table(model: Any, name: str, parameters: Any) -> None:
    with (
        rx.patch_model(model, rx.encoding(name, **parameters), target_length=TARGET) as patch,
        pytest.raises(PatchError, match=f"cannot anneal .* to {name}.*one table.*anneal_steps 0"),
    ):
        patch.mix(0.5)


def test_what_cannot_be_mixed_is_refused(model: Any) -> None:
    with rx.patch_model(model, rx.encoding("none")) as patch:
        with pytest.raises(PatchError, match="already computes the same"):
            patch.mix(0.5)
        with (
            rx.patch_model(model, rx.encoding("alibi")) as upper,
            pytest.raises(PatchError, match="that of an earlier patch"),
        ):
            upper.mix(0.5)
    with pytest.raises(PatchError, match="its patch was removed"):
        upper.mix(0.5)
    with rx.patch_model(model, rx.encoding("alibi")) as patch:
        for share in (-0.1, 1.1, math.nan, "half"):
            with pytest.raises(RopeExtendError, match="share must be a finite number"):
                patch.mix(share)  # type: ignore[arg-type]


@given(steps=st.integers(0, 10_000), step=st.integers(0, 20_000))
def test_the_share_is_a_function_of_the_step(steps: int, step: int) -> None:
    share = share_at(step, steps)
    assert 0 < share <= 1
    assert (share == 1) == (step >= steps)
    if step < steps:
        assert share_at(step + 1, steps) - share == pytest.approx(1 / (steps + 1))


REQUIRED = {"model": "m", "data": "d", "output_dir": "o", "target_length": 4096}


def test_fields_left_open_are_the_methods_and_given_ones_stay() -> None:
    usual = Recipe.from_dict({**REQUIRED, "method": "yarn"})
    assert (usual.steps, usual.learning_rate, usual.lora_targets) == (1000, 2e-4, "attention")
    assert (usual.train_norm_embed, usual.anneal_steps) == (False, 0)
    replaced = Recipe.from_dict({**REQUIRED, "method": "alibi", "learning_rate": None})
    assert (replaced.steps, replaced.learning_rate, replaced.lora_targets) == (2000, 2e-4, "all-linear")
    assert (replaced.train_norm_embed, replaced.anneal_steps) == (True, 0)
    own = {"steps": 10, "lora_targets": "attention", "train_norm_embed": False, "anneal_steps": 3}
    given = Recipe.from_dict({**REQUIRED, "method": "alibi", **own}).to_dict()
    assert {name: given[name] for name in own} == own
    assert Recipe.from_dict({**REQUIRED, "method": "resonance(nope)"}).lora_targets == "all-linear"


@pytest.mark.parametrize("name", encoding_names())
def test_every_method_has_a_default_recipe_that_is_valid(name: str) -> None:
    recipe = Recipe.from_dict({**REQUIRED, "method": name})
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert (recipe.lora_targets == "all-linear") == (name in REPLACED)
    assert recipe.train_norm_embed == (name in REPLACED)
    assert method_named(name).replaces_rotation == (name in REPLACED)


def test_a_run_without_steps_for_the_encoding_alone_is_refused() -> None:
    with pytest.raises(RopeExtendError, match="anneal_steps 10 leaves none of the 10 steps"):
        Recipe.from_dict({**REQUIRED, "steps": 10, "anneal_steps": 10})


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    return Recipe(
        model=str(work / "model"), data=str(work / "data"), output_dir=str(tmp_path / "run"),
        target_length=TARGET, steps=6, anneal_steps=4, learning_rate=1e-2, warmup_steps=1, lora_rank=2,
        save_every=1, keep_checkpoints=9, method="t5_bias", gradient_checkpointing=True,
        gradient_accumulation=1,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_anneals_by_its_steps_and_evaluates_the_encoding_alone(
    recipe: Recipe, work: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shares: list[tuple[str, float]] = []

    def watched(name: str) -> None:
        original = getattr(loop.TrainingRun, name)

        def note(run: Any, *args: Any) -> Any:
            patch = rx.current_patch(run.model)
            assert patch is not None
            assert patch._handler is not None
            if name == "_batch":
                shares.append((name, patch._handler.share))
            return original(run, *args)

        monkeypatch.setattr(loop.TrainingRun, name, note)

    watched("_batch")
    measure = loop.perplexity

    def measured(model: Any, *args: Any, **kwargs: Any) -> Any:
        shares.append(("evaluated", rx.current_patch(model)._handler.share))  # type: ignore[union-attr]
        return measure(model, *args, **kwargs)

    monkeypatch.setattr(loop, "perplexity", measured)
    with caplog.at_level(logging.INFO, "rope_extend"):
        result = finetune(replace(recipe, eval_data=str(work / "data"), eval_every=2))
    assert [share for name, share in shares if name == "_batch"] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert {share for name, share in shares if name == "evaluated"} == {1.0}
    assert sum(name == "evaluated" for name, _ in shares) == 4
    assert "defaults for t5_bias: lora_targets all-linear, train_norm_embed True; " in caplog.text
    assert "set by the recipe: steps 6, learning_rate 0.01\n" in caplog.text
    assert "the first 4 steps anneal" in caplog.text
    reloaded = rx.load(recipe.output_dir)
    assert_same_but_rounding(logits(reloaded), logits(result.model))
    written = Recipe.from_yaml(Path(recipe.output_dir) / "recipe.yaml")
    assert (written.anneal_steps, written.lora_targets) == (4, "all-linear")


@pytest.mark.slow
@pytest.mark.parametrize("method", few(("t5_bias", "linear_attention", "nope"), 3))
def test_a_run_that_was_interrupted_while_annealing_ends_on_the_same_bits(
    recipe: Recipe, tmp_path: Path, method: str
) -> None:
    recipe = replace(recipe, method=method)
    finetune(recipe)
    other = replace(recipe, output_dir=str(tmp_path / "other"))
    finetune(other)
    for checkpoint in checkpoints(tmp_path / "other")[2:]:
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    finetune(other, resume=True)
    files = ["adapter_model.safetensors", *([LEARNED_FILE] if method == "t5_bias" else [])]
    for name in files:
        whole, again = (load_file(tmp_path / run / name) for run in ("run", "other"))
        assert all(torch.equal(again[key], value) for key, value in whole.items())


@pytest.mark.slow
def test_annealing_changes_what_is_learnt(recipe: Recipe, tmp_path: Path) -> None:
    finetune(recipe)
    finetune(replace(recipe, anneal_steps=0, output_dir=str(tmp_path / "other")))
    one, other = (load_file(tmp_path / run / LEARNED_FILE) for run in ("run", "other"))
    assert any((one[name] - other[name]).abs().max() > 1e-4 for name in one)


def test_a_checkpoint_from_before_annealing_was_not_annealed(recipe: Recipe) -> None:
    finetune(replace(recipe, steps=2, anneal_steps=0))
    (newest,) = checkpoints(Path(recipe.output_dir))[-1:]
    state = read_state(newest)
    old = replace(state, recipe={k: v for k, v in state.recipe.items() if k != "anneal_steps"})
    check_continues(old, replace(recipe, anneal_steps=0))
    with pytest.raises(RopeExtendError, match="anneal_steps was 0 and is 4"):
        check_continues(old, recipe)


def test_no_way_is_said_before_the_data_is_read(recipe: Recipe) -> None:
    with pytest.raises(PatchError, match="cannot anneal from"):
        finetune(replace(recipe, method="dynamic_ntk", data="nowhere"))


def test_drope_recalibrates_at_the_trained_length_and_scales_beyond(recipe: Recipe) -> None:
    """Training within the window scales nothing; the saved model scales by the length."""
    result = finetune(replace(recipe, method="drope", block_length=TRAINED))
    record = json.loads((Path(recipe.output_dir) / "rope_extend.json").read_text())
    assert record["encoding"] == {"name": "drope", "factor": 4.0, "coefficient": 0.103, "per": "query"}
    short, plain = IDS[:, :TRAINED], rx.encoding("nope")
    model = rx.load(recipe.output_dir)
    with torch.no_grad():
        ours, far = model(short).logits, model(IDS).logits
        assert_same_but_rounding(far, result.model(IDS).logits)
    rx.current_patch(model).remove()  # type: ignore[union-attr]
    with rx.patch_model(model, plain), torch.no_grad():
        assert_same_but_rounding(ours, model(short).logits)
        assert (far - model(IDS).logits).abs().max() > 1e-5
    assert AutoModelForCausalLM.from_pretrained(recipe.model).config.max_position_embeddings == TRAINED
