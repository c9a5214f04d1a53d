"""Saving and loading extended models: the weights, and beside them the record of how they read positions.

An adapter says nothing about position encodings, so peft loads it onto the old window without a word. The
record closes that gap.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from rope_extend.checkpoint.record import RECORD_NAME, Record, read_record, write_record
from rope_extend.errors import RopeExtendError
from rope_extend.patching import Patch, current_patch, patch_model, shape_of, unwrap
from rope_extend.pretrained import pretrained

_CHECKPOINT_FILES = (
    "config.json", "generation_config.json", "adapter_config.json", "adapter_model.*", "model.safetensors*",
    "model-*.safetensors", "pytorch_model*.bin*", RECORD_NAME,
)  # fmt: skip
"""What makes a directory a checkpoint; `overwrite` replaces these and leaves all else."""


def save(
    model: nn.Module,
    directory: str | PathLike[str],
    tokenizer: Any | None = None,
    overwrite: bool = False,
    *,
    base_model: str | None = None,
) -> Path:
    """Save a patched model, with the record of its encoding; returns the directory.

    A model with a peft adapter gives an adapter directory (`adapter_model.safetensors`,
    `adapter_config.json`, `rope_extend.json`); one without gives a full checkpoint, which stock
    `from_pretrained` reads wherever the encoding has a stock form. Nothing is changed in `directory` until
    all files are written.

    Args:
        model: a model with an active patch.
        directory: where to; made if missing.
        tokenizer: saved too, if given.
        overwrite: replace a checkpoint that is already there; other files stay.
        base_model: name of the base model for the record; by default the name it was loaded by.

    Raises:
        RopeExtendError: the model is not patched, or the directory holds a checkpoint.
    """
    record = Record.of(model, base_model)
    target = Path(directory)
    present = [path for pattern in _CHECKPOINT_FILES for path in target.glob(pattern)]
    if present and not overwrite:
        raise RopeExtendError(
            f"{target} already holds a checkpoint ({present[0].name}); choose another directory, or "
            "overwrite=True"
        )
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target, prefix=".saving-") as temporary:
        source = Path(temporary)
        if isinstance(model, PeftModel):
            source = _save_adapter(model, source)
        else:
            unwrap(model).save_pretrained(source)
        if tokenizer is not None:
            tokenizer.save_pretrained(source)
        write_record(source, record)
        written = {path.name for path in source.iterdir()}
        for name in written:
            os.replace(source / name, target / name)
    for path in present:
        if path.name not in written:
            path.unlink()
    return target


def _save_adapter(model: PeftModel, directory: Path) -> Path:
    """Save the active adapter, and return the directory that it is in."""
    active = model.active_adapters
    if len(active) != 1:
        raise RopeExtendError(f"save takes one active adapter, got {active}; choose with set_adapter")
    model.save_pretrained(directory, selected_adapters=active)
    if active != ["default"]:  # peft puts an adapter of another name one level down
        directory = directory / active[0]
    (directory / "README.md").unlink(missing_ok=True)  # peft's model card, a form that nobody has filled in
    return directory


def load(
    directory: str | PathLike[str], *, base_model: str | None = None, **from_pretrained_kwargs: Any
) -> Any:
    """Load what `save` wrote: the model reads with the recorded encoding, adapter or full checkpoint.

    Args:
        directory: an adapter or a full checkpoint, with its record.
        base_model: name or path of an adapter's base model, where it is not where the record says.
        from_pretrained_kwargs: for `AutoModelForCausalLM.from_pretrained`, such as `dtype` or `device_map`.

    Returns:
        A patched model in evaluation mode: a `PeftModel` for an adapter, else the family's own class.

    Raises:
        RopeExtendError: no or a damaged record, or a base model that is missing or another one.
    """
    record = read_record(directory)
    if not (Path(directory) / "adapter_config.json").exists():
        model = pretrained(AutoModelForCausalLM, str(directory), **from_pretrained_kwargs)
        _apply(model, record)
        return model
    name = base_model or record.base_model
    if name is None:
        raise RopeExtendError(f"the record in {directory} names no base model; give base_model=")
    hint = (
        f". It is the base model that {Path(directory) / RECORD_NAME} names; give base_model= if it has moved"
    )
    return load_adapter(pretrained(AutoModelForCausalLM, name, hint, **from_pretrained_kwargs), directory)


def load_adapter(
    model: nn.Module, directory: str | PathLike[str], *, is_trainable: bool = False
) -> PeftModel:
    """Put an adapter and its encoding on a base model that is already loaded.

    Args:
        model: the base model, not patched, or patched with the recorded encoding.
        directory: an adapter directory, with its record.
        is_trainable: whether the adapter's weights take gradients.

    Raises:
        RopeExtendError: no or a damaged record, a base model of another family or rotary shape, one that
            reads with another encoding, or weights that do not fit. The base model is then as it was.
    """
    record = read_record(directory)
    if isinstance(model, PeftModel):
        raise RopeExtendError("this model carries an adapter already; load_adapter takes the base model")
    before = current_patch(model)
    patch = _apply(model, record)
    try:
        with undone_on_failure(model), warnings.catch_warnings():
            # peft only warns when the adapter has no weights for some of the model's layers.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(model, str(directory), is_trainable=is_trainable)
    except BaseException as error:
        if patch is not before:
            patch.remove()
        if isinstance(error, OSError | ValueError | RuntimeError | UserWarning):
            raise RopeExtendError(
                f"the adapter in {directory} does not fit this {record.model_type} model; it was made for "
                f"{record.base_model!r}: {error}"
            ) from error
        raise


def _apply(model: nn.Module, record: Record) -> Patch:
    """Make a model read as recorded, from whatever it reads with now."""
    config = unwrap(model).config
    if config.model_type != record.model_type:
        raise RopeExtendError(
            f"the checkpoint is of a {record.model_type} model, this one is {config.model_type}; load the "
            f"base model {record.base_model!r}"
        )
    active = current_patch(model)
    if active is not None:
        if (active.encoding, active.shape, active.target_length) == (
            record.encoding, record.shape, record.target_length,
        ):  # fmt: skip
            return active
        raise RopeExtendError(
            f"the model reads with {active.encoding}, the checkpoint with {record.encoding}; remove the "
            "patch first"
        )
    shape = shape_of(model, record.shape.trained_length)
    if shape != record.shape:
        raise RopeExtendError(
            f"the checkpoint is of a model with {record.shape}, this one has {shape}; load the base model "
            f"{record.base_model!r}"
        )
    return patch_model(
        model, record.encoding, trained_length=record.shape.trained_length, target_length=record.target_length
    )


@contextmanager
def undone_on_failure(model: nn.Module) -> Iterator[None]:
    """Take modules that peft put into a model out again if the block raises, and restore `requires_grad`."""
    children = [(module, dict(module._modules)) for module in model.modules()]
    gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training = [(module, module.training) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, modules in children:
            module._modules.clear()
            module._modules.update(modules)
        for parameter, requires_grad in gradients:
            parameter.requires_grad_(requires_grad)
        for module, mode in training:
            module.training = mode
        vars(model).pop("peft_config", None)
        raise
