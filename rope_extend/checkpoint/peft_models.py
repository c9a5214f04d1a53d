"""Peft models, without importing peft: a process that has not imported it has no such model."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model is a `peft.PeftModel`."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def tuner_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """`(path, layer)` of the layers through which peft adapters act on a model."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(path, module) for path, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def wrapper_paths(model: nn.Module) -> set[str]:
    """Paths of all modules that peft put around a base model's own modules."""
    if "peft" not in sys.modules:
        return set()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    wrappers = BaseTunerLayer | AuxiliaryTrainingWrapper
    return {path for path, module in model.named_modules() if isinstance(module, wrappers)}


def remove_adapter(model: Any) -> Any:
    """Take an adapter out of a model, and return the base model with its own modules.

    peft's own `unload` leaves the trained copies of `modules_to_save`, such as norms and embeddings, in the
    base model. Weights that peft changed in place stay changed: biases (`bias="all"`), and those of
    initialisations such as PiSSA.

    Args:
        model: a `peft.PeftModel`, whose adapter is not merged.
    """
    from peft.utils.other import ModulesToSaveWrapper

    originals = [
        (parent, name, child.original_module)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, ModulesToSaveWrapper)
    ]
    base = model.unload()
    for parent, name, original in originals:
        setattr(parent, name, original)
    return base
