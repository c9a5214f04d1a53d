"""Which pairs of a family and a method each check of the matrix uses: a covering design.

- Each family has one static, one length-dependent and one composed rotary method, one that changes positions,
  one bias and one absolute encoding: one family takes the first of each kind, the next the second, and so on.
- Each method has the eight families of `SHAPES`, one for each way in which a family may differ. If several
  cases are of one method, they take turns.

A cheap check uses all of these pairs. An expensive one uses one kind in a family, and each method once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
    ("falcon_h1", "linear_attention"),
    ("gemma4_text", "linear"),
    ("gemma4_text", "yarn"),
    ("phimoe", "longrope"),
    ("phimoe", "yarn"),
    ("zaya", "linear_attention"),
)
"""Pairs on both sides of what a family's own config class, or its cache, can carry."""

Case = EncodingCase | AlternativeCase


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
        return "remap"
    if method.depends_on_length:
        return "length-dependent"
    return "composed" if isinstance(method, ComposedRope) else "static"


def in_families(
    cases: Sequence[Case], turn: int | None = None, turns: Sequence[str] = (), *, few: bool = False
) -> pytest.MarkDecorator:
    """Parametrise `family` and `case` by the covering design.

    `turn` is None for a cheap check; an expensive one gives a number. It uses one kind of method in each
    family, of `turns` or of all kinds, in turn. With `few`, for checks that save models, the default run has
    the families of `SHAPES` and each method once; the other families are marked `slow`.
    """
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(kind(case), []).append(case)
    pairs = {pair for pair in QUIRKS if pair[1] in map(str, cases)}
    for index, family in enumerate(FAMILIES):
        each_in_turn = list(turns or kinds)
        chosen = list(kinds) if turn is None else [each_in_turn[(index + turn) % len(each_in_turn)]]
        pairs |= {(str(family), str(kinds[each][index % len(kinds[each])])) for each in chosen}
    if turn is None:
        methods: dict[str, list[Case]] = {}
        for case in cases:
            methods.setdefault(case.name, []).append(case)
        for alike in methods.values():
            pairs |= {(shape, str(alike[index % len(alike)])) for index, shape in enumerate(SHAPES)}
    for index, case in enumerate(cases):
        if str(case) not in {method for _, method in pairs}:
            pairs.add((SHAPES[(index + (turn or 0)) % len(SHAPES)], str(case)))
    parameters: list[Any] = []
    kept: set[str] = set()
    for family in FAMILIES:
        for case in cases:
            if (str(family), str(case)) in pairs:
                slow = few and str(family) not in SHAPES and str(case) in kept
                kept.add(str(case))
                marks = [pytest.mark.slow] * slow
                parameters.append(pytest.param(family, case, id=f"{family}-{case}", marks=marks))
    return pytest.mark.parametrize(("family", "case"), parameters)


def families(values: Sequence[FamilyCase] = FAMILIES, some: Collection[str] = SHAPES) -> list[Any]:
    """Families as parameters, for an expensive check: those that are not in `some` are marked `slow`."""
    return [
        pytest.param(value, id=str(value), marks=[pytest.mark.slow] * (str(value) not in some))
        for value in values
    ]


def few(values: Iterable[Any], every: int, first: int = 0) -> list[Any]:
    """Parameters of which the default run uses every n-th, from `first` on; the others are marked `slow`.

    A tuple is several arguments, as in `pytest.mark.parametrize`.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[pytest.mark.slow] * (index % every != first),
        )
        for index, value in enumerate(values)
    ]
