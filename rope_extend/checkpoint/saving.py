"""Saving extended models: the weights, and next to them the record of the position encoding.

An adapter's own files do not mention position encodings, so peft silently loads it with the original window.
The record closes that gap. What peft itself saves gets one too: `auto_registration` puts `recording` around
`PeftModel.save_pretrained`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rope_extend.checkpoint.manifest import check_finite, read_json
from rope_extend.checkpoint.model_type import guarded_config
from rope_extend.checkpoint.peft_models import fingerprint_without_held, is_peft_model
from rope_extend.checkpoint.publishing import warn_of_local_paths
from rope_extend.checkpoint.record import Record, write_record_with_digests
from rope_extend.checkpoint.staging import refuse_base_model, staged
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home, write_json
from rope_extend.models.decoders import unwrap
from rope_extend.models.loading import one_error
from rope_extend.models.parameters import is_learned, learned_parameters, write_learned
from rope_extend.models.stock_config import has_stock_config
from rope_extend.patching import current_patch


def save(
    model: nn.Module,
    directory: str | PathLike[str],
    tokenizer: Any | None = None,
    overwrite: bool = False,
    *,
    base_model: str | None = None,
    max_shard_size: int | str | None = None,
    record: Record | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Save a patched model, with the record of its encoding; returns the directory.

    A model with a peft adapter gives an adapter directory, a model without one a full checkpoint. Stock
    `from_pretrained` loads that if stock transformers supports the encoding. Otherwise the checkpoint has
    `model_type: rope_extend` in its config: `AutoModelForCausalLM` loads it after `import rope_extend`, and
    refuses it otherwise, instead of loading it with the original window.

    All files are written and checked before they replace earlier ones. If the save fails or is interrupted,
    the directory is unchanged.

    Args:
        model: a model with an active patch.
        directory: the output directory; created if missing.
        tokenizer: saved too, if given.
        overwrite: replace a checkpoint in that directory; other files stay.
        base_model: name of the base model, for the record and the adapter's config; default: the name it was
            loaded by. If that is a local path, an adapter keeps it, and a warning names the files.
        max_shard_size: maximum size of one weight file of a full checkpoint, in bytes or like `"5GB"`;
            default: transformers' own limit.
        record: the record to write, if the model does not show all of it; default: the model's own.
        state: the state dict to write, if the model does not hold all of it, as under FSDP; default: the
            model's own.

    Raises:
        RopeExtendError: the model is not patched; the directory holds a checkpoint, is the base model of the
            adapter, or cannot be written to; the disk is full; or a weight is not finite.
    """
    record = record or Record.of(model, base_model)
    target = Path(expand_home(directory))
    adapter = is_peft_model(model)
    if adapter and max_shard_size is not None:
        raise RopeExtendError("max_shard_size is for full checkpoints; an adapter is one file")
    if adapter:
        refuse_base_model(target, record.base_model)
    with staged(target, overwrite=overwrite) as staging:
        if adapter:
            _write_adapter(model, staging, state)
        else:
            write_model(unwrap(model), staging, max_shard_size, state)
        if tokenizer is not None:
            write_tokenizer(tokenizer, staging, record.target_length)
        complete_checkpoint(staging, model, record, renamed=bool(base_model), state=state)
        check_finite(staging)
    if adapter:
        warn_of_local_paths(target)
    return target


def recording(stock: Callable[..., Any], base_model: str | None = None) -> Callable[..., Any]:
    """A `save_pretrained` that completes what `stock` wrote, if the model that it saves is extended."""

    @functools.wraps(stock)
    def save_pretrained(model: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
        result = stock(model, save_directory, *args, **options)
        given = inspect.signature(stock).bind(model, save_directory, *args, **options).arguments
        if current_patch(model) is not None and given.get("is_main_process", True):
            state, names = options.get("state_dict"), ["default"]
            if is_peft_model(model):
                names = given.get("selected_adapters") or list(model.peft_config)
            for name in names:  # peft writes an adapter of another name one level down
                directory = Path(save_directory) / ("" if name == "default" else name)
                record = Record.of(model, base_model)
                complete_checkpoint(directory, model, record, renamed=bool(base_model), state=state)
        return result

    return save_pretrained


def stock_save(model: Any) -> Callable[..., Any]:
    """The `save_pretrained` of a model's class, without `recording`."""
    save_pretrained = type(model).save_pretrained
    return getattr(save_pretrained, "stock", save_pretrained)


def complete_checkpoint(
    directory: Path,
    model: nn.Module,
    record: Record,
    *,
    renamed: bool = False,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Complete a directory that holds a model's weights: learned parameters, guard, record and digests.

    `state` is that of `save`, `renamed` that of `write_record_with_digests`.
    """
    config = directory / "config.json"
    if config.exists() and not has_stock_config(unwrap(model).config, record.target_length):
        write_json(config, guarded_config(read_json(config)), sort_keys=True)
    write_learned(directory, model, state)
    if record.base_fingerprint is not None:
        fingerprint = fingerprint_without_held(model, record.base_fingerprint, directory)
        record = replace(record, base_fingerprint=fingerprint)
    write_record_with_digests(directory, record, renamed=renamed)


def write_model(
    base: Any,
    directory: Path,
    max_shard_size: int | str | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model without an adapter as stock transformers reads it, without parameters of the encoding."""
    options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    if learned_parameters(base):
        named = base.state_dict() if state is None else state
        state = {name: value for name, value in named.items() if not is_learned(name)}
    with _config_as_loaded(base):
        type(base).save_pretrained(base, directory, state_dict=state, **options)


def write_tokenizer(tokenizer: Any, directory: Path, window: int | None = None) -> None:
    """`tokenizer.save_pretrained`; the files state `window` as `model_max_length`, if it is given.

    Several chat templates go into its config, so that all files of a checkpoint are in one directory.
    """
    before, several = tokenizer.model_max_length, isinstance(getattr(tokenizer, "chat_template", None), dict)
    tokenizer.model_max_length = before if window is None else window
    try:
        with one_error("the tokenizer cannot be written"):
            tokenizer.save_pretrained(directory, save_jinja_files=not several)
    finally:
        tokenizer.model_max_length = before


@contextmanager
def _config_as_loaded(base: Any) -> Iterator[None]:
    """Let the config say within the context that head and embeddings are two matrices, if they are.

    transformers leaves them apart on loading if the files hold two matrices, whatever the config says. Other
    readers follow the config.
    """
    configs = (base.config, base.config.get_text_config())
    before = [getattr(config, "tie_word_embeddings", None) for config in configs]
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    tied = any(before) and base.get_expanded_tied_weights_keys(all_submodels=True)
    if tied and head is not None and head.weight is not embeddings.weight and not base.all_tied_weights_keys:
        for config in configs:
            config.tie_word_embeddings = False
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            if value is not None:
                config.tie_word_embeddings = value


def _write_adapter(model: Any, directory: Path, state: Mapping[str, Tensor] | None) -> None:
    """Save the active adapter."""
    active = model.active_adapters
    if len(active) != 1:
        raise RopeExtendError(f"save takes one active adapter, got {active}; choose one with set_adapter")
    stock_save(model)(model, directory, selected_adapters=active, state_dict=state)
    if active != ["default"]:  # peft writes an adapter of another name one level down
        for path in (directory / active[0]).iterdir():
            os.replace(path, directory / path.name)
        (directory / active[0]).rmdir()
    (directory / "README.md").unlink(missing_ok=True)  # peft's model card, an empty form
