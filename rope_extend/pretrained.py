"""Loading by name: stock `from_pretrained`, with one clear error when it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rope_extend.errors import RopeExtendError
from rope_extend.families import adapter_for


def pretrained(auto: Any, name: str, hint: str = "", **kwargs: Any) -> Any:
    """`auto.from_pretrained(name, **kwargs)` for one of transformers' auto classes.

    Args:
        auto: `AutoConfig`, `AutoTokenizer` or `AutoModelForCausalLM`.
        name: a checkpoint's directory or hub id.
        hint: added to the error message.
        kwargs: as `from_pretrained` takes them.

    Raises:
        RopeExtendError: there is no such checkpoint, or it cannot be read.
    """
    try:
        return auto.from_pretrained(name, **kwargs)
    except (OSError, ValueError, ImportError) as error:
        what = {AutoTokenizer: "tokenizer", AutoConfig: "config"}.get(auto, "model")
        reason = str(error).rstrip(".")
        raise RopeExtendError(
            f"cannot load the {what} of {name!r}: {reason}. Give a hub id, or a directory with a "
            f"transformers checkpoint (seen from {Path.cwd()}){hint}"
        ) from error


def empty_model(name: str) -> nn.Module:
    """The model of a checkpoint's config, on the meta device: no weights are read or allocated.

    Raises:
        RopeExtendError: no such checkpoint.
        UnsupportedModelError: no adapter for the family.
    """
    config = pretrained(AutoConfig, name)
    adapter_for(config.model_type)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def default_dtype(device: torch.device) -> torch.dtype:
    """The dtype for frozen weights on a device: bfloat16 on a GPU that has it, else float32."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return torch.float32
