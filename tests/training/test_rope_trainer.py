"""`RopeTrainer` with any arguments of `Trainer`: its counts are true, and it loses no checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import llama
from runs import metrics
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainingArguments

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.training.resume import checkpoints
from rope_extend.training.trainer import FinetuneInterrupted

ROWS = [{"input_ids": ids, "labels": ids} for ids in torch.arange(5 * 12).view(5, 12) % 60]


class Stream(IterableDataset[Any]):
    """Rows without a number."""

    def __iter__(self) -> Any:
        return iter(ROWS)


class Stop(TrainerCallback):  # type: ignore[misc]
    """SIGTERM after the second step, once."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and self.__dict__.setdefault("first", True):
            self.first = False
            os.kill(os.getpid(), signal.SIGTERM)


def made(output: Path, data: Any = ROWS, **changes: Any) -> rx.RopeTrainer:
    options = {name: changes.pop(name) for name in ("callbacks", "eval_dataset") if name in changes}
    model = llama()
    rx.patch_model(model, rx.encoding("yarn", factor=8.0), target_length=256)
    settings = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "report_to": [],
        "per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True, **changes,
    }  # fmt: skip
    return rx.RopeTrainer(model, TrainingArguments(str(output), **settings), train_dataset=data, **options)


SHORT = [{name: ids[:8] for name, ids in row.items()} for row in ROWS]


@pytest.mark.parametrize(
    ("data", "batch_size", "tokens"),
    [(ROWS, 2, [24, 48, 60]), (Stream(), 2, [24, 48, 60]), ([ROWS[0], *SHORT], 1, [12, 20, 28])],
    ids=["incomplete batch", "stream", "unequal rows"],
)
def test_tokens_are_those_of_the_batches(
    tmp_path: Path, data: Any, batch_size: int, tokens: list[int]
) -> None:
    order = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": batch_size}
    made(tmp_path, data, max_steps=3, **order).train()
    assert [line["tokens"] for line in metrics(tmp_path)] == tokens


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_an_interrupted_run_has_a_checkpoint_from_which_its_trainer_continues(
    tmp_path: Path, strategy: str
) -> None:
    trainer = made(tmp_path, callbacks=[Stop()], save_strategy=strategy, save_steps=500)
    with pytest.raises(FinetuneInterrupted) as stopped:
        trainer.train()
    assert stopped.value.checkpoint == checkpoints(tmp_path)[-1] == tmp_path / "checkpoint-2"
    for _ in range(2):  # a finished run takes no further step
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == trainer.progress.step == 4
    whole = made(tmp_path / "whole", save_strategy="no")
    whole.train()
    ours, theirs = trainer.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    whole.train()  # from the first step
    assert whole.progress.tokens == 24 + 24 + 12 + 24
    assert [line["step"] for line in metrics(tmp_path / "whole")] == [1, 2, 3, 4]


def test_a_new_run_does_not_replace_the_checkpoints_of_another(tmp_path: Path) -> None:
    made(tmp_path).train()
    before = checkpoints(tmp_path)
    made(tmp_path / "other", max_steps=1).train()
    for checkpoint in (None, str(tmp_path / "other/checkpoint-1")):
        with pytest.raises(RopeExtendError, match=r"checkpoint-4 of another run.*resume_from_che"):
            made(tmp_path, max_steps=2).train(checkpoint)
    assert checkpoints(tmp_path) == before
    with pytest.raises(RopeExtendError, match="save_only_model"):
        made(tmp_path, save_only_model=True).train(resume_from_checkpoint=True)


def test_arguments_that_need_checkpoints_in_their_final_place_are_refused(tmp_path: Path) -> None:
    evaluating = {"eval_dataset": ROWS, "eval_strategy": "steps", "eval_steps": 1}
    for changes in ({"push_to_hub": True}, {"load_best_model_at_end": True}, {"save_strategy": "best"}):
        with pytest.raises(RopeExtendError, match=r"do not work with RopeTrainer.*SaveEncodingCallback"):
            made(tmp_path, metric_for_best_model="loss", **evaluating, **changes)
