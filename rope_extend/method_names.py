"""The names of the position encodings, without importing them: each is the name of a file in `encodings/`."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from pkgutil import iter_modules

from rope_extend.errors import RopeExtendError


@cache
def method_names() -> tuple[str, ...]:
    """The names of all position encodings, sorted."""
    folder = Path(__file__).parent / "encodings"
    return tuple(sorted(module.name for module in iter_modules([str(folder)]) if not module.ispkg))


def unknown_method(name: object, known: Collection[str]) -> RopeExtendError:
    """The error for a name that no encoding has; it names the nearest of the known ones."""
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return RopeExtendError(f"no encoding is named {name!r}.{hint} Known: {', '.join(sorted(known))}")


def check_method_name(name: str) -> None:
    """Refuse a method, or a composition such as `resonance(yarn)`, that contains an unknown name.

    Once `rope_extend.encodings` is imported, its registry is asked instead of this function: other packages
    may have added encodings.

    Raises:
        RopeExtendError: an unknown name.
    """
    if "rope_extend.encodings" in sys.modules:
        return
    for part in name.replace(" ", "").rstrip(")").split("("):
        if part not in method_names():
            raise unknown_method(part, method_names())
