"""The names of the position encodings, without importing them.

Where a method's name is asked for, the path of a saved encoding is taken too.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection
from pathlib import Path

from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home

ENCODING_FILE = "encoding.json"
"""Name of the file of a saved encoding, in its directory."""
PRETRAINED, CURRENT = "pretrained", "current"
STARTS = (PRETRAINED, CURRENT)
"""What an extension starts from: plain RoPE and the pretrained window, or the model's present ones."""
_METHODS = """
abf alibi clipped drope dual_chunk dynamic_linear dynamic_ntk dynamic_yarn fire jet_long kerple learned
linear linear_attention llama3 logn longrope near_far none nope ntk ntk_by_parts ntk_mixed p_rope power
rerope resonance sandwich self_extend shaw short_original sinks sinusoidal string t5_bias truncated xpos
yarn
"""


def method_names() -> tuple[str, ...]:
    """The names of all position encodings, sorted."""
    return tuple(_METHODS.split())


def check_start(owner: str, start: object, current_length: int | None) -> None:
    """Check `start`, and that `current_length` is given only where it has an effect.

    Raises:
        RopeExtendError: names `owner` and what was given.
    """
    if start not in STARTS:
        raise RopeExtendError(f"{owner}: start must be {PRETRAINED!r} or {CURRENT!r}, got {start!r}")
    if start == PRETRAINED and current_length is not None:
        raise RopeExtendError(
            f"{owner}: current_length is the window of the model's present table, and start={PRETRAINED!r} "
            f"replaces that table; set start={CURRENT!r}, or leave current_length out"
        )


def unknown_method(name: object, known: Collection[str]) -> RopeExtendError:
    """The error for a name that no encoding has; it names the nearest of the known ones."""
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return RopeExtendError(f"no encoding is named {name!r}.{hint} Known: {', '.join(sorted(known))}")


def encoding_file(name: str) -> Path | None:
    """The file of a saved encoding, if `name` is its path or that of its directory; None for other names.

    Raises:
        RopeExtendError: the name is a path, and there is no such file.
    """
    path = Path(expand_home(name))
    file = path if path.suffix == ".json" else path / ENCODING_FILE
    try:
        if file.is_file():
            return file
    except (OSError, ValueError):  # a name that no file can have
        return None
    if "(" not in name and (path.suffix == ".json" or len(path.parts) > 1 or path.is_absolute()):
        raise RopeExtendError(
            f"no saved encoding at {name!r}: there is no file {str(file)!r}; give the directory of a search "
            "(`rope-extend search`), or the name of a method"
        )
    return None


def parse_method(text: str) -> tuple[list[str], dict[str, str]]:
    """The names in `resonance(yarn(critical=17))`, the outermost first, and the text of each parameter.

    Parameters stand behind the innermost name. A path may have spaces, and it may stand for a name.

    Raises:
        RopeExtendError: a bracket is not closed, a parameter has no value, or it is given twice.
    """
    if encoding_file(text) is not None:
        return [text], {}
    values: dict[str, str] = {}
    match = re.fullmatch(r"(?P<names>[^=]*\w)\s*\((?P<parameters>[^()]*=[^()]*)\)(?P<rest>[\s)]*)", text)
    if match is not None:
        pairs = [part.partition("=") for part in match["parameters"].split(",")]
        values = {key.strip(): value.strip() for key, _, value in pairs}
        if len(values) != len(pairs) or not all(key and value for key, value in values.items()):
            raise RopeExtendError(
                "the parameters of a method are pairs such as yarn(critical=17), each given once; "
                f"got {text!r}"
            )
        text = match["names"] + match["rest"]
    names = [part.strip() for part in text.split("(")]
    innermost = names[-1].rstrip(") ")
    closed = names[-1][len(innermost) :].count(")")
    if closed != len(names) - 1:
        raise RopeExtendError(
            f"{text}: {len(names) - 1} opening brackets need as many closing ones at the end"
        )
    return [*names[:-1], innermost], values


def check_method_name(name: str) -> None:
    """Refuse a method, or a composition such as `resonance(yarn)`, that contains an unknown name.

    A path must be that of a saved encoding.

    Once `rope_extend.encodings` is imported, its registry is asked instead of this function: other packages
    may have added encodings.

    Raises:
        RopeExtendError: an unknown name.
    """
    if name in method_names():
        return
    names, _ = parse_method(name)
    if "rope_extend.encodings" in sys.modules:
        return
    for part in names:
        if part not in method_names() and not encoding_file(part):
            raise unknown_method(part, method_names())
