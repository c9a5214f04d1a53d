"""A run follows its recipe, stops and resumes exactly, and refuses what it cannot do."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import TRAINED, tiny_llama
from covering import few
from peft import get_peft_model
from safetensors.torch import load_file
from tolerances import assert_same_but_rounding
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedTokenizerFast,
)

import rope_extend as rx
from rope_extend import RopeExtendError, current_patch
from rope_extend.checkpoint.manifest import RECORD_NAME
from rope_extend.checkpoint.record import read_record
from rope_extend.checkpoint.restoring import load
from rope_extend.data.mixing import block_index
from rope_extend.journal import only_writer
from rope_extend.loss import NextTokenLoss
from rope_extend.training import loop
from rope_extend.training import resume as resume_module
from rope_extend.training.finetune import FinetuneInterrupted, Recipe, finetune
from rope_extend.training.lora import lora_config

TARGET = 128


def settings(work: Path) -> dict[str, Any]:
    return {
        "model": str(work / "model"), "data": str(work / "data"), "target_length": TARGET, "steps": 8,
        "gradient_accumulation": 2, "learning_rate": 1e-2, "warmup_steps": 3, "lora_rank": 4,
        "lora_dropout": 0.2, "save_every": 3, "gradient_checkpointing": False,
    }  # fmt: skip


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    return Recipe(**settings(work), output_dir=str(tmp_path / "run"))


def weights(directory: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(directory) / "adapter_model.safetensors")


def metrics(directory: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


Action = Callable[[], None]
AtStep = Callable[[int, Action], list[int]]


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> AtStep:
    """Run an action during one step; the returned list gets the number of every step that is computed."""
    original = loop.TrainingRun._batch

    def install(step: int, action: Action) -> list[int]:
        computed: list[int] = []

        def batch(run: Any, forward: int) -> Any:
            if forward == 0:
                computed.append(run.state.step + 1)
                if computed[-1] == step:
                    action()
            return original(run, forward)

        monkeypatch.setattr(loop.TrainingRun, "_batch", batch)
        return computed

    return install


@pytest.mark.parametrize(
    "how", [{}, {"resume": True}, {"overwrite": True}], ids=["new", "resume", "overwrite"]
)
def test_a_second_process_in_the_directory_of_a_run_is_refused(how: dict[str, bool], recipe: Recipe) -> None:
    """Before it removes or changes a file of the run that is going on."""
    directory = Path(recipe.output_dir)
    if how:
        finetune(replace(recipe, steps=2, save_every=1))
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    with only_writer(directory, "run"), pytest.raises(RopeExtendError, match="another run is writing to"):
        finetune(replace(recipe, steps=2, save_every=1), **how)
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
    assert directory.exists() == bool(how)


def test_a_run_leaves_an_adapter_that_reloads_with_equal_logits(recipe: Recipe, work: Path) -> None:
    result = finetune(replace(recipe, eval_data=str(work / "data" / "a.txt"), eval_every=4))
    directory = Path(recipe.output_dir)
    assert {path.name for path in directory.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", RECORD_NAME, "recipe.yaml", "metrics.jsonl",
        "checkpoints", "README.md", "report",
    }  # fmt: skip
    assert Recipe.from_yaml(directory / "recipe.yaml") == replace(
        recipe, eval_data=str(work / "data" / "a.txt"), eval_every=4
    )
    record = read_record(directory)
    assert record.encoding == result.patch.encoding
    assert (record.target_length, record.shape.trained_length) == (TARGET, TRAINED)
    assert record.base_model == recipe.model

    ids = torch.arange(2 * TARGET).remainder(299).view(2, TARGET)
    reloaded = load(directory)
    with torch.no_grad():
        ours, theirs = result.model(ids).logits, reloaded(ids).logits
        base = AutoModelForCausalLM.from_pretrained(recipe.model)(ids).logits
    assert torch.equal(ours, theirs)
    assert not torch.allclose(ours, base, atol=1e-2)
    assert current_patch(reloaded) is not None

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


@pytest.mark.slow
def test_the_loss_falls_on_a_text_to_memorise(recipe: Recipe, work: Path) -> None:
    recipe = replace(
        recipe, data=str(work / "data" / "a.txt"), steps=60, max_tokens=TARGET, lora_dropout=0, lora_rank=16,
        lora_targets="all-linear", train_norm_embed=True, learning_rate=2e-2, gradient_accumulation=1,
    )  # fmt: skip
    finetune(recipe, model=tiny_llama(tie_word_embeddings=True))
    losses = [line["loss"] for line in metrics(recipe.output_dir)]
    assert losses[0] > 5
    assert losses[-1] < 0.3 * losses[0]


def test_the_base_weights_are_untouched(recipe: Recipe) -> None:
    model = tiny_llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = finetune(recipe, model=model)
    unloaded = result.model.unload()
    result.patch.remove()
    assert_same(dict(unloaded.state_dict()), before)
    assert any(
        value.abs().max() > 0 for name, value in weights(recipe.output_dir).items() if "lora_B" in name
    )


WAYS: dict[str, dict[str, Any]] = {
    "attention": {},
    "all-linear": {"lora_targets": "all-linear"},
    "rslora": {"rslora": True},
    "dora": {"dora": True, "lora_targets": "all-linear"},
    "norms and embeddings": {"train_norm_embed": True},
    "all of it": {"train_norm_embed": True, "lora_targets": "all-linear", "rslora": True, "dora": True},
}


@pytest.mark.parametrize(("way", "tied"), few(product(WAYS, (False, True)), 7, 3))
def test_every_way_to_train_leaves_frozen_weights_alone_and_reloads_and_merges(
    recipe: Recipe, tmp_path: Path, way: str, tied: bool
) -> None:
    torch.manual_seed(1)
    base = tiny_llama(tie_word_embeddings=tied)
    base.save_pretrained(tmp_path / "base")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    tokenizer_of(recipe).save_pretrained(tmp_path / "base")
    recipe = replace(recipe, **WAYS[way], model=str(tmp_path / "base"), steps=4)
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
    assert ("train_norm_embed" in WAYS[way]) == any("norm" in name for name in trained)
    assert ("dora" in WAYS[way]) == any("magnitude" in name for name in trained)
    adapted = {name for name in linear if any(name.removesuffix("weight") in one for one in trained)}
    everywhere = WAYS[way].get("lora_targets") == "all-linear"
    assert adapted == (linear if everywhere else {name for name in linear if "self_attn" in name})

    ids = torch.arange(2 * TARGET).remainder(299).view(2, TARGET)
    rx.merge(recipe.output_dir, tmp_path / "merged")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        ours = result.model(ids).logits
        assert torch.equal(ours, load(recipe.output_dir)(ids).logits)
        assert_same_but_rounding(stock(ids).logits, ours)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")(ids).logits
    assert not torch.allclose(ours, plain, atol=1e-2)
    assert stock.config.tie_word_embeddings == tied


def test_rslora_scales_by_the_root_of_the_rank(recipe: Recipe) -> None:
    model = get_peft_model(
        tiny_llama(), lora_config(tiny_llama(), replace(recipe, rslora=True, lora_rank=16))
    )
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == recipe.lora_alpha / 4


def test_gradient_checkpointing_changes_nothing_but_memory(recipe: Recipe, finished: Path) -> None:
    result = finetune(replace(recipe, gradient_checkpointing=True))
    assert_same(weights(recipe.output_dir), weights(finished))
    assert not any(getattr(module, "gradient_checkpointing", False) for module in result.model.modules())


def test_accumulation_equals_a_larger_batch(recipe: Recipe, tmp_path: Path) -> None:
    recipe = replace(recipe, lora_dropout=0, steps=3)
    finetune(recipe)
    other = replace(recipe, batch_size=2, gradient_accumulation=1, output_dir=str(tmp_path / "other"))
    finetune(other)
    ours, theirs = weights(recipe.output_dir), weights(other.output_dir)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=1e-4)


def test_the_first_step_is_adamw_on_the_mean_loss(recipe: Recipe) -> None:
    """Compared with an independent step: peft, torch's AdamW and the plain loss on full logits."""
    recipe = replace(recipe, lora_dropout=0, steps=1, warmup_steps=0, save_every=0, max_grad_norm=1e9)
    result = finetune(recipe)
    after = weights(recipe.output_dir)

    from rope_extend import extend
    from rope_extend.data.blocks import cut_blocks
    from rope_extend.data.documents import load_documents

    model = AutoModelForCausalLM.from_pretrained(recipe.model)
    extend(model, TARGET, "yarn")
    torch.manual_seed(recipe.seed)
    peft_model = get_peft_model(model, lora_config(model, recipe))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(recipe.model)
    dataset = cut_blocks(load_documents(recipe.data, tokenizer, min_tokens=TARGET), TARGET)
    first = [block_index(position, recipe.seed, len(dataset)) for position in range(2)]
    ids = torch.stack([dataset[index]["input_ids"] for index in first])
    parameters = [value for value in peft_model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, betas=recipe.betas, weight_decay=0.0)
    loss = peft_model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, value in peft_model.state_dict().items():
        if "lora_" in name:
            torch.testing.assert_close(after[name.replace(".default", "")], value, atol=1e-6, rtol=1e-3)


def test_gradients_are_clipped_and_their_norm_is_from_before(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW hardly depends on the size of a gradient, so the gradients are compared at its step."""
    stepped: list[list[torch.Tensor]] = []
    step = torch.optim.AdamW.step

    def record(self: torch.optim.AdamW, *args: Any, **options: Any) -> Any:
        gradients = [value.grad.clone() for group in self.param_groups for value in group["params"]]
        if not gradients[0].is_meta:  # not a dry run
            stepped.append(gradients)
        return step(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    recipe = replace(recipe, steps=1, save_every=0, lora_dropout=0)
    for name, limit in (("free", 1e9), ("clipped", 1e-3)):
        finetune(replace(recipe, max_grad_norm=limit, output_dir=str(tmp_path / name)))
    free, clipped = stepped
    norm = math.sqrt(sum(float(value.square().sum()) for value in free))
    assert norm > 1e-2
    for name in ("free", "clipped"):
        assert metrics(tmp_path / name)[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for one, other in zip(free, clipped, strict=True):
        torch.testing.assert_close(other, one * (1e-3 / norm), rtol=1e-4, atol=0)


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
    state = torch.load(Path(recipe.output_dir, "checkpoints/step-3/optimizer.pt"), weights_only=True)
    assert {v.dtype for s in state["state"].values() for v in s.values()} == {torch.float32}
    assert {v.dtype for n, v in weights(recipe.output_dir).items() if "lora" in n} == {torch.float32}
    ids = torch.arange(TARGET)[None]
    with torch.no_grad():
        ours = result.model(ids).logits
        theirs = load(recipe.output_dir, dtype=torch.bfloat16)(ids).logits
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tied", [False, True])
def test_norms_and_embeddings_are_trained_saved_and_stay_tied(recipe: Recipe, tied: bool) -> None:
    recipe = replace(recipe, train_norm_embed=True, steps=2)
    torch.manual_seed(1)
    model = tiny_llama(tie_word_embeddings=tied)
    base = Path(recipe.output_dir).with_name("base")
    model.save_pretrained(base)
    result = finetune(replace(recipe, model=str(base)), tokenizer=tokenizer_of(recipe))
    names = weights(recipe.output_dir)
    assert any("embed_tokens" in name for name in names)
    assert sum("norm" in name for name in names) == 5  # two in each of two layers, and the last
    ids = torch.arange(TARGET)[None]
    reloaded = load(recipe.output_dir)
    with torch.no_grad():
        assert torch.equal(result.model(ids).logits, reloaded(ids).logits)
    for one in (result.model, reloaded):
        assert torch.equal(one.get_input_embeddings().weight, one.get_output_embeddings().weight) == tied
    assert not torch.equal(
        result.model.get_input_embeddings().weight,
        AutoModelForCausalLM.from_pretrained(base).model.embed_tokens.weight,
    )


def tokenizer_of(recipe: Recipe) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(recipe.model)


@pytest.mark.slow
def test_tensorboard_gets_the_metrics(recipe: Recipe, work: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = replace(recipe, tensorboard=True, steps=3, eval_data=str(work / "data"))
    finetune(recipe)
    events = EventAccumulator(str(Path(recipe.output_dir) / "tensorboard"))
    events.Reload()
    logged = [event.value for event in events.Scalars("loss")]
    assert logged == pytest.approx([line["loss"] for line in metrics(recipe.output_dir) if "loss" in line])
    assert f"perplexity/{TARGET}" in events.Tags()["scalars"]


def test_every_epoch_sees_every_block_once_and_in_another_order() -> None:
    epochs = [[block_index(epoch * 50 + i, seed=3, count=50) for i in range(50)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] != [block_index(i, seed=4, count=50) for i in range(50)]


def test_a_run_interrupted_by_a_signal_ends_bit_for_bit_the_same(
    recipe: Recipe, tmp_path: Path, at_step: AtStep, work: Path
) -> None:
    recipe = replace(recipe, eval_data=str(work / "data" / "a.txt"), eval_every=3)
    finetune(recipe)
    whole = weights(recipe.output_dir)
    expected = metrics(recipe.output_dir)

    recipe = replace(recipe, output_dir=str(tmp_path / "interrupted"))
    before = signal.getsignal(signal.SIGINT)
    at_step(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(FinetuneInterrupted) as stopped:
        finetune(recipe)
    assert stopped.value.code == 128 + signal.SIGINT
    assert stopped.value.checkpoint.name == "step-5"
    assert signal.getsignal(signal.SIGINT) is before
    assert not Path(recipe.output_dir, "adapter_model.safetensors").exists()

    torch.manual_seed(999)  # what the process did in between does not matter
    np.random.seed(999)
    computed = at_step(0, lambda: None)
    finetune(recipe, resume=True)
    assert computed == [6, 7, 8]
    assert_same(weights(recipe.output_dir), whole)
    timeless = [
        [{k: v for k, v in line.items() if not re.search("second|memory", k)} for line in lines]
        for lines in (expected, metrics(recipe.output_dir))
    ]
    assert timeless[0] == timeless[1]


def test_sigterm_saves_and_says_how_to_resume(
    recipe: Recipe, at_step: AtStep, caplog: pytest.LogCaptureFixture
) -> None:
    at_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as stopped:
        finetune(recipe)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert "SIGTERM: stopped after step 2 of 8" in caplog.text
    assert "--resume" in caplog.text


def test_a_run_that_died_resumes_from_its_last_checkpoint(
    recipe: Recipe, finished: Path, at_step: AtStep
) -> None:

    class PowerCut(BaseException):
        pass

    def die() -> None:
        raise PowerCut

    at_step(8, die)
    with pytest.raises(PowerCut):
        finetune(recipe)
    assert [line["step"] for line in metrics(recipe.output_dir)][-1] == 7
    half_written = Path(recipe.output_dir, "checkpoints", ".step-7.partial")
    half_written.mkdir()
    (half_written / "state.json").write_text("{")
    computed = at_step(0, lambda: None)
    finetune(recipe, resume=True)
    assert computed == [7, 8]
    assert not half_written.exists()
    assert_same(weights(recipe.output_dir), weights(finished))
    assert [line["step"] for line in metrics(recipe.output_dir)] == list(range(1, 9))


def test_the_checkpoint_of_another_run_resumes_in_a_new_directory(recipe: Recipe, finished: Path) -> None:
    finetune(recipe, resume=finished / "checkpoints" / "step-6")
    assert_same(weights(recipe.output_dir), weights(finished))
    assert Recipe.from_yaml(Path(recipe.output_dir, "recipe.yaml")) == recipe


@pytest.mark.slow
def test_the_last_two_checkpoints_are_kept_and_an_older_one_can_be_chosen(
    recipe: Recipe, finished: Path
) -> None:
    recipe = replace(recipe, save_every=2)
    finetune(recipe)
    whole = weights(finished)
    assert_same(weights(recipe.output_dir), whole)
    checkpoints = Path(recipe.output_dir, "checkpoints")
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-6", "step-8"]
    finetune(recipe, resume=checkpoints / "step-6")
    assert_same(weights(recipe.output_dir), whole)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-6", "step-8"]


@pytest.mark.slow
def test_a_finished_run_can_be_extended_but_not_with_a_changed_recipe(recipe: Recipe, finished: Path) -> None:
    finetune(replace(recipe, steps=3))
    with pytest.raises(
        RopeExtendError, match=r"learning_rate was 0\.01 and is 0\.001; seed was 0 and is 1\."
    ):
        finetune(replace(recipe, learning_rate=1e-3, seed=1), resume=True)
    with pytest.raises(RopeExtendError, match="3 steps are done, and the recipe has steps 2"):
        finetune(replace(recipe, steps=2), resume=True)
    finetune(recipe, resume=True)
    assert_same(weights(recipe.output_dir), weights(finished))


def test_changed_data_are_not_resumed(recipe: Recipe, tmp_path: Path, work: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((work / "data" / "a.txt").read_text())
    recipe = replace(recipe, data=str(text), steps=3)
    finetune(recipe)
    text.write_text((work / "data" / "b.txt").read_text())
    with pytest.raises(RopeExtendError, match="cannot resume: the documents of"):
        finetune(replace(recipe, steps=6), resume=True)


def files_below(directory: str | Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()}


def test_newer_checkpoints_stay_until_the_first_new_one_is_saved(
    recipe: Recipe, tmp_path: Path, finished: Path, at_step: AtStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, recipe.output_dir)
    checkpoints = Path(recipe.output_dir, "checkpoints")
    before = files_below(checkpoints)
    recipe = replace(recipe, save_every=1, keep_checkpoints=1)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the weights cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
        with pytest.raises(RopeExtendError, match="the weights cannot be read"):
            finetune(recipe, resume=checkpoints / "step-6")
    assert files_below(checkpoints) == before

    at_step(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(FinetuneInterrupted):
        finetune(recipe, resume=checkpoints / "step-6")
    assert [path.name for path in checkpoints.iterdir()] == ["step-7"]
    assert_same(weights(finetune(recipe, resume=True).output_dir), weights(finished))


@pytest.mark.slow
def test_metrics_belong_to_the_checkpoints_that_are_there(
    recipe: Recipe, work: Path, at_step: AtStep
) -> None:
    """A rewind that dies before its first checkpoint changes nothing; its first checkpoint cuts the file."""
    recipe = replace(
        recipe, steps=6, save_every=2, keep_checkpoints=5, eval_data=str(work / "data"), eval_every=2
    )
    first = finetune(recipe)
    checkpoints = Path(recipe.output_dir, "checkpoints")
    before = metrics(recipe.output_dir)

    class PowerCut(BaseException):
        pass

    def die() -> None:
        raise PowerCut

    at_step(4, die)
    with pytest.raises(PowerCut):
        finetune(recipe, resume=checkpoints / "step-2")
    assert metrics(recipe.output_dir) == before
    again = finetune(recipe, resume=True)
    assert (again.loss, again.perplexity) == (first.loss, first.perplexity)
    assert metrics(recipe.output_dir) == before

    at_step(5, die)
    with pytest.raises(PowerCut):
        finetune(recipe, resume=checkpoints / "step-2")
    assert [line["step"] for line in metrics(recipe.output_dir)] == [0, 1, 2, 2, 3, 4, 4]
    assert [path.name for path in sorted(checkpoints.iterdir())] == ["step-2", "step-4"]


@pytest.mark.parametrize("rewound", few([False, True], 2, 1))
def test_a_finished_run_reports_the_perplexity_of_its_own_step(
    recipe: Recipe, work: Path, rewound: bool
) -> None:
    recipe = replace(recipe, save_every=3, steps=6, eval_data=str(work / "data"))
    path = Path(finetune(recipe).output_dir)
    lines = metrics(path)
    step = 3 if rewound else 6
    if not rewound:  # as after a crash between a checkpoint and its evaluation
        kept = [line for line in lines if "perplexity" not in line or not line["step"]]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    result = finetune(replace(recipe, steps=step), resume=path / "checkpoints" / f"step-{step}")
    measured = {line["step"]: line["perplexity"] for line in metrics(path) if "perplexity" in line}
    assert list(measured) == [0, 3, 6] if rewound else [0, 6]
    assert measured[6] == next(line["perplexity"] for line in reversed(lines) if "perplexity" in line)
    assert {str(length): value for length, value in result.perplexity.items()} == measured[step]
    assert measured[step] != measured[0]
    report = (path / "report" / "report.md").read_text()
    assert ("after step 6" in report) == (not rewound)
    assert f"after step {step}" in report


@pytest.mark.parametrize("resumed", ["the newest", "by path"])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_taken_for_damaged(
    recipe: Recipe, finished: Path, monkeypatch: pytest.MonkeyPatch, resumed: str
) -> None:
    shutil.copytree(finished, recipe.output_dir)
    before = files_below(recipe.output_dir)
    newest = Path(recipe.output_dir, "checkpoints", "step-8")
    sha256 = resume_module.sha256

    def stale(path: Path) -> str:
        if path.parent == newest:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return sha256(path)

    monkeypatch.setattr(resume_module, "sha256", stale)
    with pytest.raises(
        RopeExtendError, match=r"cannot read the checkpoint .*step-8.*may be intact: try again"
    ):
        finetune(replace(recipe, steps=9), resume=True if resumed == "the newest" else newest)
    assert files_below(recipe.output_dir) == before


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "name"),
    few(
        product(
            (cut_short, flip_a_bit, Path.unlink),
            ("trainable.safetensors", "optimizer.pt", "rng-0.pt", "state.json", "manifest.json"),
        ),
        4,
    ),
)
def test_a_damaged_checkpoint_is_found_and_the_one_before_it_is_used(
    recipe: Recipe, finished: Path, harm: Callable[[Path], None], name: str, at_step: AtStep,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    shutil.copytree(finished, recipe.output_dir)
    whole = weights(finished)
    newest = Path(recipe.output_dir, "checkpoints", "step-8")
    harm(newest / name)
    if name != "state.json":
        with pytest.raises(RopeExtendError, match=r"step-8 is damaged.*the newest intact one"):
            finetune(recipe, resume=newest)
    computed = at_step(0, lambda: None)
    finetune(recipe, resume=True)
    assert "step-8 is damaged" in caplog.text
    assert "resuming from step-6 instead" in caplog.text
    assert computed == [7, 8]
    assert_same(weights(recipe.output_dir), whole)


@pytest.fixture(scope="module")
def finished(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the recipe. Tests compare theirs with it, and change only copies of it."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", work / "cache")
        patch.setattr("rope_extend.training.finetune.plan_training", lambda *_, **__: None)
        finetune(Recipe(**(settings(work) | {"output_dir": str(directory)})))
    return directory


def test_without_an_intact_checkpoint_nothing_is_resumed(recipe: Recipe, finished: Path) -> None:
    shutil.copytree(finished, recipe.output_dir)
    for checkpoint in Path(recipe.output_dir, "checkpoints").iterdir():
        cut_short(checkpoint / "optimizer.pt")
    with pytest.raises(RopeExtendError, match=r"nothing to resume.*step-8.*optimizer\.pt has.*step-6"):
        finetune(replace(recipe, steps=9), resume=True)


def test_the_requested_number_of_checkpoints_is_kept(recipe: Recipe) -> None:
    finetune(replace(recipe, save_every=1, keep_checkpoints=3))
    kept = sorted(path.name for path in Path(recipe.output_dir, "checkpoints").iterdir())
    assert kept == ["step-6", "step-7", "step-8"]


def test_a_resume_ends_what_a_killed_save_had_begun(recipe: Recipe) -> None:
    directory = Path(recipe.output_dir)
    directory.mkdir()
    (directory / ".recipe.yaml.0123abcd.partial").touch()  # killed before it wrote its first file
    finetune(replace(recipe, steps=3, save_every=1), resume=True)
    checkpoints = directory / "checkpoints"
    shutil.copytree(checkpoints / "step-2", checkpoints / "step-1")  # killed before it removed this one
    finetune(replace(recipe, steps=3, save_every=1), resume=True)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-3"]


def poisoned(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make the loss of some steps NaN."""
    original = loop.TrainingRun._batch
    forward = NextTokenLoss.forward
    now = [0]

    def batch(run: Any, number: int) -> Any:
        now[0] = run.state.step + 1
        return original(run, number)

    def loss(self: NextTokenLoss, *args: Any, **kwargs: Any) -> torch.Tensor:
        value = forward(self, *args, **kwargs)
        return value * math.nan if now[0] in steps else value

    monkeypatch.setattr(loop.TrainingRun, "_batch", batch)
    monkeypatch.setattr(NextTokenLoss, "forward", loss)


def test_a_step_that_is_not_finite_is_skipped_counted_and_survives_an_interruption(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poisoned(monkeypatch, {1, 4, 5})
    recipe = replace(recipe, save_every=1, keep_checkpoints=9)
    result = finetune(recipe)
    assert (result.steps, result.skipped) == (8, 3)
    assert math.isfinite(result.loss)
    lines = metrics(recipe.output_dir)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert {line["step"]: line["skipped"] for line in lines if "skipped" in line} == {1: 1, 4: 2, 5: 3}
    assert all(("loss" in line) != ("skipped" in line) for line in lines)
    assert "step 4: the loss is nan" in caplog.text
    saved = {
        step: load_file(Path(recipe.output_dir, "checkpoints", f"step-{step}", "trainable.safetensors"))
        for step in range(1, 9)
    }
    assert_same(saved[3], saved[4])
    assert_same(saved[4], saved[5])
    assert any(not torch.equal(value, saved[6][name]) for name, value in saved[5].items())
    assert all(value.isfinite().all() for value in saved[8].values())

    other = replace(recipe, output_dir=str(tmp_path / "other"))
    finetune(replace(other, steps=4))
    assert finetune(other, resume=True).skipped == 3
    assert_same(weights(recipe.output_dir), weights(other.output_dir))


@pytest.mark.slow
def test_too_many_skipped_steps_in_a_row_end_the_run_also_across_an_interruption(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, {2, 4, 5, 6})
    recipe = replace(recipe, max_skipped=2)
    finetune(replace(recipe, steps=5))
    with pytest.raises(
        RopeExtendError,
        match=r"step 6: the loss is nan.*3 consecutive steps.*max_skipped is 2.*learning_rate",
    ):
        finetune(recipe, resume=True)


@pytest.mark.parametrize("step", few((1, 5), 2))
def test_a_full_disk_is_one_clear_error_and_loses_no_checkpoint(
    recipe: Recipe, tmp_path: Path, step: int, at_step: AtStep
) -> None:
    """A real failing write: a limit on the file size of the process. Python ignores the signal of it."""
    resource = pytest.importorskip("resource")
    recipe = replace(recipe, save_every=1, steps=5, keep_checkpoints=9)
    finetune(recipe)
    whole = weights(recipe.output_dir)
    other = replace(recipe, output_dir=str(tmp_path / "full"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    at_step(step, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1])))
    try:
        with pytest.raises(RopeExtendError) as refused:
            finetune(other)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(refused.value)
    assert said.startswith(f"cannot write the checkpoint {other.output_dir}/checkpoints/step-{step}:")
    assert "Earlier checkpoints are intact" in said
    names = sorted(path.name for path in Path(other.output_dir, "checkpoints").iterdir())
    assert names == [f"step-{number}" for number in range(1, step)]
    at_step(0, lambda: None)
    finetune(other, resume=True)
    assert_same(weights(other.output_dir), whole)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if weights are loaded: refusals must come before."""

    def loading(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loading)


def test_an_output_directory_with_a_run_is_refused_and_left_alone(recipe: Recipe, finished: Path) -> None:
    shutil.copytree(finished, recipe.output_dir)
    files = files_below(recipe.output_dir)
    with pytest.raises(
        RopeExtendError, match=r"already holds a run \(recipe\.yaml\); resume=True continues it, overwrite="
    ):
        finetune(recipe)
    assert files == files_below(recipe.output_dir)
    with pytest.raises(RopeExtendError, match="contradict"):
        finetune(recipe, resume=True, overwrite=True)
    notes = Path(recipe.output_dir, "notes.txt")
    notes.write_text("mine")
    finetune(replace(recipe, steps=1), overwrite=True)
    assert [line["step"] for line in metrics(recipe.output_dir)] == [1]
    assert notes.read_text() == "mine"


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
    ],
)
def test_mistakes_are_refused_before_the_weights_are_loaded(
    recipe: Recipe, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RopeExtendError, match=message):
        finetune(replace(recipe, **changes))
    assert not Path(recipe.output_dir).exists()


@pytest.mark.usefixtures("no_weights")
def test_nothing_to_resume_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(RopeExtendError, match="nothing to resume"):
        finetune(recipe, resume=True)
    with pytest.raises(RopeExtendError, match="not a checkpoint of a run"):
        finetune(recipe, resume=tmp_path)


def test_a_loss_that_is_never_finite_stops_the_run_and_undoes_the_model(recipe: Recipe) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = math.inf
    before, modules = dict(model.state_dict()), dict(model.named_modules())
    with pytest.raises(
        RopeExtendError, match=r"step 4: the loss is (nan|inf).*4 consecutive steps.*lower learning_rate"
    ):
        finetune(recipe, model=model)
    assert current_patch(model) is None
    assert dict(model.named_modules()) == modules
    assert model.state_dict().keys() == before.keys()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config.max_position_embeddings == TRAINED


def test_a_model_with_a_patch_or_adapter_is_refused(recipe: Recipe) -> None:
    result = finetune(replace(recipe, steps=1))
    again = replace(recipe, output_dir=recipe.output_dir + "-again")
    for model in (result.model, result.model.get_base_model()):
        with pytest.raises(RopeExtendError, match="has a patch or an adapter already"):
            finetune(again, model=model)
    with pytest.raises(RopeExtendError, match="load it with dtype"):
        finetune(again, model=tiny_llama().half())


def test_attention_targets_are_found_by_family(recipe: Recipe) -> None:
    assert lora_config(tiny_llama(), recipe).target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"}
    neox = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        )
    )
    assert lora_config(neox, recipe).target_modules == {"query_key_value", "dense"}
