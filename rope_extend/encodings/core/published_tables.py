"""Tables of divisors that were published, by name; `published_tables.json` has their numbers.

The names are those of the files they come from. All belong to fine-tuned checkpoints. Untrained models
need other divisors, which `rope-extend search` finds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.units import format_length

LONG, SHORT = "long_factor", "short_factor"
"""The parameters of `longrope` that tables are for."""


@dataclass(frozen=True)
class PublishedTable:
    """A published table.

    Attributes:
        name: its name in the source.
        model: the model that it was searched for.
        shape: the rotary shape of that model, as pretrained.
        parameter: the parameter of `longrope` that it is for, `long_factor` or `short_factor`.
        length: the length of the texts that it was searched for, in tokens.
        target_length: the window of the checkpoint that it belongs to, in tokens.
        source: where it was published.
        licence: the licence of the source.
        note: what a user must know of it; empty if nothing.
        divisors: the divisor of each channel pair, the fastest first.
    """

    name: str
    model: str
    shape: RopeShape
    parameter: str
    length: int
    target_length: int
    source: str
    licence: str
    note: str
    divisors: tuple[float, ...]


def _read() -> dict[str, PublishedTable]:
    tables = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for table in tables:
        table |= {"shape": RopeShape(**table["shape"]), "divisors": tuple(table["divisors"])}
    return {table["name"]: PublishedTable(**table) for table in tables}


PUBLISHED_TABLES = _read()
"""All tables by name."""


def published_divisors(name: str, parameter: str, shape: RopeShape, target_length: int) -> tuple[float, ...]:
    """The divisors of a published table, for a model and a window.

    Raises:
        RopeExtendError: no such table, or it belongs to another parameter, model or window.
    """
    table = PUBLISHED_TABLES.get(name)
    if table is None:
        raise RopeExtendError(
            f"longrope: {parameter} must be a list of numbers, or the name of a published table; got "
            f"{name!r}. Tables: {', '.join(PUBLISHED_TABLES)}"
        )
    wrong = ""
    if parameter != table.parameter:
        wrong = f"is a {table.parameter}, not a {parameter}"
    elif shape != table.shape:
        wrong = f"is for {table.model}, {table.shape}, and this model has {shape}"
    elif parameter == SHORT and table.length != shape.trained_length:
        wrong = f"is for texts up to {format_length(table.length)}, beyond the trained window"
    elif target_length != table.target_length:
        wrong = f"is for {format_length(table.target_length)} tokens, got {format_length(target_length)}"
    if wrong:
        raise RopeExtendError(f"longrope: the table {name} {wrong}; search one with `rope-extend search`")
    return table.divisors
