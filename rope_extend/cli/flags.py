"""The words of the library in those of the command line."""

from __future__ import annotations

import re
from collections.abc import Collection

_FLAGS = {"attention": "--attn", "max_documents": "--documents", "load_dtype": "--dtype"}
"""Flags that are not called as the library's argument is."""


def in_flags(message: str, flags: Collection[str]) -> str:
    """An error of the library in the words of the command line: `overwrite=True` becomes `--overwrite`.

    Args:
        message: what the library says.
        flags: the flags of the command; other arguments stay as they are.
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        long = _FLAGS.get(name, "--" + name.replace("_", "-"))
        if value == "False":
            value, long = None, "--no-" + long.removeprefix("--")
        if long not in flags or value == "None":
            return match[0]
        return long if value in (None, "", "True") else f"{long} {value.strip(chr(39))}"

    # Some errors name the flag as well, `overwrite=True (--overwrite)`. What is in the brackets of a call, as
    # in yarn(factor=8), stays as it is.
    argument = r"(?<![\w(.-])(?P<name>[a-z][a-z_]*)=(?P<value>'[^']*'|[\w.]*\w|)(?: \(--[a-z-]+\))?"
    parts = re.split(r"(\w\([^()]*\))", message)
    return "".join(part if index % 2 else re.sub(argument, flag, part) for index, part in enumerate(parts))
