"""Closed forms as candidates: the seeds of every strategy, and what its result is compared with."""

from __future__ import annotations

import itertools
import math
from contextlib import suppress

from rope_extend.encodings import NTK, Linear, Llama3, RopeEncoding, YaRN, critical_range
from rope_extend.errors import RopeExtendError
from rope_extend.models.current_table import divisors_of
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.space import Space, Table

AS_IT_IS = "as it is"
"""In a search for short texts, the row of what the model has for them now."""


def longrope_attention_factor(config: SearchConfig, space: Space) -> float:
    """The attention factor of LongRoPE, `sqrt(1 + ln s / ln L)`, or the one of the settings."""
    if space.long is not None:
        return space.long.attention_factor
    if config.attention_factor is not None:
        return config.attention_factor
    return math.sqrt(1 + math.log(space.factor) / math.log(space.shape.trained_length))


def seeds(space: Space, attention_factor: float) -> list[Table]:
    """LongRoPE's seeds, position interpolation, NTK and YaRN, all with the same attention factor.

    For short texts: plain RoPE, the table of long texts, their geometric mean, and the model's short list, if
    it has one; each as near as the space has it.
    """
    if space.long is not None:
        divisors = divisors_of(space.long.shape.inv_freq(), space.shape)
        lists = [[divisor**power for divisor in divisors] for power in (0.0, 0.5, 1.0)]
        lists.append(list(space.long.short or divisors))
        never_falling = (itertools.accumulate(values, max) for values in lists)
        return list(dict.fromkeys(space.table(values, attention_factor) for values in never_falling))
    factor = space.factor
    encodings: list[RopeEncoding] = [Linear(factor), YaRN(factor)]
    if space.pairs > 1:  # NTK keeps the fastest pair, and needs another one
        encodings.insert(1, NTK(factor))
    return [space.of_encoding(encoding, attention_factor) for encoding in encodings]


def published(config: SearchConfig, space: Space) -> dict[str, Table]:
    """The closed forms as published, by name, each with its own attention factor or that of the settings.

    For short texts: what the model has for them now, plain RoPE, and the table of long texts. These are
    exact, so they may be outside the space: they are measured, and no strategy starts from them.
    """
    if space.long is not None:
        long = divisors_of(space.long.shape.inv_freq(), space.shape)
        lists = {
            AS_IT_IS: space.long.short or long,
            "none": (1.0,) * space.pairs,
            "table of long texts": long,
        }
        factor = round(space.long.attention_factor, 4)  # as that of every candidate
        return {name: Table(divisors, 0, factor) for name, divisors in lists.items()}
    encodings: dict[str, RopeEncoding] = {"linear": Linear(space.factor), "yarn": YaRN(space.factor)}
    if space.pairs > 1:
        encodings["ntk"] = NTK(space.factor)
    encodings["llama3"] = Llama3(space.factor)
    return {
        name: space.of_encoding(encoding, config.attention_factor or encoding.attention_factor(space.shape))
        for name, encoding in encodings.items()
    }


def with_moved_critical_pair(config: SearchConfig, space: Space) -> list[Table]:
    """YaRN and NTK with up to four critical pairs each, with YaRN's attention factor (2502.20082)."""
    first, last = critical_range(space.shape)
    factor = config.attention_factor or YaRN(space.factor).attention_factor(space.shape)
    tables = []
    for index in sorted({round(first + (last - first) * n / 3) for n in range(4)}):
        for cls in (NTK, YaRN):
            # YaRN's must be above the start of its ramp, and the model must have the pair.
            with suppress(RopeExtendError):
                tables.append(space.of_encoding(cls(space.factor, critical=index), factor))
    return tables


def closed_forms(config: SearchConfig, space: Space) -> list[Table]:
    """What the race starts from: the closed forms, as published and with a moved critical pair.

    For short texts: `seeds`.
    """
    if space.long is not None:
        return seeds(space, space.long.attention_factor)
    tables = [*published(config, space).values(), *with_moved_critical_pair(config, space)]
    return list(dict.fromkeys(tables))
