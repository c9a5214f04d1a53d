"""The parameters that an encoding learns, as a part of the model that is trained, moved and saved with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rope_extend.encodings import Encoding, ModelShape
from rope_extend.errors import RopeExtendError

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

    def put(self, values: Mapping[str, Tensor], source: str) -> None:
        """Take values by their full names, such as `shared.table`.

        Raises:
            RopeExtendError: other names or shapes than the parameters have; `source` is where they are from.
        """
        own = dict(self.named_parameters())
        wrong = own.keys() ^ values.keys()
        wrong |= {name for name in own.keys() & values.keys() if own[name].shape != values[name].shape}
        if wrong:
            name = min(wrong)
            has, given = (tuple(each[name].shape) if name in each else "none" for each in (own, values))
            raise RopeExtendError(
                f"{source} does not fit: {name!r} is of shape {given} there, and {has} in this model"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(values[name])


def learned_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What the active encoding of a model learns, by full name; empty where nothing is."""
    for module in model.modules():
        found = getattr(module, LEARNED, None)
        if isinstance(found, LearnedParameters):
            return dict(found.named_parameters())
    return {}


def is_learned(name: str) -> bool:
    """Whether a parameter of a model, by its full name, belongs to its encoding."""
    return LEARNED in name.split(".")
