"""Loading by name: stock `from_pretrained`, with one clear error if it fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)

from rope_extend.errors import RopeExtendError, followed_by
from rope_extend.files import expand_home
from rope_extend.models.checkpoint_directory import ADAPTER_CONFIG, CONFIG
from rope_extend.models.families import family_for
from rope_extend.models.gguf_checkpoint import check_sizes, gguf_config, gguf_file, gguf_model
from rope_extend.models.gguf_metadata import ADVICE
from rope_extend.models.locating import ACCESS, check_checkpoint
from rope_extend.models.stock_config import has_stock_config

HEADS = {
    "SEQ_CLS": AutoModelForSequenceClassification, "TOKEN_CLS": AutoModelForTokenClassification,
    "QUESTION_ANS": AutoModelForQuestionAnswering, "FEATURE_EXTRACTION": AutoModel,
}  # fmt: skip
"""The auto classes of models that are no language models, by peft's name of the task."""
RESTORE = "restore the file, or save the model again"


def auto_class(config: Any, architecture: str | None = None) -> Any:
    """The auto class for models of a class: `architecture`, or the one that a config was saved with."""
    saved = config.architectures if isinstance(config.architectures, list) else []
    name = architecture or next(iter(saved), None)
    for auto in HEADS.values():
        if getattr(auto._model_mapping.get(type(config), None), "__name__", None) == name:
            return auto
    return AutoModelForCausalLM


def pretrained(auto: Any, name: str, hint: str = "", **kwargs: Any) -> Any:
    """`auto.from_pretrained(name, **kwargs)` for an auto class of transformers, without remote code.

    `name` may be a GGUF file as well. `hint` is added to the error message.
    """
    _check_directory(auto, str(name))
    if auto is not GenerationConfig:
        kwargs["trust_remote_code"] = False  # if unset, transformers asks on the terminal
    what = {AutoTokenizer: "tokenizer", AutoConfig: "config"}.get(auto, "model")
    advice = f"Give a hub id, or a directory with a transformers checkpoint (seen from {Path.cwd()})"
    advice = followed_by(advice, hint) if hint else advice
    with one_error(f"cannot load the {what} of {name!r}", advice):
        try:
            check_checkpoint(str(name), **{key: kwargs[key] for key in ACCESS if key in kwargs})
        except RopeExtendError as error:
            raise RopeExtendError(followed_by(str(error), hint) if hint else str(error)) from error
        if (path := gguf_file(name)) is not None:
            with one_error(f"cannot load the {what} of {name!r}", ADVICE):
                return _from_gguf(auto, path, **kwargs)
        try:
            return auto.from_pretrained(name, **kwargs)
        except SafetensorError:
            for file in sorted(Path(name).glob("*.safetensors")):
                with open_weights(file):  # says which file is damaged
                    pass
            raise


def _check_directory(auto: Any, name: str) -> None:
    """Refuse a directory without what is to be loaded; transformers would speak of other things."""
    path = Path(expand_home(name))
    if not name or not path.is_dir():  # the empty name would be the working directory
        return
    names = {file.name for file in path.iterdir() if file.is_file()}  # reading a pipe would wait for ever
    if auto is AutoTokenizer:
        if not any(re.search(r"token|^(vocab|spiece|tekken)|\.model$", file) for file in names):
            raise RopeExtendError(f"{name!r} has no tokenizer: copy tokenizer.json of its base model there")
    elif ADAPTER_CONFIG in names and CONFIG not in names and auto is not GenerationConfig:
        # With peft, transformers would load it without the encoding.
        raise RopeExtendError(
            f"{name!r} holds an adapter, not a whole model. Merge it first: rope-extend merge "
            f"{quote(name)} --output merged. Then give the merged directory; or give its base model"
        )
    elif CONFIG not in names and auto is not GenerationConfig:
        raise RopeExtendError(f"{name!r} has no config.json, so it is no checkpoint of transformers")


def _from_gguf(auto: Any, path: Path, **kwargs: Any) -> Any:
    if auto is AutoConfig:
        return gguf_config(path)
    if auto is AutoTokenizer:
        from rope_extend.models.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(path)
    if auto is GenerationConfig:
        return GenerationConfig.from_model_config(gguf_config(path))
    return gguf_model(path, **kwargs)


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """A safetensors file, open within the block; refused if it is truncated, or its header does not fit."""
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except OSError:
        raise
    except Exception as error:
        raise RopeExtendError(f"{path} is truncated or damaged ({error}); {RESTORE}") from error
    with file:
        yield file


@contextmanager
def one_error(what: str, advice: str = "") -> Iterator[None]:
    """Turn any error over a damaged checkpoint into a RopeExtendError that starts with `what`."""
    try:
        yield
    except (RopeExtendError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        reason = f"{what}: {kind}{' '.join(str(error).split())}"
        raise RopeExtendError(followed_by(reason, advice) if advice else reason) from error


def empty_model(name: str, config: Any = None, **arguments: Any) -> nn.Module:
    """The model of a checkpoint's config, on the meta device: no weights are read or allocated.

    `config` is given if it is loaded already, and `arguments` are those of `from_config`.
    """
    config = pretrained(AutoConfig, name) if config is None else config
    family_for(config.model_type)
    attention = arguments.get("attn_implementation")
    how = "" if attention is None else f" with attention {attention}"
    with one_error(f"the config of {name!r} describes no model that can be built{how}"), torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, **arguments)
    if (path := gguf_file(name)) is not None:
        check_sizes(path, model)
    return model


def default_dtype(device: torch.device) -> torch.dtype:
    """The default dtype of frozen weights: bfloat16 on a GPU with hardware for it, else float32."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


def is_for_stock(directory: Path, target_length: int) -> bool:
    """Whether stock transformers computes the encoding of a saved model; see `has_stock_config`."""
    return has_stock_config(pretrained(AutoConfig, str(directory)), target_length)
