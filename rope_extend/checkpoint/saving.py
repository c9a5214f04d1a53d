"""Saving and loading extended models: the weights, and beside them the record of how they read positions.

An adapter says nothing about position encodings, so peft loads it onto the old window without a word. The
record closes that gap.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rope_extend.checkpoint import registry
from rope_extend.checkpoint.manifest import (
    INDEX_NAME,
    RECORD_NAME,
    WEIGHTS,
    base_fingerprint,
    check_directory,
    check_finite,
    weight_files,
)
from rope_extend.checkpoint.record import Record, read_record, seal
from rope_extend.errors import RopeExtendError
from rope_extend.inspection import shape_of, unwrap
from rope_extend.learned import is_learned, learned_parameters, read_learned, write_learned
from rope_extend.patching import Patch, current_patch, patch_model
from rope_extend.pretrained import pretrained
from rope_extend.resume import _flush

logger = logging.getLogger(__name__)

_CHECKPOINT_FILES = (
    "config.json", "generation_config.json", "adapter_config.json", "adapter_model.*", *WEIGHTS, INDEX_NAME,
    "pytorch_model*.bin*", RECORD_NAME, "verification.json",
)  # fmt: skip
"""What makes a directory a checkpoint; `overwrite` replaces these and leaves all else."""


def save(
    model: nn.Module,
    directory: str | PathLike[str],
    tokenizer: Any | None = None,
    overwrite: bool = False,
    *,
    base_model: str | None = None,
    max_shard_size: int | str | None = None,
    guard: bool = True,
) -> Path:
    """Save a patched model, with the record of its encoding; returns the directory.

    A model with a peft adapter gives an adapter directory (`adapter_model.safetensors`,
    `adapter_config.json`, `rope_extend.json`); one without gives a full checkpoint, which stock
    `from_pretrained` reads wherever the encoding has a stock form. Everything is written and checked beside
    what is there, and then takes its place; if that fails or is interrupted, all is put back as it was.

    Args:
        model: a model with an active patch.
        directory: where to; made if missing.
        tokenizer: saved too, if given.
        overwrite: replace a checkpoint that is already there; other files stay.
        base_model: name of the base model for the record; by default the name it was loaded by.
        max_shard_size: of the weight files of a full checkpoint, in bytes or like `"5GB"`; transformers'
            own limit by default.
        guard: where stock transformers has no form for the encoding, write a config of
            `model_type: rope_extend`: `AutoModelForCausalLM` reads it once rope_extend is imported, and
            otherwise stops, where it would have read it wrongly.

    Raises:
        RopeExtendError: the model is not patched, the directory holds a checkpoint or cannot be written to,
            the disk is full, or a weight is not finite.
    """
    record = Record.of(model, base_model)
    target = Path(directory)
    options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    if options and isinstance(model, PeftModel):
        raise RopeExtendError("max_shard_size is for full checkpoints; an adapter is one file")
    present = _checkpoint_files(target)
    if present and not overwrite:
        raise RopeExtendError(
            f"{target} already holds a checkpoint ({present[0].name}); choose another directory, or "
            "overwrite=True"
        )
    with _intact_on_failure(target):
        target.mkdir(parents=True, exist_ok=True)
        for left in target.glob(".saving-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".saving-", ignore_cleanup_errors=True) as made:
            source = Path(made)
            if isinstance(model, PeftModel):
                source = _save_adapter(model, source)
            else:
                unwrap(model).save_pretrained(source, state_dict=_stock_state(unwrap(model)), **options)
            write_learned(source, model)
            if tokenizer is not None:
                tokenizer.save_pretrained(source)
            for name in weight_files(source):
                check_finite(source / name)
            full = guard and (source / "config.json").exists()
            if full and not registry.has_stock_form(unwrap(model).config, record.target_length):
                registry.guard(source)
            seal(source, record)
            _publish(source, target, present)
    return target


def _checkpoint_files(directory: Path) -> list[Path]:
    try:
        return sorted({path for pattern in _CHECKPOINT_FILES for path in directory.glob(pattern)})
    except OSError as error:
        raise RopeExtendError(f"cannot read {directory}: {error}") from error


@contextmanager
def _intact_on_failure(target: Path) -> Iterator[None]:
    """Leave no directory behind that was not there, and say in one error why a save failed."""
    existed = target.exists()
    try:
        yield
    except BaseException as error:
        if not existed:
            with suppress(OSError):
                target.rmdir()
        if isinstance(error, RopeExtendError):
            raise
        if not isinstance(error, OSError | SafetensorError | ValueError):
            raise
        raise RopeExtendError(f"cannot save to {target}: {error}. What was there before is intact") from error


def _publish(source: Path, target: Path, stale: list[Path]) -> None:
    """Put all files of `source` in the place of those in `target`, and of `stale` ones, or change nothing.

    A directory with other files in it cannot be exchanged in one step. So the old files wait in a directory
    beside the new until all are in place; a process that is killed in between leaves them there.
    """
    for path in source.rglob("*"):
        _flush(path)
    backup = Path(tempfile.mkdtemp(dir=target, prefix=".replaced-"))
    placed = [target / path.name for path in source.iterdir()]
    replaced = {path for path in (*stale, *placed) if path.exists() or path.is_symlink()}
    try:
        for path in replaced:
            os.replace(path, backup / path.name)
        for path in placed:
            os.replace(source / path.name, path)
        _flush(target)
    except BaseException:
        for path in placed:
            if not (source / path.name).exists():
                os.replace(path, source / path.name)
        for path in backup.iterdir():
            os.replace(path, target / path.name)
        backup.rmdir()
        raise
    shutil.rmtree(backup)


def _stock_state(base: Any) -> dict[str, Tensor] | None:
    """The weights that stock transformers knows, where an encoding has brought others; None for all."""
    if not learned_parameters(base):
        return None
    return {name: value for name, value in base.state_dict().items() if not is_learned(name)}


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
    directory: str | PathLike[str],
    *,
    base_model: str | None = None,
    check_files: bool = True,
    check_base: bool = True,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load what `save` wrote: the model reads with the recorded encoding, adapter or full checkpoint.

    Nothing but safetensors and JSON is read, and no code of a checkpoint is ever run.

    Args:
        directory: an adapter or a full checkpoint, with its record.
        base_model: name or path of an adapter's base model, where it is not where the record says.
        check_files: compare the files with the record's digests, and refuse weights that are not finite,
            which reads them once more (about a second per GB); False after a deliberate change.
        check_base: compare an adapter's base model with the one it was trained on; False to use another.
        from_pretrained_kwargs: for `AutoModelForCausalLM.from_pretrained`, such as `dtype` or `device_map`.

    Returns:
        A patched model in evaluation mode: a `PeftModel` for an adapter, else the family's own class.

    Raises:
        RopeExtendError: no or a damaged record; files that are missing, damaged, pickled, outside the
            directory or not those that were saved; or a base model that is missing or another one.
    """
    _refuse_arguments(from_pretrained_kwargs)
    directory = Path(directory)
    record = _checked_record(directory, check_files)
    if not (directory / "adapter_config.json").exists():
        model = _pretrained(str(directory), takes_all=True, **from_pretrained_kwargs)
        with _as_one_error(f"the config in {directory} does not fit its {RECORD_NAME}"):
            _apply(model, record, directory)
        return model
    name = base_model or record.base_model
    if name is None:
        raise RopeExtendError(f"the record in {directory} names no base model; give base_model=")
    hint = f". It is the base model that {directory / RECORD_NAME} names; give base_model= if it has moved"
    base = _pretrained(name, hint, **from_pretrained_kwargs)
    return _attach(base, directory, record, is_trainable=False, check_base=check_base)


def load_adapter(
    model: nn.Module,
    directory: str | PathLike[str],
    *,
    is_trainable: bool = False,
    check_files: bool = True,
    check_base: bool = True,
) -> PeftModel:
    """Put an adapter and its encoding on a base model that is already loaded.

    Args:
        model: the base model, not patched, or patched with the recorded encoding.
        directory: an adapter directory, with its record.
        is_trainable: whether the adapter's weights take gradients.
        check_files: as in `load`.
        check_base: as in `load`.

    Raises:
        RopeExtendError: no or a damaged record, files that `load` would refuse, a base model of another
            family or rotary shape or with other weights, one that reads with another encoding, or weights
            that do not fit. The base model is then as it was.
    """
    if isinstance(model, PeftModel):
        raise RopeExtendError("this model carries an adapter already; load_adapter takes the base model")
    directory = Path(directory)
    record = _checked_record(directory, check_files)
    return _attach(model, directory, record, is_trainable=is_trainable, check_base=check_base)


def _refuse_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse what would make stock loaders run code, or return something else than a model."""
    if kwargs.pop("trust_remote_code", None):
        raise RopeExtendError(
            "rope_extend never runs code that comes with a checkpoint, so trust_remote_code=True is refused; "
            "load such a model yourself, then use rope_extend.load_adapter or rope_extend.patch_model"
        )
    if not kwargs.pop("use_safetensors", True):
        raise RopeExtendError(
            "rope_extend reads safetensors only, since pickles can run code; convert the checkpoint"
        )
    if "output_loading_info" in kwargs:
        raise RopeExtendError("load returns the model alone; leave output_loading_info out")


def _checked_record(directory: Path, check_files: bool) -> Record:
    """The record of a directory whose files are sound."""
    record = read_record(directory)
    check_directory(directory, record.weights, record.configs, contents=check_files)
    return record


@contextmanager
def _as_one_error(what: str) -> Iterator[None]:
    """Turn whatever stock loaders raise over a damaged checkpoint into a RopeExtendError that says `what`."""
    try:
        yield
    except (RopeExtendError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RopeExtendError(f"{what}: {type(error).__name__}: {error}") from error


def _pretrained(name: str, hint: str = "", *, takes_all: bool = False, **kwargs: Any) -> Any:
    """The model of a checkpoint, from safetensors and without remote code, with every weight from its files.

    Stock `from_pretrained` only warns when it has made up weights that the files do not have. `takes_all`
    also refuses files with weights that the model does not have.
    """
    with _as_one_error(f"cannot load the model of {name!r}"):
        model, loaded = pretrained(
            AutoModelForCausalLM, name, hint,
            use_safetensors=True, trust_remote_code=False, output_loading_info=True, **kwargs,
        )  # fmt: skip
    for kind in ("missing_keys", "mismatched_keys", *(["unexpected_keys"] if takes_all else [])):
        # What an encoding learns, stock `save_pretrained` writes among the weights; it is read elsewhere.
        keys = sorted(key for key in map(str, loaded.get(kind) or ()) if not is_learned(key))
        if keys:
            raise RopeExtendError(
                f"the weights of {name!r} are not those of its config; {kind.replace('_', ' ')}: "
                f"{keys[0]!r} and {len(keys) - 1} more"
            )
    return model


def _attach(
    model: nn.Module, directory: Path, record: Record, *, is_trainable: bool, check_base: bool
) -> PeftModel:
    before = current_patch(model)
    # The encoding first: a model that took the weights without it would be garbage.
    with _as_one_error(f"the base model does not fit the adapter in {directory}"):
        patch = _apply(model, record, directory)
    try:
        if check_base:
            _check_base(model, directory, record)
        with (
            _as_one_error(
                f"the adapter in {directory} does not fit this {record.model_type} model; it was made for "
                f"{record.base_model!r}"
            ),
            undone_on_failure(model),
            warnings.catch_warnings(),
        ):
            # peft only warns when the adapter has no weights for some of the model's layers.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(model, str(directory), is_trainable=is_trainable)
    except BaseException:
        if patch is not before:
            patch.remove()
        raise


def _check_base(model: nn.Module, directory: Path, record: Record) -> None:
    """Refuse a base model with other weights than the one that the adapter was trained on."""
    if record.base_fingerprint is None:
        return
    found = base_fingerprint(model)
    if found not in (None, record.base_fingerprint):
        name = unwrap(model).config.name_or_path or "a model made in memory"
        raise RopeExtendError(
            f"the adapter in {directory} was trained on {record.base_model!r} (fingerprint "
            f"{record.base_fingerprint[:12]}), and this base model, {name!r}, has other weights (fingerprint "
            f"{str(found)[:12]}); load the former, or give check_base=False to use this one all the same"
        )


def _apply(model: nn.Module, record: Record, directory: Path | None = None) -> Patch:
    """Make a model read as recorded, from whatever it reads with now, with what was learnt in a directory."""
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
            if directory is not None:
                active.learn(read_learned(directory), str(directory))
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
    patch = patch_model(
        model, record.encoding, trained_length=record.shape.trained_length, target_length=record.target_length
    )
    if directory is not None:
        try:
            patch.learn(read_learned(directory), str(directory))
        except BaseException:
            patch.remove()
            raise
    return patch


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
