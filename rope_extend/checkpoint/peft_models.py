"""Looking at peft models without importing peft: a process that has not imported it has no such model."""

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
