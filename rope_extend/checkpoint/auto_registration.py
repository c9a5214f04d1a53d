"""What other libraries must know of this one, told to them when they are imported, in any order.

transformers' auto classes learn about plugin-only checkpoints. peft's `save_pretrained` learns to write the
record of the encoding next to an adapter, if its model is extended, and `load_adapter` of both libraries to
refuse an adapter of another encoding.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Two modules of transformers, because the second imports the first: while the first is executed, there is no
# AutoModelForCausalLM yet.
PEFT = "peft.peft_model"
MIXIN = "transformers.integrations.peft"
REGISTER = (
    "transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto", PEFT, MIXIN,
)  # fmt: skip


def _register(module: ModuleType) -> None:
    """Register with the auto class of one of the two modules, or watch what peft saves and loads."""
    if module.__name__ == PEFT:
        _wrap(module.PeftModel, "save_pretrained", _save_pretrained)
    if module.__name__ in (PEFT, MIXIN):
        owner = module.PeftModel if module.__name__ == PEFT else module.PeftAdapterMixin
        _wrap(owner, "load_adapter", _load_adapter)
        return
    from rope_extend.checkpoint.auto_classes import GuardedConfig, GuardedModel
    from rope_extend.checkpoint.model_type import MODEL_TYPE

    if module.__name__ == REGISTER[0]:
        module.AutoConfig.register(MODEL_TYPE, GuardedConfig, exist_ok=True)
    else:
        module.AutoModelForCausalLM.register(GuardedConfig, GuardedModel, exist_ok=True)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of a class by `around`, which is given the stock method and its arguments."""
    method = getattr(owner, name)
    stock = getattr(method, "stock", method)

    @functools.wraps(stock)
    def wrapped(model: Any, *args: Any, **options: Any) -> Any:
        return around(stock, model, *args, **options)

    wrapped.__dict__["stock"] = stock
    setattr(owner, name, wrapped)


def _save_pretrained(stock: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
    """Complete the adapter of an extended model that `PeftModel.save_pretrained` writes."""
    from rope_extend.checkpoint.saving import recording

    return recording(stock)(model, *args, **options)


def _load_adapter(stock: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
    """Let `load_adapter` refuse an adapter of another encoding than that of an extended model."""
    from rope_extend.checkpoint.restoring import check_loaded_by_peft

    given = inspect.signature(stock).bind(model, *args, **options).arguments
    if (name := given.get("model_id", given.get("peft_model_id"))) is not None:
        in_place = given.get("adapter_name") in getattr(model, "peft_config", {})
        hub = {**options, **(options.get("adapter_kwargs") or {})}
        check_loaded_by_peft(model, name, hub, in_place=in_place)
    return stock(model, *args, **options)


class RegisteringFinder(MetaPathFinder):
    """Finds the modules of `REGISTER` in the usual places, and registers after each is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual spec, with a loader that registers; None for any other module."""
        spec = PathFinder.find_spec(fullname, path) if fullname in REGISTER else None
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _register(module)

            loader.exec_module = exec_module
        return spec


def register_when_imported() -> None:
    """Register with the modules of transformers and peft that are loaded, and with others once they are.

    May be called again, as by a reload of this package: each module is registered with once.
    """
    sys.meta_path.insert(0, RegisteringFinder())
    for module in filter(sys.modules.__contains__, REGISTER):
        _register(sys.modules[module])
