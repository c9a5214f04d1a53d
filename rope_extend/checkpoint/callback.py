"""The record in checkpoints that transformers' `Trainer` writes, and trainers built on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rope_extend.checkpoint.base_model import (
    base_matrices,
    changes_base,
    check_base_fingerprint,
    token_layers_of,
)
from rope_extend.checkpoint.manifest import RECORD_NAME
from rope_extend.checkpoint.record import ADAPTER_MARK, Record, adapter_mark, read_record, write_record
from rope_extend.checkpoint.saving import complete
from rope_extend.errors import RopeExtendError
from rope_extend.models.parameters import write_learned
from rope_extend.models.view import unwrap

_SHOWN = 3
"""Differing values of an encoding that an error shows."""


class SaveEncodingCallback(TrainerCallback):  # type: ignore[misc]
    """Writes the record of a patched model's encoding into every checkpoint that a `Trainer` saves.

    Use `Trainer(..., callbacks=[SaveEncodingCallback()])`, also in trainers built on it. `rope_extend.load`
    then reads each `checkpoint-N`, adapter or full. The output directory itself gets a record without
    digests, because `Trainer.save_model` does not tell callbacks when it has written there. Call
    `record_encoding` after `save_model`, for a record with digests and, if stock transformers does not
    support the encoding, a config that it does not read; also if it saves to another directory.

    Args:
        base_model: name of the base model for the record; default: the name it was loaded by.
    """

    def __init__(self, base_model: str | None = None) -> None:
        self.base_model = base_model

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Refuse a model without a patch now, not at its first checkpoint, and mark its adapters.

        peft writes the mark into every config that it saves, also where no callback is called.

        Raises:
            RopeExtendError: the model is not patched; or the run resumes from a checkpoint that was trained
                with another encoding, or an adapter on another base model.
        """
        record = Record.of(model, self.base_model)
        checkpoint = _checkpoint(args, state)
        if state.global_step and (checkpoint / RECORD_NAME).exists():
            before = read_record(checkpoint)
            _check_encoding(checkpoint, before, record)
            _check_base(checkpoint, before, record, model)
        for config in _adapter_configs(model):
            config.auto_mapping = {**(config.auto_mapping or {}), ADAPTER_MARK: adapter_mark(record)}

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Complete the checkpoint that was just saved."""
        directory = _checkpoint(args, state)
        if args.should_save and directory.is_dir():
            complete(directory, model, base_model=self.base_model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Write the record for a model that is saved into the output directory later."""
        if args.should_save:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            write_learned(Path(args.output_dir), model)
            write_record(args.output_dir, Record.of(model, self.base_model))

    def on_push_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Write the record for a model that is about to be saved into the output directory, and pushed."""
        self.on_train_end(args, state, control, model)


def _check_encoding(checkpoint: Path, before: Record, record: Record) -> None:
    """Refuse to resume with another encoding, shape or window.

    Raises:
        RopeExtendError: they differ. If their short texts do not, the message names values that do.
    """
    then, now = ((each.encoding, each.shape, each.target_length) for each in (before, record))
    if then == now:
        return
    uses = _described(record)
    if _described(before) == uses:  # rounded numbers, and only the ends of a long list
        found = _differences("encoding", before.encoding.to_dict(), record.encoding.to_dict())
        more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        uses += f" ({'; '.join(found[:_SHOWN])}{more})"
    raise RopeExtendError(
        f"{checkpoint} was trained with {_described(before)}, but this model uses {uses}; extend it with the "
        "former, or start a new run"
    )


def _check_base(checkpoint: Path, before: Record, record: Record, model: Any) -> None:
    """Refuse to resume an adapter on another base model.

    Raises:
        RopeExtendError: both fingerprints are known and differ. They are not compared if peft changed the
            base model when it made the adapter.
    """
    base, configs, recorded = unwrap(model), _adapter_configs(model), before.base_fingerprint
    if recorded is None or record.base_fingerprint is None or any(map(changes_base, configs)):
        return
    check_base_fingerprint(
        base_matrices(base),
        recorded,
        adapter=checkpoint,
        token_layers={layer for config in configs for layer in token_layers_of(base, config)},
        trained_on=before.base_model,
        base=record.base_model or "a model made in memory",
        advice="; load the former, or start a new run",
    )


def _adapter_configs(model: Any) -> list[Any]:
    """The configs of a model's adapters; empty without an adapter."""
    return [*(getattr(unwrap(model), "peft_config", None) or {}).values()]


def _differences(name: str, then: Any, now: Any) -> list[str]:
    """Where two plain values differ, such as `["encoding.theta was 500000.0 and is 500004.0"]`."""
    parts: list[tuple[str, Any, Any]]
    if isinstance(then, dict) and isinstance(now, dict):
        parts = [(f"{name}.{key}", then.get(key), now.get(key)) for key in {**then, **now}]
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        parts = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(then, now, strict=True))]
    else:
        return [] if then == now else [f"{name} was {then!r} and is {now!r}"]
    return [difference for part in parts for difference in _differences(*part)]


def _described(record: Record) -> str:
    return f"{record.encoding} of {record.shape} up to {record.target_length:,} tokens"


def _checkpoint(args: Any, state: Any) -> Path:
    """The directory of a run's checkpoint at its current step."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
