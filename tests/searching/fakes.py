"""A search without a model: losses that are a formula of the candidate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rope_extend as rx
from rope_extend.searching.evaluations import Evaluator
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.space import Space, Table

SHAPE = rx.RopeShape(32, 1e4, 256)
TARGET = 2048


def config(**values: Any) -> SearchConfig:
    """Settings for a model of `SHAPE`, which does not exist."""
    return SearchConfig(**{"model": "m/m", "target_length": TARGET, **values})


class FakeEvaluator(Evaluator):
    """Measures a formula: how far the divisors are from a table that rises from 1 to 1.2 s, and the factor.

    Every document has an offset of its own, and a small wave that depends on the candidate.
    """

    attention = 1.15
    """The best attention factor."""

    def __init__(self, settings: SearchConfig, shape: rx.RopeShape = SHAPE, file: Path | None = None) -> None:
        space = Space(shape, settings.target_length)
        super().__init__(None, [], settings, space, file=file)  # type: ignore[arg-type]
        self.asked: list[Table] = []

    def _measure(self, table: Table, group: str, numbers: Sequence[int]) -> None:
        losses = {}
        for number in numbers:
            distance = 0.0
            for pair, divisor in enumerate(table.divisors):
                goal = (1.2 * self.space.factor) ** min(1.0, max(0.0, (pair - 2) / 4))
                distance += math.log(divisor / goal) ** 2
            distance += 10 * (table.attention_factor - self.attention) ** 2
            wave = 0.01 * math.sin(1e3 * sum(table.divisors) + number)
            losses[f"{group} {number}"] = 3 + distance + number / 10 + wave
        self.asked.append(table)
        self.add(table, losses, 0.0)
