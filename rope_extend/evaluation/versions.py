"""The software that a measurement was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("rope_extend", "torch", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Versions by name: Python's, and those of what computes."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
