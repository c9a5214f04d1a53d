"""Which pairs of a family and a method each check of the matrix uses.

The full product has 111 families x 52 methods for each of ten checks. It runs only with `pytest --full`. The
default run uses a covering design instead:

- each family with one static, one length-dependent and one composed rotary method, one bias and one absolute
  encoding: one family takes the first of each kind, the next family the second, and so on;
- each method with the eight families of `SHAPES`, one for each way in which a family may differ. If several
  cases are of one method, they take turns.

A cheap check uses all of these pairs. An expensive one uses one rotary method or one alternative in a family:
which one depends on its `turn`. A method that no family took is checked in one of the eight shapes. So each
family and each method keeps at least one row of every check.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from cases import FAMILIES, AlternativeCase, EncodingCase, FamilyCase

from rope_extend.encodings import ComposedRope, RopeShape

SHAPES = ("deepseek_v2", "gemma3_text", "glm", "gpt_neox", "gpt_oss", "llama", "phi3", "qwen3")
"""One family of each shape, in this order: complex numbers for the last channels; a table for each kind of
layer; neighbouring pairs; some of the channels; one value for each pair, and attention sinks; plain; a config
class that refuses most `rope_type`s; normalised queries and keys."""

QUIRKS = (
    ("dots3_note_text", "longrope"),
    ("gemma4_text", "linear"),
    ("gemma4_text", "yarn"),
    ("phimoe", "longrope"),
    ("phimoe", "yarn"),
)
"""Pairs on both sides of what a family's own config class can carry."""

Case = EncodingCase | AlternativeCase

REMAP = "remap"
"""The kind of methods that change positions: `test_remaps.py` has one of them for each family."""


@dataclass
class Options:
    """What the command line asks for; set by `conftest.pytest_configure` before test modules are imported."""

    full: bool = False


OPTIONS = Options()


def kind(case: Case) -> str:
    """What a family has one method of."""
    if isinstance(case, AlternativeCase):
        return "bias" if case.vectors is None else "absolute"
    method = case.build(RopeShape(16, 10_000.0, 32))
    if method.remaps:
        return REMAP
    if method.depends_on_length:
        return "length-dependent"
    return "composed" if isinstance(method, ComposedRope) else "static"


def covering(
    cases: Sequence[Case], turn: int | None = None, always: str | None = None
) -> set[tuple[str, str]]:
    """The pairs of a family's name and a method's that a check uses.

    `cases` is ENCODINGS, ALTERNATIVES or a part of one of them. `turn` is None for a cheap check, which uses
    all pairs of the design; an expensive check gives a number. It uses one kind of method in each family: the
    kind `always`, or each kind in turn.
    """
    kinds: dict[str, list[str]] = {}
    for case in cases:
        if kind(case) != REMAP:
            kinds.setdefault(kind(case), []).append(str(case))
    names = {str(case) for case in cases}
    pairs = {(family, method) for family, method in QUIRKS if method in names}
    for index, family in enumerate(FAMILIES):
        chosen = {each: methods[index % len(methods)] for each, methods in kinds.items()}
        if turn is None:
            pairs |= {(str(family), method) for method in chosen.values()}
        else:
            pairs.add((str(family), chosen[always or list(kinds)[(index + turn) % len(kinds)]]))
    taken = {method for _, method in pairs}
    if turn is None:
        methods: dict[str, list[Case]] = {}
        for case in cases:
            methods.setdefault(case.name, []).append(case)
        for alike in methods.values():
            pairs |= {(shape, str(alike[index % len(alike)])) for index, shape in enumerate(SHAPES)}
        taken = {method for _, method in pairs}
    for index, case in enumerate(cases):
        if str(case) not in taken:
            pairs.add((SHAPES[(index + (turn or 0)) % len(SHAPES)], str(case)))
    return pairs


def families(values: Sequence[FamilyCase] = FAMILIES) -> list[Any]:
    """Families as parameters, for an expensive check: those that are not in `SHAPES` are marked `slow`."""
    return [
        pytest.param(value, id=str(value), marks=[] if str(value) in SHAPES else [pytest.mark.slow])
        for value in values
    ]


def in_families(
    cases: Sequence[Case], turn: int | None = None, always: str | None = None, *, few: bool = False
) -> pytest.MarkDecorator:
    """Parametrise `family` and `case` by the covering design; the other pairs are marked `full`.

    With `few`, for checks that save and load models, the default run keeps of the design the families of
    `SHAPES` and one family for each method; the other families are marked `slow`.
    """
    chosen = covering(cases, turn, always)
    parameters: list[Any] = []
    kept: set[str] = set()
    for family in FAMILIES:
        for case in cases:
            extra = (str(family), str(case)) not in chosen
            if not extra or OPTIONS.full:
                marks = [pytest.mark.full] if extra else []
                if few and not extra:
                    if str(family) not in SHAPES and str(case) in kept:
                        marks = [pytest.mark.slow]
                    kept.add(str(case))
                parameters.append(pytest.param(family, case, id=f"{family}-{case}", marks=marks))
    return pytest.mark.parametrize(("family", "case"), parameters)


def by_method(
    cases: Sequence[Case],
    names: Sequence[str] = (),
    values: Sequence[tuple[Any, ...]] = ((),),
    turn: int = 0,
    every: int = 1,
) -> pytest.MarkDecorator:
    """Parametrise `case`, and other arguments with it, for an expensive check.

    Each method has a row for each of the values. If several cases are of one method, they take turns, from
    the case `turn` on; the other rows are marked `full`. By default a method has a row for one in `every`
    values, and the next method begins with another value; the other rows are marked `slow`.
    """
    methods: dict[str, list[Case]] = {}
    for case in cases:
        methods.setdefault(case.name, []).append(case)
    parameters: list[Any] = []
    for index, value in enumerate(values):
        for place, alike in enumerate(methods.values()):
            for number, case in enumerate(alike):
                extra = number != (index + turn) % len(alike)
                if not extra or OPTIONS.full:
                    marks = (
                        [pytest.mark.full] if extra else [pytest.mark.slow] * ((index + place) % every > 0)
                    )
                    parameters.append(pytest.param(case, *value, marks=marks))
    return pytest.mark.parametrize(("case", *names), parameters, ids=str)


def few(values: Iterable[Any], every: int, first: int = 0) -> list[Any]:
    """Parameters of which the default run uses every n-th, from `first` on; the others are marked `slow`.

    A tuple is several arguments, as in `pytest.mark.parametrize`.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if index % every == first else [pytest.mark.slow],
        )
        for index, value in enumerate(values)
    ]
