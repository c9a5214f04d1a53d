"""A run follows its recipe, and refuses what it cannot do."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from cases import TRAINED, tiny_llama, tiny_model
from covering import few
from runs import TARGET, assert_same, metrics, saved, tokenizer_of, weights
from tolerances import assert_same_but_rounding
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import rope_extend as rx
from rope_extend import RopeExtendError, current_patch
from rope_extend.checkpoint.record import read_record
from rope_extend.checkpoint.restoring import load
from rope_extend.cli.main import parse
from rope_extend.cli.measure import model_config
from rope_extend.cli.train import _next
from rope_extend.evaluation.evaluation_config import ModelConfig, StudyConfig
from rope_extend.models.checkpoint_directory import RECORD_NAME
from rope_extend.training.finetune import Recipe, finetune
from rope_extend.training.lora import extended, lora_config
from rope_extend.training.trainer import RopeTrainer
from rope_extend.training.training_data import load_data

IDS = torch.arange(2 * TARGET).remainder(251).view(2, TARGET)


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def on_base(recipe: Recipe, base: Any, directory: Path) -> Recipe:
    """The recipe for another base model, which is saved."""
    base.save_pretrained(directory / "base")
    tokenizer_of(recipe).save_pretrained(directory / "base")
    return replace(recipe, model=str(directory / "base"))


def test_a_run_leaves_an_adapter_with_its_record_recipe_and_metrics(recipe: Recipe, work: Path) -> None:
    recipe = replace(recipe, eval_data=str(work / "data" / "a.txt"), eval_every=4)
    result = finetune(recipe)
    directory = Path(recipe.output_dir)
    assert {path.name for path in directory.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", RECORD_NAME, "recipe.yaml", "metrics.jsonl",
        "checkpoints", "README.md",
    }  # fmt: skip
    assert Recipe.from_yaml(directory / "recipe.yaml") == recipe
    record = read_record(directory)
    assert record.encoding == result.patch.encoding
    assert (record.target_length, record.shape.trained_length) == (TARGET, TRAINED)
    assert record.base_model == recipe.model
    assert current_patch(load(directory)) is not None
    assert (result.steps, result.tokens) == (8, 8 * 2 * TARGET)
    assert result.share_beyond == (TARGET - TRAINED) / TARGET
    lines = metrics(directory)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert steps[-1]["tokens"] == result.tokens
    assert steps[-1]["loss"] == result.loss
    curves = {line["step"]: line["perplexity"] for line in lines if "perplexity" in line}
    assert list(curves) == [0, 4, 8]
    assert {int(length): value for length, value in curves[8].items()} == result.perplexity
    assert list(result.perplexity) == [32, 64, 128]


def test_warm_up_rises_from_a_tenth_and_stays(recipe: Recipe, finished: Path) -> None:
    rates = [line["lr"] / recipe.learning_rate for line in metrics(finished)]
    assert rates == pytest.approx([0.1, 0.4, 0.7, 1, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("targets", "more", "tied"), few(product(("attention", "all-linear"), (False, True), (False, True)), 3)
)
def test_every_way_to_train_leaves_frozen_weights_alone_and_reloads_and_merges(
    recipe: Recipe, tmp_path: Path, targets: str, more: bool, tied: bool
) -> None:
    """With `more`, norms and embeddings are trained too."""
    torch.manual_seed(1)
    base = tiny_llama(tie_word_embeddings=tied)
    before = base.state_dict()
    recipe = on_base(recipe, base, tmp_path)
    recipe = replace(recipe, lora_targets=targets, train_norm_embed=more, steps=4)
    result = finetune(recipe)

    frozen = {
        re.sub(r"^base_model\.model\.|\.(base_layer|original_module)(?=\.)", "", name): value
        for name, value in result.model.named_parameters()
        if not value.requires_grad
    }
    trained = {name for name, value in result.model.named_parameters() if value.requires_grad}
    assert all(torch.equal(value, before[name]) for name, value in frozen.items())
    linear = {name for name in before if "proj" in name}
    assert linear <= frozen.keys()
    for part in ("norm", "embed"):
        assert more == any(part in name for name in trained)
    adapted = {name for name in linear if any(name.removesuffix("weight") in one for one in trained)}
    assert adapted == {name for name in linear if targets == "all-linear" or "self_attn" in name}

    rx.merge(recipe.output_dir, tmp_path / "merged")
    stock, ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), logits(result.model)
    assert torch.equal(ours, logits(load(recipe.output_dir)))
    assert_same_but_rounding(logits(stock), ours)
    assert not torch.allclose(ours, logits(base), atol=1e-2)
    assert stock.config.tie_word_embeddings == tied


@pytest.mark.parametrize(("optim", "tied"), [("adamw_torch_fused", False), ("adamw_8bit", True)])
def test_all_weights_are_trained_saved_and_resumed(
    recipe: Recipe, tmp_path: Path, optim: str, tied: bool
) -> None:
    base = tiny_llama(tie_word_embeddings=tied)
    recipe = on_base(recipe, base, tmp_path)
    recipe = replace(recipe, lora_targets="none", lora_dropout=0, optim=optim, steps=4, warmup_steps=1)
    result = finetune(recipe)
    before = base.state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in result.model.named_parameters())
    ours, stock = logits(result.model), AutoModelForCausalLM.from_pretrained(recipe.output_dir)
    for path in (recipe.output_dir, saved(recipe, 4)):
        assert torch.equal(ours, logits(load(path)))
    assert_same_but_rounding(logits(stock), ours)
    assert stock.config.use_cache
    assert PreTrainedTokenizerFast.from_pretrained(recipe.output_dir)
    with pytest.raises(RopeExtendError, match="there is nothing to merge: a model of which all weights"):
        rx.merge(recipe.output_dir, tmp_path / "merged")

    other = replace(recipe, output_dir=str(tmp_path / "other"), save_every=1)
    finetune(replace(other, steps=2))
    again = finetune(other, resume=True).model
    assert_same(dict(again.named_parameters()), dict(result.model.named_parameters()))


def test_the_control_run_trains_at_the_old_window(recipe: Recipe) -> None:
    result = finetune(replace(recipe, method="none", target_length=TRAINED))
    assert not result.patch.changed
    assert result.share_beyond == 0
    assert read_record(recipe.output_dir).encoding.name == "none"


@pytest.mark.slow
def test_half_precision_keeps_what_is_trained_in_float32(recipe: Recipe) -> None:
    recipe = replace(recipe, dtype="bfloat16", train_norm_embed=True, steps=3, eval_data=recipe.data)
    result = finetune(recipe)
    assert all(1 < value < 1000 for value in result.perplexity.values())
    state = torch.load(saved(recipe, 3) / "optimizer.pt", weights_only=True)
    assert {v.dtype for s in state["state"].values() for v in s.values()} == {torch.float32}
    assert {v.dtype for n, v in weights(recipe.output_dir).items() if "lora" in n} == {torch.float32}
    ours = logits(result.model)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, logits(load(recipe.output_dir, dtype=torch.bfloat16)))


def test_a_step_that_is_not_finite_is_skipped_counted_and_survives_an_interruption(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = RopeTrainer.compute_loss

    def poisoned(trainer: RopeTrainer, *args: Any, **options: Any) -> Any:
        value = original(trainer, *args, **options)
        return value * math.nan if trainer.state.global_step + 1 in {1, 4, 5} else value

    monkeypatch.setattr(RopeTrainer, "compute_loss", poisoned)
    recipe = replace(recipe, save_every=1, keep_checkpoints=9, warmup_steps=9)
    result = finetune(recipe)
    assert (result.steps, result.skipped) == (8, 3)
    assert math.isfinite(result.loss)
    lines = metrics(recipe.output_dir)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert {line["step"]: line["skipped"] for line in lines if "skipped" in line} == {1: 1, 4: 2, 5: 3}
    assert all(("loss" in line) != ("skipped" in line) for line in lines)
    assert all(said in caplog.text for said in ("step 4: the loss is nan", "9 warmup_steps are much"))
    third, fourth, fifth, sixth = (weights(saved(recipe, step)) for step in (3, 4, 5, 6))
    assert_same(third, fourth)
    assert_same(fourth, fifth)
    assert any(not torch.equal(value, sixth[name]) for name, value in fifth.items())
    assert all(value.isfinite().all() for value in weights(recipe.output_dir).values())

    other = replace(recipe, output_dir=str(tmp_path / "other"))
    finetune(replace(other, steps=4))
    assert finetune(other, resume=True).skipped == 3
    assert_same(weights(recipe.output_dir), weights(other.output_dir))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_length": TRAINED}, "target_length must exceed the trained window of 32"),
        ({"method_parameters": {"factor": 4.0}}, "factor follows from target_length"),
        ({"method_parameters": {"beta_fast": -1}}, "beta_fast"),
        ({"data": "nowhere/*.txt"}, "nothing to read"),
        ({"target_length": 2**20}, "no document of at least"),
        ({"model": "./nowhere"}, "no such directory: './nowhere'"),
        ({"lora_targets": ["q_proj", "q_porj"]}, "lora_targets has 'q_porj'.*q_proj"),
        ({"output_dir": __file__}, "is a file; choose another output"),
    ],
)
def test_mistakes_are_refused_before_the_weights_are_loaded(
    recipe: Recipe, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RopeExtendError, match=message):
        finetune(replace(recipe, **changes))
    assert not Path(recipe.output_dir).exists()


def test_a_loss_that_is_never_finite_stops_the_run(recipe: Recipe, tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = math.inf
    with pytest.raises(
        RopeExtendError, match=r"step 4: the loss is (nan|inf).*4 consecutive steps.*lower learning_rate"
    ):
        finetune(on_base(recipe, model, tmp_path))


def test_attention_targets_are_found_by_family(recipe: Recipe) -> None:
    for family, part, names in (
        ("llama", "model.layers.{}.self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("gpt_neox", "gpt_neox.layers.{}.attention", ("query_key_value", "dense")),
    ):
        found = lora_config(tiny_model(family), recipe).target_modules
        assert found == {f"{part.format(layer)}.{name}" for layer in (0, 1) for name in names}


def test_a_hub_dataset_is_evaluated_on_its_validation_split_or_the_one_that_is_named(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def load_dataset(*_: Any, split: str, **__: Any) -> Any:
        read.append(split)
        return datasets.Dataset.from_dict({"text": ["one two three " * 200]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for changes in ({}, {"eval_split": "test"}):
        run = replace(recipe, eval_data="org/books", **changes)
        assert len(load_data(run, tokenizer_of(recipe), (64,), TRAINED).held_out) == 1
    assert read == ["validation", "test"]


def test_drope_recalibrates_at_the_trained_length_and_scales_beyond(recipe: Recipe) -> None:
    """Training within the window scales nothing; the saved model scales by the length."""
    result = finetune(replace(recipe, method="drope", block_length=TRAINED, lora_targets="all-linear"))
    record = read_record(recipe.output_dir).encoding.to_dict()
    assert record == {"name": "drope", "factor": 4.0, "coefficient": 0.103, "per": "query"}
    short, model = IDS[:, :TRAINED], load(recipe.output_dir)
    ours, far = logits(model, short), logits(model)
    assert_same_but_rounding(far, logits(result.model))
    current_patch(model).remove()  # type: ignore[union-attr]
    with rx.patch_model(model, rx.encoding("nope")):
        assert_same_but_rounding(ours, logits(model, short))
        assert (far - logits(model)).abs().max() > 1e-5


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, "rope-extend"),
        ({"WORLD_SIZE": "2"}, "torchrun --nproc-per-node 2 -m rope_extend"),
        (
            {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
            "torchrun --nnodes 2 --nproc-per-node 8 -m rope_extend",
        ),
        (
            {"WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no"},
            "accelerate launch --config_file path/to/the/same.yaml -m rope_extend",
        ),
    ],
)
def test_the_next_commands_are_of_the_same_run(
    environment: dict[str, str], launch: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its stated window, or the adapters are refused, and in as many processes, for as many tokens."""
    recipe = replace(recipe, trained_length=16)
    with extended(tiny_llama(), recipe) as patch:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        train, compare = _next(recipe, "run", patch).splitlines()[1:]
        again = _next(replace(recipe, start="current"), "run", patch)
    assert train.startswith(f"  {launch} finetune run/recipe.yaml --method none --target-length 16 ")
    for cls, command in ((StudyConfig, compare), (ModelConfig, again)):
        words = shlex.split(command.partition("rope-extend ")[2])
        assert model_config(cls, parse(words)).trained_length == 16
