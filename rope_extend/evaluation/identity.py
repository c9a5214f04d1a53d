"""What a measurement depends on: kept with everything that is resumed, and compared before it is used.

An identity is a dict of plain JSON values by name; see `rope_extend.journal`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from rope_extend.checkpoint.peft_models import tuner_layers
from rope_extend.journal import Identity
from rope_extend.models.decoders import unwrap
from rope_extend.patching import current_patch

_NOT_IN_CONFIG = ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype")
"""Values of a config on which no result depends, or that have an entry of their own."""


def model_identity(model: nn.Module) -> Identity:
    """What distinguishes one model from another.

    Its position encoding and the rotary shape it is based on, its config, its dtype, every bit of its
    weights, and how its adapters act. It is the same on any device, and for any attention implementation.
    """
    lm, patch = unwrap(model), current_patch(model)
    config = lm.config.to_dict()
    counted = config.keys() - _NOT_IN_CONFIG
    named = {name: config[name] for name in sorted(counted) if config[name] is not None}
    adapters = [
        [path, layer.active_adapters, layer.disable_adapters, getattr(layer, "scaling", None)]
        for path, layer in tuner_layers(model)
    ]
    return {
        "encoding": patch.encoding.to_dict() if patch else config.get("rope_parameters"),
        "shape": asdict(patch.shape) if patch else None,
        "config": _digest(named),
        "dtype": str(lm.dtype),
        "weights": _digest([*_weights(model)]),
        "adapters": _digest(adapters) if adapters else None,
    }


def _digest(values: Any) -> str:
    """Sixteen hexadecimal digits that identify values of JSON; others count by their text."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _weights(model: nn.Module) -> Iterator[str]:
    """A line for each parameter and each buffer that is saved: its name, dtype, shape and checksum."""
    from accelerate.utils import align_module_device

    for path, module in model.named_modules():
        with align_module_device(module):  # loads weights that are offloaded
            tensors = [*module.named_parameters(path, recurse=False)]
            passing = {f"{path}.{name}".lstrip(".") for name in module._non_persistent_buffers_set}
            tensors += [item for item in module.named_buffers(path, recurse=False) if item[0] not in passing]
            for name, tensor in tensors:
                yield f"{name} {tensor.dtype} {tuple(tensor.shape)} {_checksum(tensor)}"


def _checksum(tensor: Tensor) -> str:
    """Sixteen hexadecimal digits of all bytes of a tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]
