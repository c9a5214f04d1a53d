"""The record in checkpoints that transformers' `Trainer` writes, and trainers built on it."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from types import MethodType
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rope_extend.checkpoint.manifest import RECORD_NAME
from rope_extend.checkpoint.peft_models import changes_base, check_base
from rope_extend.checkpoint.record import Record, read_record, write_record
from rope_extend.checkpoint.saving import finish, written_directory
from rope_extend.errors import RopeExtendError
from rope_extend.journal import differences
from rope_extend.models.parameters import write_learned
from rope_extend.models.view import unwrap
from rope_extend.patching import current_patch


class SaveEncodingCallback(TrainerCallback):  # type: ignore[misc]
    """Writes the record of a patched model's encoding into every checkpoint that a `Trainer` saves.

    Use `Trainer(..., callbacks=[SaveEncodingCallback()])`, also in trainers built on it. When training
    begins, it wraps the model's `save_pretrained`. So every directory that this writes is complete, adapter
    or full: each `checkpoint-N`, and those of `Trainer.save_model` and `push_to_hub`. It has the record with
    digests, and a config that stock transformers refuses if it does not support the encoding.

    Args:
        base_model: name of the base model for the record; default: the name it was loaded by.
    """

    def __init__(self, base_model: str | None = None) -> None:
        self.base_model = base_model

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Refuse a model without a patch now, not at its first checkpoint, and wrap `save_pretrained`.

        Raises:
            RopeExtendError: the model is not patched; or the run resumes from a checkpoint that was trained
                with another encoding, or an adapter on another base model.
        """
        record = Record.of(model, self.base_model)
        checkpoint = _checkpoint(args, state)
        configs = [*(getattr(unwrap(model), "peft_config", None) or {}).values()]
        if state.global_step and (checkpoint / RECORD_NAME).exists():
            before = read_record(checkpoint)
            if changed := differences(before.schedule, record.schedule):
                raise RopeExtendError(
                    f"{checkpoint} was trained with {before.encoding}, this model uses {record.encoding}; "
                    f"they differ in {changed}. Extend the model as before, or start a new run"
                )
            # The recorded fingerprint is of a base model that peft had not changed.
            if not any(map(changes_base, configs)):
                advice = "; load the former, or start a new run"
                check_base(model, before.base_fingerprint, checkpoint, before.base_model, advice=advice)
        self._complete_what_is_saved(model)

    def on_push_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Write the record next to the files that `Trainer` copies into the output directory and pushes."""
        if args.should_save:
            write_learned(Path(args.output_dir), model)
            write_record(args.output_dir, Record.of(model, self.base_model))

    def _complete_what_is_saved(self, model: Any) -> None:
        """Wrap `save_pretrained`; by a function of the model, so that a copy of the model saves the copy."""
        stock = type(model).save_pretrained

        @functools.wraps(stock)
        def save_pretrained(saved: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
            result = stock(saved, save_directory, *args, **options)
            given = inspect.signature(stock).bind(saved, save_directory, *args, **options).arguments
            if current_patch(saved) is not None and given.get("is_main_process", True):
                directory = written_directory(Path(save_directory), saved)
                record = Record.of(saved, self.base_model)
                finish(directory, saved, record, renamed=bool(self.base_model))
            return result

        model.save_pretrained = MethodType(save_pretrained, model)


def _checkpoint(args: Any, state: Any) -> Path:
    """The directory of a run's checkpoint at its current step."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
