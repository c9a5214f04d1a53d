"""The record in checkpoints that others write: transformers' Trainer, those on top of it, one's own loop."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rope_extend.checkpoint import registry
from rope_extend.checkpoint.manifest import RECORD_NAME
from rope_extend.checkpoint.record import (
    ADAPTER_MARK,
    Record,
    adapter_mark,
    read_record,
    seal,
    write_record,
)
from rope_extend.errors import RopeExtendError
from rope_extend.inspection import unwrap
from rope_extend.learned import write_learned


def record_encoding(
    directory: str | PathLike[str], model: nn.Module, *, base_model: str | None = None, guard: bool = True
) -> Record:
    """Write `rope_extend.json` beside weights that you saved yourself, so that `rope_extend.load` reads them.

    Call it after `model.save_pretrained(directory)`, on one process. `rope_extend.save` does both.

    Args:
        directory: an adapter or a full checkpoint, complete. Of an adapter that is not called `default`, the
            directory that was given to `save_pretrained`; the record goes where peft put it, one level down.
        model: the patched model that was saved there.
        base_model: name of the base model for the record; by default the name it was loaded by.
        guard: as in `rope_extend.save`: where stock transformers has no form for the encoding, make
            `config.json` one that only rope_extend reads.

    Raises:
        RopeExtendError: the model is not patched, or the directory cannot be read or written.
    """
    record, directory = Record.of(model, base_model), Path(directory)
    if isinstance(model, PeftModel):
        below = [directory / name for name in model.active_adapters]
        directory = next((path for path in below if (path / "adapter_config.json").exists()), directory)
    full = guard and (directory / "config.json").exists()
    if full and not registry.has_stock_form(unwrap(model).config, record.target_length):
        registry.guard(directory)
    write_learned(directory, model)
    return seal(directory, record)


class SaveEncodingCallback(TrainerCallback):  # type: ignore[misc]
    """Writes the record of a patched model's encoding into every checkpoint that a `Trainer` saves.

    `Trainer(..., callbacks=[SaveEncodingCallback()])`, also in trainers on top of it. Each
    `checkpoint-N` is then one for `rope_extend.load`, adapter or full. The output directory itself gets a
    record without digests, since `Trainer.save_model` tells no callback when it has written there; call
    `record_encoding` after it for one with digests, or where it saves elsewhere.

    Args:
        base_model: name of the base model for the record; by default the name it was loaded by.
    """

    def __init__(self, base_model: str | None = None) -> None:
        self.base_model = base_model

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Refuse a model without a patch now, not at its first checkpoint, and mark its adapters.

        peft writes the mark into every config that it saves, also where no callback hears of it.

        Raises:
            RopeExtendError: the model is not patched; or the run goes on from a checkpoint that was trained
                with another encoding.
        """
        record = Record.of(model, self.base_model)
        resumed = _checkpoint(args, state)
        if state.global_step and (resumed / RECORD_NAME).exists():
            before = read_record(resumed)
            if (before.encoding, before.shape) != (record.encoding, record.shape):
                raise RopeExtendError(
                    f"{resumed} was trained with {before.encoding} of {before.shape}, and this model reads "
                    f"with {record.encoding} of {record.shape}; extend it as it was, or begin anew"
                )
        for config in (getattr(unwrap(model), "peft_config", None) or {}).values():
            config.auto_mapping = {**(config.auto_mapping or {}), ADAPTER_MARK: adapter_mark(record)}

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Complete the checkpoint that was just saved."""
        directory = _checkpoint(args, state)
        if args.should_save and directory.is_dir():
            record_encoding(directory, model, base_model=self.base_model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Write the record for what is saved into the output directory later."""
        if args.should_save:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            write_learned(Path(args.output_dir), model)
            write_record(args.output_dir, Record.of(model, self.base_model))

    def on_push_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Write the record for what is about to be saved into the output directory, and pushed."""
        self.on_train_end(args, state, control, model)


def _checkpoint(args: Any, state: Any) -> Path:
    """The directory of a run's checkpoint at its present step."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
