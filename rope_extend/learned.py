"""The parameters that an encoding learns, as a part of the model that is trained, moved and saved with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rope_extend.encodings import Encoding, ModelShape
from rope_extend.errors import RopeExtendError

LEARNED_FILE = "encoding.safetensors"
"""The file of a checkpoint that holds them."""
LEARNED = "rope_extend_learned"
"""The attribute of a decoder that holds them while the patch is active."""
_SHARED = "shared"


class LearnedParameters(nn.Module):
    """What an encoding learns, in each layer or once for all: `shared.table`, or `layer3.r1`.

    Made in float32, whatever the model is in; `model.to(dtype)` casts them like any other parameter, and
    they are computed with in float32 all the same.

    Args:
        encoding: the encoding; it has to learn something.
        shape: the numbers that the first values follow from.
        layers: indices of the layers that the encoding acts in.
        device: where the parameters go.
    """

    def __init__(
        self, encoding: Encoding, shape: ModelShape, layers: Sequence[int], device: torch.device
    ) -> None:
        super().__init__()
        self.per_layer = encoding.per_layer
        for name in [f"layer{layer}" for layer in layers] if encoding.per_layer else [_SHARED]:
            first = {key: value.to(device, torch.float32) for key, value in encoding.initial(shape).items()}
            self.add_module(name, nn.ParameterDict(first))

    def of(self, layer: int | None = None) -> dict[str, Tensor]:
        """The parameters of a layer, float32, by the names of `Encoding.initial`."""
        chosen: Any = getattr(self, f"layer{layer}" if self.per_layer else _SHARED)
        return {name: value.float() for name, value in chosen.items()}

    def put(self, values: Mapping[str, Tensor], source: str, *, partial: bool = False) -> None:
        """Take values by their full names, such as `shared.table`; `partial` lets some of them be.

        Raises:
            RopeExtendError: other names or shapes than the parameters have; `source` is where they are from.
        """
        own = dict(self.named_parameters())
        wrong = values.keys() - own.keys() if partial else values.keys() ^ own.keys()
        wrong |= {name for name in own.keys() & values.keys() if own[name].shape != values[name].shape}
        if wrong:
            name = min(wrong)
            has, given = (tuple(each[name].shape) if name in each else "none" for each in (own, values))
            raise RopeExtendError(
                f"{source} does not fit: {name!r} is of shape {given} there, and {has} in this model"
            )
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value)


def learned_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What the active encoding of a model learns, by full name; empty where nothing is."""
    for module in model.modules():
        found = getattr(module, LEARNED, None)
        if isinstance(found, LearnedParameters):
            return dict(found.named_parameters())
    return {}


def write_learned(directory: Path, model: nn.Module) -> None:
    """Write what the active encoding learns into `encoding.safetensors`, if it learns anything.

    In a file of its own, because neither an adapter nor a stock checkpoint has a place for it.
    """
    values = {name: value.detach().float().contiguous() for name, value in learned_parameters(model).items()}
    if values:
        save_file(values, directory / LEARNED_FILE, metadata={"format": "pt"})


def read_learned(directory: Path) -> dict[str, Tensor]:
    """What `write_learned` wrote; empty where there is no such file.

    Raises:
        RopeExtendError: the file is damaged.
    """
    path = directory / LEARNED_FILE
    try:
        return load_file(path) if path.exists() else {}
    except (OSError, SafetensorError) as error:
        raise RopeExtendError(f"cannot read {path}: {error}; restore it, or save the model again") from error


def is_learned(name: str) -> bool:
    """Whether a parameter of a model, by its full name, belongs to its encoding."""
    return LEARNED in name.split(".")
