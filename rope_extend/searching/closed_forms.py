"""Closed forms as candidates: the seeds of every strategy, and what its result is compared with."""

from __future__ import annotations

import math
from contextlib import suppress

from rope_extend.encodings import NTK, Linear, Llama3, RopeEncoding, YaRN, critical_range
from rope_extend.errors import RopeExtendError
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.space import Space, Table


def longrope_attention_factor(config: SearchConfig, space: Space) -> float:
    """The attention factor of LongRoPE, `sqrt(1 + ln s / ln L)`, or the one of the settings."""
    if config.attention_factor is not None:
        return config.attention_factor
    return math.sqrt(1 + math.log(space.factor) / math.log(space.shape.trained_length))


def seeds(space: Space, attention_factor: float) -> list[Table]:
    """LongRoPE's seeds, position interpolation, NTK and YaRN, all with the same attention factor."""
    factor = space.factor
    encodings: list[RopeEncoding] = [Linear(factor), YaRN(factor)]
    if space.pairs > 1:  # NTK keeps the fastest pair, and needs another one
        encodings.insert(1, NTK(factor))
    return [space.of_encoding(encoding, attention_factor) for encoding in encodings]


def published(config: SearchConfig, space: Space) -> dict[str, Table]:
    """The closed forms as published, by name, each with its own attention factor or that of the settings."""
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
    """What the race starts from: the closed forms, as published and with a moved critical pair."""
    tables = [*published(config, space).values(), *with_moved_critical_pair(config, space)]
    return list(dict.fromkeys(tables))
