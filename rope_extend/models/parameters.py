"""The learned parameters of an encoding: a part of the model that is trained, moved and saved with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.modeling import align_module_device, has_offloaded_params
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rope_extend.encodings import Encoding, ModelShape
from rope_extend.errors import RopeExtendError
from rope_extend.models.checkpoint_directory import LEARNED_FILE

LEARNED = "rope_extend_learned"
"""The attribute of a decoder that holds learned parameters while the patch is active."""
_SHARED = "shared"


class LearnedParameters(nn.Module):
    """The learned parameters of an encoding, for each layer (`layer3.r1`) or for all (`shared.table`).

    They start in float32 in a model of any dtype. `model.to(dtype)` casts them like other parameters, but
    computations use them in float32.

    Args:
        encoding: an encoding with learned parameters.
        shape: the numbers that the first values are computed from.
        layers: indices of the layers that the encoding acts in.
        device: device of the parameters.

    Attributes:
        per_layer: whether each layer has its own.
        layers: indices of the layers that have; empty if all share theirs.
    """

    def __init__(
        self, encoding: Encoding, shape: ModelShape, layers: Sequence[int], device: torch.device
    ) -> None:
        super().__init__()
        self.per_layer = encoding.per_layer
        self.layers = list(layers) if encoding.per_layer else []
        for name in [f"layer{layer}" for layer in layers] if encoding.per_layer else [_SHARED]:
            values = {key: value.to(device, torch.float32) for key, value in encoding.initial(shape).items()}
            self.add_module(name, nn.ParameterDict(values))

    def of(self, layer: int | None = None) -> dict[str, Tensor]:
        """The parameters of a layer, float32, by the names of `Encoding.initial`."""
        name = f"layer{layer}" if self.per_layer else _SHARED
        return {key: value.float() for key, value in _present(getattr(self, name)).items()}

    def put(self, values: Mapping[str, Tensor], source: str, *, partial: bool = False) -> None:
        """Copy values into the parameters, by full names such as `shared.table`.

        `partial` allows values to be missing.

        Raises:
            RopeExtendError: names or shapes differ from those of the parameters, or these are offloaded. The
                message names `source`, the file or model that the values come from.
        """
        if any(map(has_offloaded_params, self.children())):
            raise RopeExtendError(
                f"{source} has values for parameters that accelerate has offloaded; give them before that"
            )
        parameters = dict(self.named_parameters())
        wrong = values.keys() - parameters.keys() if partial else values.keys() ^ parameters.keys()
        wrong |= {
            name for name in parameters.keys() & values.keys() if parameters[name].shape != values[name].shape
        }
        if wrong:
            name = min(wrong)
            there, here = (
                f"has shape {tuple(tensors[name].shape)}" if name in tensors else "is missing"
                for tensors in (values, parameters)
            )
            raise RopeExtendError(
                f"{source} does not fit this model: {name!r} {there} in the source, and {here} in the model"
            )
        with torch.no_grad():
            for name, value in values.items():
                own = parameters[name]
                if isinstance(own, DTensor):  # FSDP spreads it over the processes
                    value = distribute_tensor(value.to(own.device), own.device_mesh, own.placements)
                own.copy_(value)


def _present(values: Any) -> dict[str, Tensor]:
    """Parameters by name; those that accelerate offloads between forwards are fetched."""
    with align_module_device(values):
        return dict(values.items())


def current_learned(model: nn.Module) -> LearnedParameters | None:
    """What a model's active encoding learns; None if it has nothing to learn."""
    found = (getattr(module, LEARNED, None) for module in model.modules())
    return next((each for each in found if isinstance(each, LearnedParameters)), None)


def learned_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The learned parameters of a model's active encoding, by full name; empty if it has none."""
    learned = current_learned(model)
    return {} if learned is None else dict(learned.named_parameters())


def train_learned(model: nn.Module) -> None:
    """Train the learned parameters of the active encoding, in float32: peft freezes all but its adapter."""
    for parameter in learned_parameters(model).values():
        parameter.requires_grad_(True)
        parameter.data = parameter.data.float()


def write_learned(directory: Path, model: nn.Module, state: Mapping[str, Tensor] | None = None) -> None:
    """Write the learned parameters of the active encoding, if any, to `encoding.safetensors`.

    They get a separate file, because neither an adapter nor a stock checkpoint can hold them. Their values
    are those of `state`, a state dict of the model, if it has them.
    """
    learned = current_learned(model)
    if learned is not None:
        given = {name: value for name, value in (state or {}).items() if is_learned(name)}
        values = {name.rpartition(f"{LEARNED}.")[2]: value for name, value in given.items()} or {
            f"{name}.{key}": value
            for name, each in learned.named_children()
            for key, value in _present(each).items()
        }
        values = {name: value.detach().float().contiguous() for name, value in values.items()}
        save_file(values, directory / LEARNED_FILE, metadata={"format": "pt"})


def whole_learned(model: nn.Module) -> dict[str, Tensor]:
    """What the active encoding has learned, as a state dict for `write_learned`, if FSDP spreads it.

    Every process must call this. Empty if FSDP spreads none of it.
    """
    learned = learned_parameters(model)
    return {
        f"{LEARNED}.{name}": value.full_tensor()
        for name, value in learned.items()
        if isinstance(value, DTensor)
    }


def read_learned(directory: Path) -> dict[str, Tensor]:
    """The values that `write_learned` wrote; empty if there is no such file."""
    path = directory / LEARNED_FILE
    try:
        return load_file(path) if path.exists() else {}
    except (OSError, SafetensorError) as error:
        raise RopeExtendError(f"cannot read {path}: {error}; restore it, or save the model again") from error


def is_learned(name: str) -> bool:
    """Whether a parameter of a model, by its full name, belongs to its encoding."""
    return LEARNED in name.split(".")
