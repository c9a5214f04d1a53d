"""Tensors that carry the name of a device, all in the memory of the CPU: mixed devices fail as on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

_DEVICE = "_logical_device"
CPU = torch.device("cpu")

READS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "equal", "nonzero", "allclose"}
"""Names of functions that wait for a GPU: their result is a value, or a shape that depends on values."""


class LogicalDevices(TorchFunctionMode):
    """Gives each tensor the device that it would have, and refuses functions of tensors of two devices.

    Attributes:
        reads: the names of functions that read values of a tensor on a GPU, in order.
        writes: the names of functions that copy values to a GPU and wait until it has done all before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.writes: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if function == Tensor.device.__get__:  # type: ignore[attr-defined]
            return logical_device(args[0])
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target: torch.device | None = None
        if name in ("to", "cpu", "cuda"):
            source = logical_device(args[0])
            target, args, kwargs = _target(name, args, kwargs)
            if (source.type, target.type) == ("cuda", "cpu"):
                self.reads.append("cpu")
            if (source.type, target.type) == ("cpu", "cuda") and not kwargs.get("non_blocking"):
                self.writes.append(name)
        elif kwargs.get("device") is not None:
            target, kwargs["device"] = torch.device(kwargs["device"]), CPU
            if name in ("tensor", "as_tensor") and target.type == "cuda":
                self.writes.append(name)
        elif tensors:
            target = self._common(name, tensors)
        if name in READS and target is not None and target.type == "cuda":
            self.reads.append(name)
        out = function(*args, **kwargs)
        if name in ("to", "cpu", "cuda") and out is args[0] and target not in (None, logical_device(out)):
            out = out.clone()
        return tree_map_only(Tensor, lambda tensor: _mark(tensor, target or CPU), out)

    @staticmethod
    def _common(name: str, tensors: list[Tensor]) -> torch.device:
        """The device of all tensors; numbers, and indices, may be on the CPU."""
        first = logical_device(tensors[0])
        devices = {logical_device(tensor) for tensor in tensors if tensor.dim()}
        if name in ("__getitem__", "__setitem__"):
            devices = {first, *(devices - {CPU})}
        if len(devices) > 1:
            raise RuntimeError(f"{name}: expected all tensors on one device, got {sorted(map(str, devices))}")
        return devices.pop() if devices else first


def logical_device(tensor: Tensor) -> torch.device:
    """The device that a tensor would have."""
    return getattr(tensor, _DEVICE, CPU)


def _mark(tensor: Tensor, device: torch.device) -> Tensor:
    setattr(tensor, _DEVICE, device)
    return tensor


def _target(name: str, args: Any, kwargs: Any) -> tuple[torch.device, Any, Any]:
    """The device of `to`, `cpu` or `cuda`, and the arguments for the CPU."""
    states, rest = args[0], list(args[1:])
    target = logical_device(states)
    if name != "to":
        return torch.device("cpu" if name == "cpu" else "cuda:0"), (states,), {}
    if kwargs.get("device") is not None:
        target, kwargs["device"] = torch.device(kwargs["device"]), CPU
    for index, argument in enumerate(rest):
        if isinstance(argument, torch.device | str | int) and not isinstance(argument, bool):
            target, rest[index] = torch.device(argument), CPU
        elif isinstance(argument, Tensor):
            target = logical_device(argument)
    return target, (states, *rest), kwargs


@contextmanager
def spread(model: Any, *devices: str) -> Iterator[LogicalDevices]:
    """Inside the block, the layers of a Llama are on these devices in turn, the rest on the first.

    As with accelerate, each layer gets copies of its inputs on its own device.
    """
    first = torch.device(devices[0])
    layers = model.model.layers
    for tensor in (*model.parameters(), *model.buffers()):
        _mark(tensor, first)
    places = {layer: torch.device(devices[n * len(devices) // len(layers)]) for n, layer in enumerate(layers)}
    places[model.model.norm] = first
    with LogicalDevices() as mode:
        for module, place in places.items():
            for tensor in (*module.parameters(), *module.buffers()):
                _mark(tensor, place)
            module.forward = _moving(module.forward, place)
        try:
            yield mode
        finally:
            for module in places:
                del module.__dict__["forward"]
    for tensor in (*model.parameters(), *model.buffers()):
        delattr(tensor, _DEVICE)


def _moving(forward: Any, place: torch.device) -> Any:
    """A layer's forward with its inputs moved to a device."""

    def moved(*args: Any, **kwargs: Any) -> Any:
        def move(tensor: Tensor) -> Tensor:
            return tensor if logical_device(tensor) == place else tensor.to(place)

        args, kwargs = tree_map_only(Tensor, move, (args, kwargs))
        return forward(*args, **kwargs)

    return moved


def inputs(ids: Tensor, device: str) -> Tensor:
    """Token ids on a device."""
    return _mark(ids.clone(), torch.device(device))
