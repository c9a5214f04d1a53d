"""Tells transformers' auto classes about plugin-only checkpoints, without importing transformers.

It does not matter whether transformers or rope_extend is imported first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Two modules, because the second imports the first: while the first is executed, there is no
# AutoModelForCausalLM yet.
REGISTER = ("transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto")


def _register(module: ModuleType) -> None:
    """Register with the auto class of one of the two modules."""
    from rope_extend.checkpoint.auto_classes import GuardedConfig, GuardedModel
    from rope_extend.checkpoint.model_type import MODEL_TYPE

    if module.__name__ == REGISTER[0]:
        module.AutoConfig.register(MODEL_TYPE, GuardedConfig, exist_ok=True)
    else:
        module.AutoModelForCausalLM.register(GuardedConfig, GuardedModel, exist_ok=True)


class RegisteringFinder(MetaPathFinder):
    """Finds the modules of `REGISTER` as the other finders do, and registers after each is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the other finders, with a loader that registers; None for any other module."""
        if fullname not in REGISTER:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, type(self)) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                _register_after(spec, spec.loader)
                return spec
        return None


def _register_after(spec: ModuleSpec, loader: Any) -> None:
    """Register after the loader has executed its module."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if module.__name__ == spec.name:  # a loader may be shared, as in a zip file
            _register(module)

    loader.exec_module = exec_module


def register_when_imported() -> None:
    """Register with the modules of transformers that are loaded, and with the others once they are.

    May be called again, also after a reload of this package: there is never more than one finder.
    """
    name = RegisteringFinder.__qualname__
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__qualname__ != name]
    sys.meta_path.insert(0, RegisteringFinder())
    for module in filter(sys.modules.__contains__, REGISTER):
        _register(sys.modules[module])
