"""The transformers model inside wrappers, and the layers of its decoder."""

from __future__ import annotations

from os import PathLike
from typing import Any, NamedTuple

import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from rope_extend.errors import UnsupportedModelError
from rope_extend.models.families import find_family

CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
"""The argument of models and of `generate` that takes a cache. Its old name is deprecated."""


def unwrap(model: nn.Module) -> Any:
    """The transformers model inside PEFT, DistributedDataParallel and `torch.compile` wrappers."""
    inner: Any = model
    if isinstance(model, str | PathLike):
        raise UnsupportedModelError(
            f"this takes a loaded model, got the name {str(model)!r}. Load it first, with "
            f"AutoModelForCausalLM.from_pretrained, or with rope_extend.load if rope_extend saved it"
        )
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):  # peft
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):  # torch.compile
            inner = inner._orig_mod
        elif isinstance(getattr(inner, "module", None), nn.Module):  # data parallel wrappers
            inner = inner.module
        else:
            raise UnsupportedModelError(
                f"this needs a transformers model, got {type(model).__name__}; load one, for example with "
                f"AutoModelForCausalLM.from_pretrained"
            )
    return inner


class DecoderLayers(NamedTuple):
    """The list of a decoder's layers, and where it is."""

    parent: nn.Module
    """The module that holds the list."""
    name: str
    """The attribute of `parent` that is the list."""
    layers: nn.ModuleList
    complete: bool
    """Whether these are all layers that a token passes through, one entry for each."""


def decoder_layers(model: nn.Module) -> DecoderLayers | None:
    """The layers of a model's text decoder, from the nearest module that holds the rotary module.

    None if they are not in one list, or if the family is not supported.
    """
    base = unwrap(model)
    decoder, family = base.base_model, find_family(base.config.model_type)
    if family is None:
        return None
    steps = family.rotary_path.split(".")
    steps = steps[: steps.index("*")] if "*" in steps else steps
    for depth in range(len(steps) - 1, -1, -1):
        parent = decoder.get_submodule(".".join(steps[:depth]))
        for name in ("layers", "h"):
            layers = getattr(parent, name, None)
            if isinstance(layers, nn.ModuleList) and len(layers):
                count = base.config.get_text_config(decoder=True).num_hidden_layers
                embeds = any(isinstance(module, nn.Embedding) for module in parent.modules())
                complete = len(layers) == count and embeds  # BLT has more layers before and after
                return DecoderLayers(parent, name, layers, complete)
    return None
