"""Closed forms as candidates: the seeds of every strategy, and what its result is compared with."""

from __future__ import annotations

import itertools
import math

from rope_extend.encodings import NTK, Linear, Llama3, RopeEncoding, YaRN
from rope_extend.encodings.core.critical import critical_range
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


def yarn_attention_factor(space: Space) -> float:
    """The attention factor of YaRN, `0.1 ln s + 1`."""
    return YaRN(space.factor).attention_factor(space.shape)


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


def published(space: Space) -> dict[str, Table]:
    """The closed forms as published, by name, each with its own attention factor.

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
        name: space.of_encoding(encoding, encoding.attention_factor(space.shape))
        for name, encoding in encodings.items()
    }


def with_moved_critical_pair(space: Space) -> dict[str, Table]:
    """YaRN and NTK with up to four critical pairs each, with YaRN's attention factor (2502.20082).

    None for short texts.
    """
    if space.long is not None:
        return {}
    first, last = critical_range(space.shape)
    indices = sorted({round(first + (last - first) * n / 3) for n in range(4)})
    tables: dict[str, Table] = {}
    for name, cls in (("ntk", NTK), ("yarn", YaRN)):
        for index in indices:
            encoding = cls(space.factor, critical=index)
            try:
                tables[f"{name}(critical={index})"] = space.of_encoding(
                    encoding, yarn_attention_factor(space)
                )
            except RopeExtendError:  # not above the start of YaRN's ramp, or the model has no such pair
                continue
    return tables


def closed_forms(config: SearchConfig, space: Space) -> list[Table]:
    """The closed forms, as published and with a moved critical pair, with the settings' attention factor."""
    tables = [*published(space).values(), *with_moved_critical_pair(space).values()]
    if config.attention_factor is not None:
        tables = [space.table(table.divisors, config.attention_factor) for table in tables]
    return list(dict.fromkeys(tables))
