"""Loading a checkpoint together with its encoding."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rope_extend.checkpoint.manifest import check_directory, read_json
from rope_extend.checkpoint.model_type import plain_config
from rope_extend.checkpoint.peft_models import changes_base, held_weights, is_peft_model
from rope_extend.checkpoint.peft_models import check_base as check_base_model
from rope_extend.checkpoint.record import Record, check_agreement, read_record
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home
from rope_extend.journal import differences
from rope_extend.models.checkpoint_directory import (
    ADAPTER_CONFIG,
    CONFIG,
    LEARNED_FILE,
    RECORD_NAME,
    is_adapter,
    is_model,
    is_recorded,
)
from rope_extend.models.decoders import unwrap
from rope_extend.models.loading import HEADS, auto_class, one_error, open_weights, pretrained
from rope_extend.models.locating import ACCESS, hub_options, local_directory, refuse_other_files
from rope_extend.models.parameters import is_learned, learned_parameters, read_learned
from rope_extend.models.rotary_tables import shape_of
from rope_extend.patching import Patch, current_patch, patch_model

if TYPE_CHECKING:
    from peft import PeftModel


def load(
    directory: str | PathLike[str],
    *,
    base_model: str | None = None,
    base_revision: str | None = None,
    check_files: bool = True,
    check_base: bool = True,
    **from_pretrained_options: Any,
) -> Any:
    """Load a checkpoint that `save` wrote, adapter or full model, with its recorded encoding.

    Only safetensors and JSON files are read, and no code of a checkpoint is ever run, whatever
    `trust_remote_code` says.

    Args:
        directory: an adapter or a full checkpoint, with its record; or the hub id of one.
        base_model: name or path of an adapter's base model; overrides the one in the record.
        base_revision: branch, tag or commit of the base model on the hub; overrides the one in the record,
            or in the adapter's config.
        check_files: compare the files with the record's digests, and refuse weights that are not finite. This
            reads the weights once more, about a second per GB. Set it to False after a deliberate change.
        check_base: compare an adapter's base model with the one it was trained on. Set it to False to use
            another one.
        from_pretrained_options: options for `AutoModelForCausalLM.from_pretrained`, such as `dtype` or
            `device_map`. A `revision` applies to a hub id in `directory`, otherwise it is `base_revision`.
            Those that select files, such as `subfolder`, are for an adapter's base model.

    Returns:
        A patched model in evaluation mode: a `PeftModel` for an adapter, otherwise the family's own class.

    Raises:
        RopeExtendError: the record is missing or damaged; files are missing, damaged, pickled, outside the
            directory or not those that were saved; or the base model is missing or a different one.
    """
    safe = from_pretrained_options.pop("use_safetensors", True)
    if not safe or "output_loading_info" in from_pretrained_options:
        raise RopeExtendError(
            "load reads safetensors only, since pickles can run code, and returns the model alone; leave "
            "use_safetensors and output_loading_info out"
        )
    name = expand_home(directory)
    directory = local_directory(name, **hub_options(from_pretrained_options))
    if directory != Path(name):
        from_pretrained_options.pop("revision", None)
    adapter = is_adapter(directory)
    if not adapter:
        refuse_other_files(from_pretrained_options)
    record = checked_record(directory, check_files)
    if not adapter:
        auto = auto_class(pretrained(AutoConfig, str(directory)))
        model = load_model(str(directory), auto=auto, refuse_unexpected=True, **from_pretrained_options)
        with one_error(f"the config in {directory} does not fit its {RECORD_NAME}"):
            apply_record(model, record, directory)
        return model
    given = base_revision or from_pretrained_options.pop("revision", None)
    base_model, revision = record.base(directory, base_model, given)
    if revision is not None:
        from_pretrained_options["revision"] = revision
    hint = f"{directory / RECORD_NAME} names this base model; give base_model= if it has moved"
    base = load_base(base_model, directory, hint, **from_pretrained_options)
    return attach(base, directory, record, check_base=check_base)


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
        model: the base model, either not patched, or patched with the recorded encoding.
        directory: an adapter directory, with its record; or the hub id of one.
        is_trainable: whether the adapter's weights require gradients.
        check_files: as in `load`.
        check_base: as in `load`.

    Raises:
        RopeExtendError: the record is missing or damaged; `load` would refuse the files; the base model has
            another family, rotary shape, weights or encoding; or the adapter's weights do not fit. The base
            model is then unchanged.
    """
    if is_peft_model(model):
        raise RopeExtendError("this model carries an adapter already; load_adapter takes the base model")
    directory = local_directory(directory)
    record = checked_record(directory, check_files)
    return attach(model, directory, record, is_trainable=is_trainable, check_base=check_base)


def check_loaded_by_peft(
    model: nn.Module, name: str | PathLike[str], options: dict[str, Any], *, in_place: bool
) -> None:
    """Refuse an adapter of another encoding than the model's, which peft would load without its own.

    If it replaces one of the model's (`in_place`), what its encoding has learned does too.
    """
    patch = current_patch(model)
    if patch is None:
        return
    try:
        directory = local_directory(name, **hub_options(options)) / (options.get("subfolder") or "")
    except RopeExtendError:
        return  # peft says what is missing
    if not is_recorded(directory):
        return
    record, values = read_record(directory), read_learned(directory)
    here = replace(record, encoding=patch.encoding, shape=patch.shape, target_length=patch.target_length)
    differ = differences(record.schedule, here.schedule)
    if in_place and not differ:
        patch.learn(values, str(directory / LEARNED_FILE))
    elif not differ and any(
        name not in values or not (weight.is_meta or torch.equal(values[name].to(weight), weight))
        for name, weight in learned_parameters(model).items()
    ):
        differ = "learned parameters"
    if differ:
        raise RopeExtendError(
            f"{directory} was trained with {record.encoding}, this model uses {patch.encoding}: "
            f"they differ in {differ}. A model has one encoding, so use rope_extend.load for this adapter"
        )


def checked_record(directory: Path, check_files: bool) -> Record:
    """The record of a directory, after its files were checked."""
    record = read_record(directory)
    check_directory(directory, record.weights, record.configs, contents=check_files)
    if check_files:
        check_agreement(directory, record)
        if is_model(directory):
            _check_family(plain_config(read_json(directory / CONFIG)).get("model_type"), record)
    return record


def load_base(name: str, directory: Path, hint: str = "", **options: Any) -> Any:
    """The base model of the adapter in a directory, with the head and the vocabulary that it had there."""
    config, held = read_json(directory / ADAPTER_CONFIG), held_weights(directory)
    task, mapping = str(config.get("task_type")), config.get("auto_mapping")
    auto = HEADS.get(task, AutoModelForCausalLM)
    if isinstance(mapping, dict) and isinstance(kind := mapping.get("base_model_class"), str):
        access = {key: options[key] for key in ACCESS if key in options}
        auto = auto_class(pretrained(AutoConfig, name, hint, **access), kind)
    for weight, shape in held.items():
        if shape and re.search(r"(^|\.)(score|classifier)\.weight$", weight) and auto in HEADS.values():
            options.setdefault("num_labels", shape[0])
    model = load_model(name, hint, auto=auto, held=held.keys(), **options)
    fit_vocabulary(model, directory)
    return model


def fit_vocabulary(model: Any, adapter: Path, *, resize: bool = True) -> None:
    """Give a base model as many embeddings as an adapter replaces: tokens were added to it before.

    With `resize` false, a model of another size is refused.
    """
    held, layers = held_weights(adapter), [model.get_input_embeddings(), model.get_output_embeddings()]
    matrices = [layer.weight for layer in layers if layer is not None]
    names = [n for n, weight in model.named_parameters() if any(weight is matrix for matrix in matrices)]
    rows, found = len(matrices[0]), {held.get(name, ())[:1] for name in names} - {()}
    if found <= {(rows,)}:
        return
    (wanted,) = max(found)
    if len(found) > 1 or not all(name in held for name in names):
        raise RopeExtendError(
            f"the adapter in {adapter} has {wanted:,} embeddings in one of the base model's two matrices of "
            f"{rows:,} only; save it again with both in modules_to_save"
        )
    if not resize:
        raise RopeExtendError(
            f"the adapter in {adapter} has {wanted:,} embeddings, and the base model has {rows:,}; call "
            f"model.resize_token_embeddings({wanted}) first, or use rope_extend.load, which resizes it"
        )
    with one_error(f"the base model cannot have the {wanted:,} embeddings of the adapter in {adapter}"):
        model.resize_token_embeddings(wanted, mean_resizing=False)


def load_model(
    name: str, hint: str = "", *, auto: Any = AutoModelForCausalLM, held: Collection[str] = (),
    refuse_unexpected: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """The model of a checkpoint, from safetensors and without remote code, with every weight from its files.

    Stock `from_pretrained` only warns when it initialises weights that the files do not have. `hint` is added
    to the error if there is no such model; `held` are weights that an adapter brings; `refuse_unexpected`
    refuses weights that the model does not have.
    """
    model, loaded = pretrained(auto, name, hint, use_safetensors=True, output_loading_info=True, **options)
    unexpected = ("unexpected_keys",) if refuse_unexpected else ()
    for kind in ("missing_keys", "mismatched_keys", *unexpected):
        # Stock `save_pretrained` writes the learned parameters of an encoding with the weights; they are
        # read separately.
        keys = sorted(
            key for key in map(str, loaded.get(kind) or ()) if not is_learned(key) and key not in held
        )
        if keys:
            raise RopeExtendError(
                f"the weights of {name!r} do not fit its config; {kind.replace('_', ' ')}: "
                f"{keys[0]!r} and {len(keys) - 1} more. Restore the files, or save the model again"
            )
    return model


def restore_weights(model: nn.Module, checkpoint: Path) -> None:
    """Give a whole model in training the weights of a checkpoint that `Trainer` did not find there.

    `Trainer` looks for them by their names in memory. `save_pretrained` gives those of many families, such as
    experts, other names. FSDP and DeepSpeed have files of their own.

    Raises:
        RopeExtendError: as `load`.
    """
    spread = AcceleratorState().distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    parameters, names = dict(model.named_parameters()), set[str]()
    for file in checkpoint.glob("model*.safetensors"):
        with open_weights(file) as weights:
            names.update(weights.keys())
    if not names or spread or parameters.keys() <= names:
        return
    dtype = reduce(torch.promote_types, {value.dtype for value in parameters.values()})
    model.load_state_dict(load(checkpoint, dtype=dtype).state_dict())


def attach(
    model: nn.Module,
    directory: Path,
    record: Record,
    *,
    is_trainable: bool = False,
    check_base: bool = True,
    advice: str = "; load the former (rope_extend.load documents how to use this one anyway)",
) -> PeftModel:
    """Patch a base model as recorded and put the adapter on it; if this fails, the model is unchanged.

    `advice` is what to do about another base model. The other arguments are those of `load_adapter`.
    """
    from peft import PeftConfig, PeftModel

    check = partial(check_base_model, model, record.base_fingerprint, directory, record.base_model)
    patch_before = current_patch(model)
    with one_error(f"cannot read {directory / ADAPTER_CONFIG}"):
        config = PeftConfig.from_pretrained(str(directory))
    changed_by = changes_base(config)
    fit_vocabulary(unwrap(model), directory, resize=False)
    # The encoding comes first: a model with the adapter's weights but without the encoding would be garbage.
    with one_error(f"the base model does not fit the adapter in {directory}"):
        patch = apply_record(model, record, directory)
    try:
        if check_base and not changed_by:
            check(advice=advice)
        with (
            one_error(f"the adapter in {directory} does not fit this model; it is of {record.base_model!r}"),
            undone_on_failure(model, weights=changed_by is not None),
            warnings.catch_warnings(),
        ):
            # peft only warns when the adapter has no weights for some of the model's layers.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(
                model, str(directory), is_trainable=is_trainable, **_device_map(model)
            )
            _refuse_unused(adapted, directory)
            if check_base and changed_by:  # the recorded fingerprint is of the changed base model
                check(advice=f". {changed_by} may also have changed them{advice}")
            return adapted
    except BaseException:
        if patch is not patch_before:
            patch.remove()
        raise


def _refuse_unused(adapted: PeftModel, directory: Path) -> None:
    """Refuse an adapter with weights that peft silently leaves out, such as those of a newer peft."""
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    taken = {*get_peft_model_state_dict(adapted, save_embedding_layers=False), *adapted.state_dict()}
    weights, adapter = load_peft_weights(str(directory), device="cpu"), adapted.active_adapter
    if weights.keys() <= taken:
        return
    with warnings.catch_warnings():  # peft renames some, and tells only when it loads them
        warnings.filterwarnings("ignore", message=".*no-op")  # of layers that are offloaded
        keys = set_peft_model_state_dict(adapted, weights, adapter).unexpected_keys
    # Of resized embeddings, peft also saves a copy under the name of the module around it.
    names = {re.sub(rf"\.{adapter}(?=\.|$)", "", key) for key in keys}
    if unused := sorted(name for name in names - taken if name.replace(".modules_to_save", "") not in taken):
        raise ValueError(
            f"its weight {unused[0]!r} and {len(unused) - 1} more have no place in the model. Check the "
            "base model, and the version of peft"
        )


def _device_map(model: nn.Module) -> dict[str, Any]:
    """The devices of a model's parts, for peft, which would otherwise choose its own for offloaded layers."""
    devices = getattr(unwrap(model), "hf_device_map", None) or {}
    if "disk" in devices.values():
        raise RopeExtendError(
            "the base model has layers on disk, and peft would copy all its weights into the working "
            "directory to load an adapter; merge the adapter first (rope_extend.merge, or rope-extend merge) "
            "and load the merged checkpoint, or make more memory available to the base model"
        )
    inside = {name and f"base_model.model.{name}": device for name, device in devices.items()}
    return {"device_map": inside} if inside else {}


def _check_family(model_type: Any, record: Record) -> None:
    if model_type != record.model_type:
        advice = f"; load the base model {record.base_model!r}" if record.base_model else ""
        raise RopeExtendError(
            f"the checkpoint was recorded as a {record.model_type} model, but this one is "
            f"{model_type}{advice}"
        )


def apply_record(model: nn.Module, record: Record, directory: Path | None = None) -> Patch:
    """Patch a model as recorded, with the encoding's learned parameters from a directory, if one is given.

    A model of another family or rotary shape, or with another patch, is refused.
    """
    _check_family(unwrap(model).config.model_type, record)
    active = current_patch(model)
    recorded = record.encoding, record.shape, record.target_length
    if active is not None and (active.encoding, active.shape, active.target_length) != recorded:
        raise RopeExtendError(
            f"the model is patched with {active.encoding}, but the checkpoint uses {record.encoding}; remove "
            "the patch first"
        )
    trained_length = record.shape.trained_length
    if active is None and (shape := shape_of(model, trained_length)) != record.shape:
        raise RopeExtendError(
            f"the checkpoint is of a model with {record.shape}, but this one has {shape}; load the base "
            f"model {record.base_model!r}"
        )
    patch = active or patch_model(
        model, record.encoding, trained_length=trained_length, target_length=record.target_length
    )
    if directory is not None:
        try:
            patch.learn(read_learned(directory), str(directory))
        except BaseException:
            if active is None:
                patch.remove()
            raise
    return patch


@contextmanager
def undone_on_failure(model: nn.Module, *, weights: bool = False) -> Iterator[None]:
    """Take the modules of peft out of a model again if the block raises, and restore `requires_grad`.

    `weights`: also restore the weights, from a copy that is kept during the block.
    """
    children = [(module, dict(module._modules)) for module in model.modules()]
    # Not the parameters themselves: FSDP replaces them by a share, and whole ones would stay on the device.
    gradients = [(weakref.ref(parameter), parameter.requires_grad) for parameter in model.parameters()]
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
        for reference, requires_grad in gradients:
            if (kept := reference()) is not None:
                kept.requires_grad_(requires_grad)
        for module, mode in training:
            module.training = mode
        vars(model).pop("peft_config", None)
        raise
