"""The log by which every change to a model is undone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import nn


class Removable(ABC):
    """A change of a model that `remove()` undoes, and so does the end of a `with` block."""

    @abstractmethod
    def remove(self) -> None:
        """Undo the change. Removing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class UndoLog:
    """Attribute changes, in order, as plain data that survives copying and pickling."""

    _MISSING = "__missing__"
    _HOOK = "__hook__"

    def __init__(self) -> None:
        self.entries: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, and remember its old value."""
        self.entries.append((owner, name, getattr(owner, name, self._MISSING)))
        setattr(owner, name, value)

    def delete(self, owner: Any, name: str) -> None:
        """Delete an attribute of the owner itself, and remember its value."""
        self.entries.append((owner, name, getattr(owner, name)))
        delattr(owner, name)

    def hook(self, module: nn.Module, before: Callable[..., Any]) -> None:
        """Call a function before each forward of a module, as a pre-hook with keyword arguments."""
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
        self.entries.append((module, self._HOOK, handle.id))

    def unwind(self) -> None:
        """Undo everything, the latest first."""
        while self.entries:
            owner, name, value = self.entries.pop()
            if name == self._HOOK:
                owner._forward_pre_hooks.pop(value, None)
                owner._forward_pre_hooks_with_kwargs.pop(value, None)
            elif isinstance(value, str) and value == self._MISSING:
                if hasattr(owner, name):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)
