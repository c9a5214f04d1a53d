"""Any model by its name, on the devices of this machine: what scripts and other tools start from."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from rope_extend.checkpoint.record import Record, read_record
from rope_extend.checkpoint.restoring import apply_record, load
from rope_extend.files import expand_home
from rope_extend.models.checkpoint_directory import (
    ADAPTER_CONFIG,
    RECORD_NAME,
    TOKENIZER_CONFIG,
    is_adapter,
    is_recorded,
)
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import pretrained
from rope_extend.models.locating import base_name, local_directory
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
    directory, record = _recorded(name)
    if record is None:
        return options.empty(name) if empty else options.load(name)
    source = base_name(*record.base(directory, base_model)) if is_adapter(directory) else name
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
    directory, record = _recorded(name)
    if record is not None and not (directory / TOKENIZER_CONFIG).exists():
        name = base_name(*record.base(directory))
    return pretrained(AutoTokenizer, name)


def base_model_of(name: str | PathLike[str]) -> str:
    """The model as it was before rope_extend extended it: the base model in its record, else itself.

    Raises:
        RopeExtendError: there is no such model, or its record names no base model.
    """
    name = expand_home(name)
    directory, record = _recorded(name)
    return name if record is None else base_name(*record.base(directory))


def _recorded(name: str) -> tuple[Path, Record | None]:
    """A checkpoint's directory, without weights if it is on the hub, and the record in it.

    The record is None for a model that rope_extend did not write; an adapter must have one.
    """
    patterns = [RECORD_NAME, ADAPTER_CONFIG, TOKENIZER_CONFIG]
    directory = local_directory(name, allow_patterns=patterns)
    known = is_recorded(directory) or is_adapter(directory)
    return directory, read_record(directory) if known else None
