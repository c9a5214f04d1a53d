"""The encodings that are not rotary: one row each, with the paper's formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rope_extend.encodings import Encoding, encoding, encoding_class

Dense = Callable[[Mapping[str, Tensor], int, Tensor, Tensor, int], Tensor]
"""`(learned, heads, distance [...], query position [...], trained length) -> bias [heads, ...]`, float64."""


Vectors = Callable[[Mapping[str, Tensor], int, list[int]], Tensor]
"""`(learned, hidden size, positions) -> vectors [positions, hidden size]`, float64."""


@dataclass(frozen=True)
class AlternativeCase:
    """One encoding that is not rotary: its parameters, and its formula in float64."""

    name: str
    dense: Dense | None = None
    """The bias, if it depends on positions alone. A bias that depends on the query has its own test."""
    vectors: Vectors | None = None
    """The vectors that are added to embeddings."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def kind(self) -> type[Encoding]:
        """The encoding's class."""
        return encoding_class(self.name)

    def build(self) -> Encoding:
        """The encoding."""
        return encoding(self.name, **self.parameters)

    def __str__(self) -> str:
        return self.label or self.name


def by_head(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None, None]


def alibi(learned: Mapping[str, Tensor], heads: int, r: Tensor, i: Tensor, trained: int) -> Tensor:
    """2108.12409, and the recursion of its code for numbers of heads that are no power of two."""

    def slopes(n: int) -> list[float]:
        if math.log2(n).is_integer():
            return [2 ** (-8 * (h + 1) / n) for h in range(n)]
        near = 2 ** math.floor(math.log2(n))
        return slopes(near) + slopes(2 * near)[0::2][: n - near]

    return -by_head(slopes(heads)) * r


def t5(buckets: int, furthest: int) -> Dense:
    """1910.10683, for keys before the query."""

    def bucket(r: float) -> int:
        half = buckets // 2
        if r < half:
            return int(r)
        return min(buckets - 1, half + int(math.log(r / half) / math.log(furthest / half) * (buckets - half)))

    def dense(learned: Mapping[str, Tensor], heads: int, r: Tensor, i: Tensor, trained: int) -> Tensor:
        which = {value: bucket(value) for value in r.unique().tolist()}
        index = torch.tensor([which[value] for value in r.flatten().tolist()])
        return learned["table"][index].T.view(heads, *r.shape)

    return dense


def kerple_log(learned: Mapping[str, Tensor], heads: int, r: Tensor, i: Tensor, trained: int) -> Tensor:
    """2205.09921, with the exponentials of the learned parameters."""
    one, two = (torch.exp(learned[name]).view(-1, *[1] * r.dim()) for name in ("r1", "r2"))
    return -one * torch.log(1 + two * r)


def kerple_power(learned: Mapping[str, Tensor], heads: int, r: Tensor, i: Tensor, trained: int) -> Tensor:
    """2205.09921, with an exponent between 0 and 2."""
    one, two = (learned[name].view(-1, *[1] * r.dim()) for name in ("r1", "r2"))
    exponent = 2 / (1 + torch.exp(-two))
    # Zero to any power is 0, but torch has no derivative for it.
    return -torch.exp(one) * torch.where(r > 0, torch.exp(exponent * torch.log(r.clamp(min=1))), 0.0)


def fire(learned: Mapping[str, Tensor], heads: int, r: Tensor, i: Tensor, trained: int) -> Tensor:
    """The listing in the appendix of 2310.04418."""
    threshold = torch.abs(learned["share"] * trained)
    normaliser = torch.log(torch.abs(learned["c"] * torch.maximum(i, threshold)) + 1) + 1e-6
    x = torch.log(torch.abs(learned["c"] * r) + 1) / normaliser
    hidden = torch.relu(x[..., None] * learned["weight1"] + learned["bias1"])
    out = torch.einsum("...w,hw->h...", hidden, learned["weight2"])
    return out + learned["bias2"].view(-1, *[1] * r.dim())


def sandwich(dim: int) -> Dense:
    """The listing in 2212.10356: inner products of sinusoidal vectors, over `8h/H`."""

    def dense(learned: Mapping[str, Tensor], heads: int, r: Tensor, i: Tensor, trained: int) -> Tensor:
        k = torch.arange(dim // 2, dtype=torch.float64)

        def vectors(p: Tensor) -> Tensor:
            angles = p[..., None] / 10_000 ** (2 * k / dim)
            return torch.cat([angles.sin(), angles.cos()], dim=-1)

        total = (vectors(i + 0 * r) * vectors(i - r)).sum(dim=-1) - dim / 2
        return total / by_head([8 * (h + 1) / heads for h in range(heads)])

    return dense


def sinusoidal(scale: float, base: float) -> Vectors:
    """1706.03762, section 3.5."""

    def vectors(learned: Mapping[str, Tensor], hidden: int, positions: list[int]) -> Tensor:
        def channel(p: int, c: int) -> float:
            angle = p / base ** ((c - c % 2) / hidden)
            return scale * (math.cos(angle) if c % 2 else math.sin(angle))

        return torch.tensor([[channel(p, c) for c in range(hidden)] for p in positions], dtype=torch.float64)

    return vectors


def table_rows(learned: Mapping[str, Tensor], hidden: int, positions: list[int]) -> Tensor:
    """Row p of the table, continued by the fresh rows."""
    rows = [*learned["table"], *learned.get("fresh", ())]
    return torch.stack([rows[p] for p in positions])


def tiled(learned: Mapping[str, Tensor], hidden: int, positions: list[int]) -> Tensor:
    return torch.stack([learned["table"][p % len(learned["table"])] for p in positions])


def interpolated(length: int) -> Vectors:
    """Rows spread evenly, so that the last row is at the last position."""

    def vectors(learned: Mapping[str, Tensor], hidden: int, positions: list[int]) -> Tensor:
        table, made = learned["table"], []
        for p in positions:
            low, share = divmod(p * (len(table) - 1), length - 1)
            high = min(low + 1, len(table) - 1)
            made.append(table[low] + (table[high] - table[low]) * share / (length - 1))
        return torch.stack(made)

    return vectors


ALTERNATIVES = [
    AlternativeCase("alibi", alibi),
    AlternativeCase("t5_bias", t5(32, 128)),
    AlternativeCase(
        "t5_bias", t5(8, 20), parameters={"buckets": 8, "max_distance": 20}, label="t5_bias-narrow"
    ),
    AlternativeCase("kerple", kerple_log),
    AlternativeCase("kerple", kerple_log, parameters={"per_layer": False}, label="kerple-shared"),
    AlternativeCase("kerple", kerple_power, parameters={"kernel": "power"}, label="kerple-power"),
    AlternativeCase("fire", fire),
    AlternativeCase("fire", fire, parameters={"width": 8, "per_layer": False}, label="fire-shared"),
    AlternativeCase("sandwich", sandwich(128)),
    AlternativeCase("sandwich", sandwich(16), parameters={"dim": 16}, label="sandwich-16"),
    AlternativeCase("linear_attention"),
    AlternativeCase("shaw"),
    AlternativeCase("shaw", parameters={"reach": 5}, label="shaw-near"),
    AlternativeCase("sinusoidal", vectors=sinusoidal(1.0, 10_000.0)),
    AlternativeCase(
        "sinusoidal",
        vectors=sinusoidal(0.3, 500.0),
        parameters={"scale": 0.3, "base": 500.0},
        label="sinusoidal-scaled",
    ),
    AlternativeCase("learned", vectors=table_rows, parameters={"rows": 300}),
    AlternativeCase("learned", vectors=tiled, parameters={"beyond": "tile"}, label="learned-tile"),
    AlternativeCase(
        "learned",
        vectors=interpolated(300),
        parameters={"beyond": "interpolate", "length": 300},
        label="learned-interpolate",
    ),
    AlternativeCase(
        "learned", vectors=table_rows, parameters={"beyond": "fresh", "length": 300}, label="learned-fresh"
    ),
]
"""The encodings that are not rotary."""
