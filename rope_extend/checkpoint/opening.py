"""Any model by its name, on the devices of this machine: what scripts and other tools start from."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import cached_file

from rope_extend.checkpoint.hub import local_directory
from rope_extend.checkpoint.record import Record, read_record
from rope_extend.checkpoint.restoring import apply_record, load
from rope_extend.files import expand_home
from rope_extend.models.checkpoint_directory import ADAPTER_CONFIG, RECORD_NAME
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import pretrained
from rope_extend.models.locating import check_checkpoint
from rope_extend.models.processes import process_count


def load_any(
    name: str | PathLike[str],
    *,
    base_model: str | None = None,
    empty: bool = False,
    options: LoadOptions | None = None,
) -> Any:
    """Load any model: what `save` wrote, with its encoding; another checkpoint; or a GGUF file.

    Args:
        name: a directory, a GGUF file or a hub id.
        base_model: the base model of an adapter; overrides the one in its record.
        empty: without weights, on the meta device. This takes a second, and finds the mistakes in names and
            in an extension that would otherwise show after minutes.
        options: how it is loaded; by default in bfloat16 on the GPU if there is one, spread over all GPUs if
            there are several, and otherwise in float32 on the CPU.

    Returns:
        The model in evaluation mode; a `PeftModel` for an adapter.

    Raises:
        RopeExtendError: as `load`; there is no such model, or an adapter has no record of its encoding.
    """
    name = expand_home(name)
    if options is None:
        spread = torch.cuda.device_count() > 1 and process_count() == 1
        options = LoadOptions(device_map="auto" if spread else None)
    record = _record(name)
    if record is None:
        return options.empty(name) if empty else options.load(name)
    adapter = _file(name, ADAPTER_CONFIG) is not None
    source = _base(name, record, base_model) if adapter else str(local_directory(name))
    if not empty:
        return load(name, base_model=base_model, **options.arguments(source))
    model = options.empty(source)
    apply_record(model, record)
    return model


def load_tokenizer(name: str | PathLike[str]) -> Any:
    """Load the tokenizer of any model that `load_any` loads; an adapter without one has its base model's.

    Raises:
        RopeExtendError: there is no such model, or it has no tokenizer.
    """
    name = expand_home(name)
    record = _record(name)
    if record is not None and _file(name, "tokenizer_config.json") is None:
        name = _base(name, record)
    return pretrained(AutoTokenizer, name)


def base_model_of(name: str | PathLike[str]) -> str:
    """The model as it was before rope_extend extended it: the base model in its record, else itself.

    Raises:
        RopeExtendError: there is no such model, or its record names no base model.
    """
    name = expand_home(name)
    record = _record(name)
    return name if record is None else _base(name, record)


def _base(name: str, record: Record, base_model: str | None = None) -> str:
    base, revision = record.base(Path(name), base_model)
    if revision is None:
        return base
    return str(local_directory(base, "base model", "base_model=", revision=revision))


def _record(name: str) -> Record | None:
    """The record of a checkpoint; None for one that rope_extend did not write, unless it is an adapter."""
    check_checkpoint(name)
    files = [file for each in (RECORD_NAME, ADAPTER_CONFIG) if (file := _file(name, each)) is not None]
    return read_record(files[0].parent) if files else None


def _file(name: str, file: str) -> Path | None:
    """A file of a checkpoint, alone downloaded from the hub; None if the checkpoint has no such file."""
    if Path(name).exists():
        path = Path(name) / file
        return path if path.exists() else None
    found = cached_file(
        name, file, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    return None if found is None else Path(found)
