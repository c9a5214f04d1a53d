"""Saving and loading extended models: the weights, and beside them the record of how they read positions.

An adapter says nothing about position encodings, so peft loads it onto the old window without a word. The
record closes that gap.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rope_extend.checkpoint import registry
from rope_extend.checkpoint.manifest import (
    IN_FLOAT16,
    RECORD_NAME,
    base_fingerprint,
    base_matrices,
    changes_base,
    check_directory,
    check_finite,
    read_json,
    warn_unchecked,
    weight_files,
)
from rope_extend.checkpoint.record import Record, check_agreement, read_record, seal
from rope_extend.checkpoint.staging import staged
from rope_extend.errors import RopeExtendError
from rope_extend.inspection import shape_of, unwrap
from rope_extend.learned import is_learned, learned_parameters, read_learned, write_learned
from rope_extend.patching import Patch, current_patch, patch_model
from rope_extend.pretrained import one_error, pretrained

logger = logging.getLogger(__name__)


def save(
    model: nn.Module,
    directory: str | PathLike[str],
    tokenizer: Any | None = None,
    overwrite: bool = False,
    *,
    base_model: str | None = None,
    max_shard_size: int | str | None = None,
    guard: bool = True,
    record: Record | None = None,
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
        record: what to record, where the model at hand does not show all of it; by default what it shows.

    Raises:
        RopeExtendError: the model is not patched, the directory holds a checkpoint or cannot be written to,
            the disk is full, or a weight is not finite.
    """
    record = record or Record.of(model, base_model)
    target = Path(directory)
    options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    if options and isinstance(model, PeftModel):
        raise RopeExtendError("max_shard_size is for full checkpoints; an adapter is one file")
    with staged(target, overwrite=overwrite) as made:
        if isinstance(model, PeftModel):
            _save_adapter(model, made)
        else:
            unwrap(model).save_pretrained(made, state_dict=stock_state(unwrap(model)), **options)
        write_learned(made, model)
        if tokenizer is not None:
            save_tokenizer(tokenizer, made)
        for name in weight_files(made):
            check_finite(made / name)
        full = guard and (made / "config.json").exists()
        if full and not registry.has_stock_form(unwrap(model).config, record.target_length):
            registry.guard(made)
        seal(made, record)
    return target


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """`tokenizer.save_pretrained`, with one kind of error where the disk is full.

    Raises:
        OSError: it cannot be written.
    """
    try:
        tokenizer.save_pretrained(directory)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises no other
        raise OSError(f"the tokenizer cannot be written: {error}") from error


def stock_state(base: Any) -> dict[str, Tensor] | None:
    """The weights that stock transformers knows, where an encoding has brought others; None for all."""
    if not learned_parameters(base):
        return None
    return {name: value for name, value in base.state_dict().items() if not is_learned(name)}


def _save_adapter(model: PeftModel, directory: Path) -> None:
    """Save the active adapter."""
    active = model.active_adapters
    if len(active) != 1:
        raise RopeExtendError(f"save takes one active adapter, got {active}; choose with set_adapter")
    model.save_pretrained(directory, selected_adapters=active)
    if active != ["default"]:  # peft puts an adapter of another name one level down
        for path in (directory / active[0]).iterdir():
            os.replace(path, directory / path.name)
        (directory / active[0]).rmdir()
    (directory / "README.md").unlink(missing_ok=True)  # peft's model card, a form that nobody has filled in


_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""What is fetched of a checkpoint on the hub: never a pickle, never code."""


def local_directory(
    name: str | PathLike[str], what: str = "checkpoint", argument: str = "", **hub_kwargs: Any
) -> Path:
    """The directory of a checkpoint: itself, or the snapshot of a hub id in the cache, fetched if need be.

    Args:
        name: a directory or a hub id.
        what: it is, for the error.
        argument: how it is given, for the error.
        hub_kwargs: for `snapshot_download`, such as `revision`.

    Raises:
        RopeExtendError: there is none.
    """
    try:
        if Path(name).exists():
            return Path(name)
        return Path(snapshot_download(str(name), allow_patterns=_HUB_FILES, **hub_kwargs))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        given = f"Give {argument} a" if argument else "Give a"
        raise RopeExtendError(
            f"cannot find the {what} {str(name)!r}: {str(error).rstrip('.')}. {given} hub id, or a directory "
            f"with a checkpoint (seen from {Path.cwd()})"
        ) from error


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
        directory: an adapter or a full checkpoint, with its record; or the hub id of one.
        base_model: name or path of an adapter's base model, where it is not where the record says.
        check_files: compare the files with the record's digests, and refuse weights that are not finite,
            which reads them once more (about a second per GB); False after a deliberate change.
        check_base: compare an adapter's base model with the one it was trained on; False to use another.
        from_pretrained_kwargs: for `AutoModelForCausalLM.from_pretrained`, such as `dtype` or `device_map`;
            a `revision` is that of a hub id in `directory`, and else of the base model.

    Returns:
        A patched model in evaluation mode: a `PeftModel` for an adapter, else the family's own class.

    Raises:
        RopeExtendError: no or a damaged record; files that are missing, damaged, pickled, outside the
            directory or not those that were saved; or a base model that is missing or another one.
    """
    _refuse_arguments(from_pretrained_kwargs)
    name, directory = directory, local_directory(directory, revision=from_pretrained_kwargs.get("revision"))
    if directory != Path(name):
        from_pretrained_kwargs.pop("revision", None)
    record = checked_record(directory, check_files)
    if not (directory / "adapter_config.json").exists():
        model = _pretrained(str(directory), takes_all=True, **from_pretrained_kwargs)
        with one_error(f"the config in {directory} does not fit its {RECORD_NAME}"):
            apply_record(model, record, directory)
        return model
    base_model = base_model or record.base_model
    if base_model is None:
        raise RopeExtendError(f"the record in {directory} names no base model; give base_model=")
    hint = f". It is the base model that {directory / RECORD_NAME} names; give base_model= if it has moved"
    base = _pretrained(base_model, hint, **from_pretrained_kwargs)
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
        directory: an adapter directory, with its record; or the hub id of one.
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
    directory = local_directory(directory)
    record = checked_record(directory, check_files)
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


def checked_record(directory: Path, check_files: bool) -> Record:
    """The record of a directory whose files are sound."""
    record = read_record(directory)
    check_directory(directory, record.weights, record.configs, contents=check_files)
    if check_files:
        check_agreement(directory, record)
        if (config := directory / "config.json").exists():
            _check_family(registry.plain_config(read_json(config)).get("model_type"), record)
    return record


def _pretrained(name: str, hint: str = "", *, takes_all: bool = False, **kwargs: Any) -> Any:
    """The model of a checkpoint, from safetensors and without remote code, with every weight from its files.

    Stock `from_pretrained` only warns when it has made up weights that the files do not have. `takes_all`
    also refuses files with weights that the model does not have.
    """
    model, loaded = pretrained(
        AutoModelForCausalLM, name, hint, use_safetensors=True, output_loading_info=True, **kwargs
    )
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
    with one_error(f"cannot read {directory / 'adapter_config.json'}"):
        changed_by = changes_base(PeftConfig.from_pretrained(str(directory)))
    # The encoding first: a model that took the weights without it would be garbage.
    with one_error(f"the base model does not fit the adapter in {directory}"):
        patch = apply_record(model, record, directory)
    try:
        if check_base and not changed_by:
            _check_base(model, directory, record)
        with (
            one_error(
                f"the adapter in {directory} does not fit this {record.model_type} model; it was made for "
                f"{record.base_model!r}"
            ),
            undone_on_failure(model, weights=changed_by is not None),
            warnings.catch_warnings(),
        ):
            # peft only warns when the adapter has no weights for some of the model's layers.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(
                model, str(directory), is_trainable=is_trainable, **_places(model)
            )
            if check_base and changed_by:  # as it was when the adapter was saved
                _check_base(model, directory, record, f"; {changed_by} may also have changed them otherwise")
            return adapted
    except BaseException:
        if patch is not before:
            patch.remove()
        raise


def _places(model: nn.Module) -> dict[str, Any]:
    """Where a model's parts are, for peft, which would find places of its own for layers on the host.

    Raises:
        RopeExtendError: some are on disk.
    """
    places = getattr(unwrap(model), "hf_device_map", None) or {}
    if "disk" in places.values():
        raise RopeExtendError(
            "the base model has layers on disk, and for an adapter on it peft would copy all weights into "
            "the working directory; merge the adapter first (rope-extend merge) and load the merged "
            "checkpoint, or leave more memory to the base model"
        )
    inside = {name and f"base_model.model.{name}": place for name, place in places.items()}
    return {"device_map": inside} if inside else {}


def _check_base(model: nn.Module, directory: Path, record: Record, hint: str = "") -> None:
    """Refuse a base model with other weights than the one that the adapter was trained on."""
    if record.base_fingerprint is None:
        return
    found = base_fingerprint(model, in_float16=True)
    if found in (None, record.base_fingerprint):
        return
    base = unwrap(model)
    if any(matrix.dtype == torch.float16 for _, matrix in base_matrices(base)):
        warn_unchecked(IN_FLOAT16)
    else:
        name = base.config.name_or_path or "a model made in memory"
        raise RopeExtendError(
            f"the adapter in {directory} was trained on {record.base_model!r} (fingerprint "
            f"{record.base_fingerprint[:12]}), and this base model, {name!r}, has other weights (fingerprint "
            f"{str(found)[:12]}){hint}; load the former, or give check_base=False to use this one all the "
            "same"
        )


def _check_family(model_type: Any, record: Record) -> None:
    if model_type != record.model_type:
        advice = f"; load the base model {record.base_model!r}" if record.base_model else ""
        raise RopeExtendError(
            f"the checkpoint is of a {record.model_type} model by its record, this one is {model_type}"
            f"{advice}"
        )


def apply_record(model: nn.Module, record: Record, directory: Path | None = None) -> Patch:
    """Make a model read as recorded, from whatever it reads with now, with what was learnt in a directory."""
    _check_family(unwrap(model).config.model_type, record)
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
def undone_on_failure(model: nn.Module, *, weights: bool = False) -> Iterator[None]:
    """Take modules that peft put into a model out again if the block raises, and restore `requires_grad`.

    `weights` also puts back the weights, of which it keeps a copy.
    """
    children = [(module, dict(module._modules)) for module in model.modules()]
    gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training = [(module, module.training) for module in model.modules()]
    tensors = [(parameter, parameter.data.clone()) for parameter in model.parameters() if weights]
    try:
        yield
    except BaseException:
        for module, modules in children:
            module._modules.clear()
            module._modules.update(modules)
        for parameter, tensor in tensors:
            parameter.data = tensor
        for parameter, requires_grad in gradients:
            parameter.requires_grad_(requires_grad)
        for module, mode in training:
            module.training = mode
        vars(model).pop("peft_config", None)
        raise
