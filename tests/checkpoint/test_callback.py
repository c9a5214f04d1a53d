"""transformers' Trainer with our callback: every checkpoint computes what the model did when it was saved."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ALL_FAMILIES, TARGET, llama, tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from tolerances import assert_same_but_rounding
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import DPOConfig

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.model_type import MODEL_TYPE
from rope_extend.checkpoint.record import read_record
from rope_extend.models.checkpoint_directory import RECORD_NAME
from rope_extend.models.parameters import learned_parameters, read_learned

IDS = torch.arange(80).remainder(61)[None]
DATA = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(3, 64, (6, 48), generator=torch.Generator().manual_seed(1))
]
STEPS = 3


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    mode = model.training
    found = model.eval()(IDS).logits
    model.train(mode)
    return found


class Watching(TrainerCallback):
    """The model's logits when each checkpoint was saved, by step."""

    def __init__(self) -> None:
        self.seen: dict[int, torch.Tensor] = {}

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen[state.global_step] = logits(model)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def patched(base: Path, kind: str, method: str = "yarn", adapter_name: str = "default") -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    rx.extend(model, TARGET, method)
    if kind == "full":
        return model
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    return get_peft_model(model, config, adapter_name=adapter_name)


def trainer(model: Any, output: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(output), max_steps=STEPS, save_steps=1, per_device_train_batch_size=1, use_cpu=True,
        report_to=[], disable_tqdm=True, learning_rate=1e-2, seed=0, logging_strategy="no", **options,
    )  # fmt: skip
    return Trainer(
        model=model, args=arguments, train_dataset=DATA, eval_dataset=DATA[:2], callbacks=list(callbacks)
    )


@pytest.mark.parametrize(
    ("kind", "method"), [("full", "yarn"), ("adapter", "yarn"), ("full", "xpos"), ("full", "kerple")]
)
def test_every_checkpoint_reads_as_the_model_did_when_it_was_saved(
    base: Path, tmp_path: Path, kind: str, method: str
) -> None:
    """Also what is saved at the end. `xpos` has no stock form, and `kerple` learns parameters."""
    model, watching = patched(base, kind, method), Watching()
    run = trainer(model, tmp_path / "run", watching, rx.SaveEncodingCallback())
    run.train()
    assert sorted(watching.seen) == [1, 2, 3]
    assert not torch.allclose(watching.seen[1], watching.seen[3], atol=1e-3)  # training changed the model
    expected = {tmp_path / "run" / f"checkpoint-{step}": seen for step, seen in watching.seen.items()}
    run.save_model()
    run.save_model(str(tmp_path / "elsewhere"))
    for directory in (tmp_path / "run", tmp_path / "elsewhere"):
        expected[directory] = logits(model)
    for directory, seen in expected.items():
        loaded = rx.load(directory)
        assert torch.equal(logits(loaded), seen)
        assert isinstance(loaded, PeftModel) == (kind == "adapter")
        record = read_record(directory)
        assert record.encoding == rx.current_patch(model).encoding
        assert record.weights
        assert (record.base_fingerprint is not None) == (kind == "adapter")
        if kind == "full":
            stored = json.loads((directory / "config.json").read_text())["model_type"]
            assert stored == ("llama" if method == "yarn" else MODEL_TYPE)
    twin = deepcopy(model)
    with torch.no_grad():
        next(p for p in twin.parameters() if p.requires_grad and p.ndim > 1).add_(1)
    twin.save_pretrained(tmp_path / "twin")
    assert torch.equal(logits(rx.load(tmp_path / "twin")), logits(twin))
    rx.current_patch(model).remove()
    model.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / RECORD_NAME).exists()


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_a_model_without_a_patch_is_refused_before_the_first_step(
    base: Path, tmp_path: Path, kind: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    before = logits(model)
    with pytest.raises(RopeExtendError, match="carries no patch"):
        trainer(model, tmp_path / "run", rx.SaveEncodingCallback()).train()
    assert torch.equal(logits(model), before)
    assert not list(tmp_path.glob("run/*"))


def test_processes_that_trainer_does_not_know_of_are_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would do the whole run, in one directory."""
    run = trainer(patched(base, "full"), tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RopeExtendError, match=r"torchrun started 2 processes .*, but only 1 found"):
        rx.SaveEncodingCallback().on_init_end(run.args, run.state, run.control, run.model)


@pytest.mark.parametrize(
    ("kind", "method"),
    [*(pytest.param(kind, "yarn", marks=pytest.mark.slow) for kind in ("full", "adapter")), ("full", "xpos")],
)
def test_a_run_that_is_resumed_ends_as_one_that_was_not_interrupted(
    base: Path, tmp_path: Path, kind: str, method: str
) -> None:
    """Also of a plugin-only model, under `xpos`."""
    whole = patched(base, kind, method)
    trainer(whole, tmp_path / "whole", rx.SaveEncodingCallback()).train()
    model, watching = patched(base, kind, method), Watching()
    run = trainer(model, tmp_path / "whole", watching, rx.SaveEncodingCallback())
    run.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert sorted(watching.seen) == [2, 3]
    assert_same_but_rounding(logits(model), logits(whole))
    for step, expected in watching.seen.items():
        assert torch.equal(logits(rx.load(tmp_path / "whole" / f"checkpoint-{step}")), expected)
    # Without this check, the same command with another encoding would resume and train garbage.
    other = patched(base, kind, "linear")
    with pytest.raises(RopeExtendError, match=rf"checkpoint-3 was trained with {method}.* uses linear"):
        trainer(other, tmp_path / "whole", rx.SaveEncodingCallback()).train(resume_from_checkpoint=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", {case.model_type: case for case in ALL_FAMILIES}.values(), ids=str)
def test_a_whole_model_of_every_family_is_resumed_whole(case: Any, tmp_path: Path) -> None:
    """`save_pretrained` gives the weights of many families other names, by which `Trainer` loads nothing."""
    model = tiny_model(case)
    rx.patch_model(model, rx.encoding("none"), target_length=TARGET)
    callback, control = rx.SaveEncodingCallback(), TrainerControl()
    run = trainer(model, tmp_path / "run", load_best_model_at_end=True, eval_strategy="steps", eval_steps=1)
    callback.on_train_begin(run.args, TrainerState(), control, model)
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    model.save_pretrained(checkpoint)
    saved = deepcopy(model.state_dict())
    for event in (callback.on_train_begin, callback.on_train_end):
        with torch.no_grad():
            for value in model.parameters():
                value.zero_()
        run._load_from_checkpoint(checkpoint)
        event(run.args, TrainerState(global_step=1, best_model_checkpoint=checkpoint), control, model)
        for name, value in model.state_dict().items():
            assert torch.equal(value, saved[name]), name


def test_what_an_encoding_learns_is_trained_with_lora_and_resumed(base: Path, tmp_path: Path) -> None:
    runs = {}
    for name, resumed in (("whole", None), ("resumed", tmp_path / "whole" / "checkpoint-1")):
        model = patched(base, "adapter", "fire")
        before = {key: value.clone() for key, value in learned_parameters(model).items()}
        run = trainer(model, tmp_path / name, rx.SaveEncodingCallback())
        run.train(
            resume_from_checkpoint=resumed and str(shutil.copytree(resumed, tmp_path / name / "checkpoint-1"))
        )
        assert all(not torch.equal(value, before[key]) for key, value in learned_parameters(model).items())
        runs[name] = model
    assert_same_but_rounding(logits(runs["resumed"]), logits(runs["whole"]))
    (tmp_path / "whole" / "checkpoint-3" / "encoding.safetensors").unlink()
    again = trainer(patched(base, "adapter", "fire"), tmp_path / "whole", rx.SaveEncodingCallback())
    with pytest.raises(RopeExtendError, match=r"encoding.safetensors does not fit this model: .* is missing"):
        again.train(resume_from_checkpoint=True)


def test_the_best_step_is_restored_with_what_its_encoding_learned(base: Path, tmp_path: Path) -> None:
    model, losses = patched(base, "adapter", "fire"), count(1)
    run = trainer(
        model, tmp_path / "run", rx.SaveEncodingCallback(), eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True,
    )  # fmt: skip
    run.evaluate = lambda *_, **__: {"eval_loss": float(next(losses))}
    run.train()
    best = read_learned(tmp_path / "run" / "checkpoint-1")
    last = read_learned(tmp_path / "run" / "checkpoint-3")
    for name, value in learned_parameters(model).items():
        assert torch.equal(value, best[name])
        assert not torch.equal(value, last[name])


def test_full_training_by_preferences_warns_of_a_reference_that_is_not_extended(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, warns in (("full", True), ("adapter", False)):
        caplog.clear()
        arguments = DPOConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False)
        rx.SaveEncodingCallback().on_train_begin(
            arguments, TrainerState(), TrainerControl(), model=patched(base, kind)
        )
        assert ("ref_model=copy.deepcopy(model)" in caplog.text) == warns


def test_every_adapter_that_peft_saves_has_its_record(base: Path, tmp_path: Path) -> None:
    model = patched(base, "adapter")
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    for active in ("default", "other"):
        model.set_adapter(active)
        model.save_pretrained(tmp_path / active)
        expected = logits(model)
        for directory in (tmp_path / active, tmp_path / active / "other"):
            assert read_record(directory).weights
        assert torch.equal(
            logits(rx.load(tmp_path / active / ("" if active == "default" else active))), expected
        )
        model.save_pretrained(tmp_path / f"one-{active}", selected_adapters=["other"])
        assert [path.parent.name for path in tmp_path.glob(f"one-{active}/**/{RECORD_NAME}")] == ["other"]


def test_an_adapter_is_not_resumed_on_another_base_model_or_window(base: Path, tmp_path: Path) -> None:
    trainer(patched(base, "adapter"), tmp_path / "run", rx.SaveEncodingCallback()).train()
    longer = AutoModelForCausalLM.from_pretrained(base)
    rx.patch_model(longer, rx.encoding("yarn", factor=8.0), target_length=2 * TARGET)
    other = llama()
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    for model, message in (
        (patched(tmp_path / "other", "adapter"), r"on .*base' .*, but .*other' has other"),
        (get_peft_model(longer, lora), r"with .*target_length \(256 there, 512 here\)"),
    ):
        run = trainer(model, tmp_path / "run", rx.SaveEncodingCallback())
        with pytest.raises(RopeExtendError, match=f"checkpoint-3 was trained {message}"):
            run.train(resume_from_checkpoint=True)


def test_a_loop_of_one_s_own(base: Path, tmp_path: Path) -> None:
    """peft writes an adapter with a name one level down."""
    model = patched(base, "adapter", adapter_name="long")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for row in DATA[:2]:
        model(row["input_ids"][None], labels=row["labels"][None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(rx.load(tmp_path / "saved" / "long")), logits(model))
    model.save_pretrained(tmp_path / "worker", is_main_process=False)
    rx.current_patch(model).remove()
    model.save_pretrained(tmp_path / "plain")
    assert not [*tmp_path.glob(f"worker/**/{RECORD_NAME}"), *tmp_path.glob(f"plain/**/{RECORD_NAME}")]
