"""The log by which every change to a model is undone."""

from __future__ import annotations

from typing import Any


class UndoLog:
    """Attribute changes, in order, as plain data that survives copying and pickling."""

    _MISSING = "__missing__"

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

    def unwind(self) -> None:
        """Undo everything, the latest first."""
        while self.entries:
            owner, name, value = self.entries.pop()
            if isinstance(value, str) and value == self._MISSING:
                if hasattr(owner, name):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)
