"""The record in checkpoints that transformers' `Trainer` writes, and trainers built on it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import MethodType
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rope_extend.checkpoint.peft_models import changes_base, check_base, is_peft_model
from rope_extend.checkpoint.record import Record, read_record, write_record
from rope_extend.checkpoint.restoring import restore_weights
from rope_extend.checkpoint.saving import recording, stock_save
from rope_extend.data.given_blocks import check_batches
from rope_extend.errors import RopeExtendError
from rope_extend.journal import differences
from rope_extend.models.checkpoint_directory import LEARNED_FILE, RECORD_NAME
from rope_extend.models.decoders import unwrap
from rope_extend.models.launch import check_launch
from rope_extend.models.parameters import (
    current_learned,
    read_learned,
    train_learned,
    whole_learned,
    write_learned,
)

logger = logging.getLogger(__name__)


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

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Train what the encoding learns together with an adapter, before `Trainer` makes its optimizer.

        Raises:
            RopeExtendError: a launcher started several processes, and `Trainer` knows of one.
        """
        check_launch(args.world_size)
        if is_peft_model(model):
            train_learned(model)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Refuse a model without a patch now, not at its first checkpoint, and wrap `save_pretrained`.

        Raises:
            RopeExtendError: the model is not patched; the first batch is not the block of
                `rope_extend.blocks` that it was made of; or the run resumes from a checkpoint in its output
                directory that was trained with another encoding, or an adapter on another base model, or that
                lacks what the encoding has learned.
        """
        record = Record.of(model, self.base_model)
        check_batches(train_dataloader)
        by_preferences = type(args).__module__.startswith("trl.") and bool(getattr(args, "beta", None))
        if by_preferences and not is_peft_model(model):
            logger.warning(
                "without ref_model, TRL loads its reference from %r, where it is not extended; give "
                "ref_model=copy.deepcopy(model), made after rope_extend.extend",
                unwrap(model).config.name_or_path,
            )
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
        elif state.global_step:
            logger.warning(
                "%s has no record, so it was not checked that this run continues with the same encoding",
                checkpoint,
            )
        if state.global_step and not configs:
            restore_weights(model, checkpoint)
        learned = current_learned(model)
        if state.global_step and learned is not None and configs:  # Trainer loads only the adapter
            learned.put(read_learned(checkpoint), str(checkpoint / LEARNED_FILE))
        # A function of the model, so that a copy of the model saves the copy.
        model.save_pretrained = MethodType(recording(stock_save(model), self.base_model), model)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Add what the encoding has learned to a checkpoint that holds shards of an adapter."""
        write_spread(_checkpoint(args, state), model, writes=args.should_save)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Give model and encoding all of the best step, of which `Trainer` has loaded a part."""
        best, learned = state.best_model_checkpoint, current_learned(model)
        if not (args.load_best_model_at_end and best):
            return
        if not is_peft_model(model):
            restore_weights(model, Path(best))
        elif learned is not None:
            learned.put(read_learned(Path(best)), str(Path(best) / LEARNED_FILE))

    def on_push_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Write the record next to the files that `Trainer` copies into the output directory and pushes."""
        if args.should_save:
            write_learned(Path(args.output_dir), model)
            write_record(args.output_dir, Record.of(model, self.base_model))


def write_spread(checkpoint: Path, model: Any, *, writes: bool) -> None:
    """Write what an encoding has learned next to the shards of an adapter, which lack it, as FSDP saves them.

    Every process calls this, and the one that `writes` does so if the file is not there.
    """
    spread = whole_learned(model) if is_peft_model(model) else {}
    if spread and writes and not (checkpoint / LEARNED_FILE).exists():
        write_learned(checkpoint, model, spread)


def _checkpoint(args: Any, state: Any) -> Path:
    """The directory of a run's checkpoint at its current step."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
