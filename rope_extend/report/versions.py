"""Versions of the software that a measurement was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("rope_extend", "torch", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Versions by name, of Python and of the packages that compute the results."""
    return {"python": platform.python_version(), **{name: package_version(name) for name in PACKAGES}}


def package_version(package: str) -> str:
    """The version of an installed package; `unknown` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
