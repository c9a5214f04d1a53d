"""Shaw's relative embeddings: a learned vector for each distance, added to keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.alternatives import RelativeEncoding
from rope_extend.encodings.core.checks import check_length
from rope_extend.encodings.core.shapes import ModelShape


@dataclass(frozen=True)
class Shaw(RelativeEncoding):
    """Shaw's relative embeddings: a learned vector for each distance is added to keys.

    Attributes:
        reach: the distance in tokens from which all distances share one vector.
        values: whether vectors are added to values too. This is slower, because attention weights then have
            to be computed explicitly.
        per_layer: whether each layer has its own vectors, as in the paper.
    """

    reach: int = 16
    values: bool = False
    per_layer: bool = True

    name: ClassVar[str] = "shaw"
    paper: ClassVar[str] = "1803.02155"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "reach", check_length(self.name, "reach", self.reach))

    def initial(self, shape: ModelShape) -> dict[str, Tensor]:
        """`key_vectors` `[reach + 1, head_dim]` and `value_vectors` `[reach + 1, value_dim]`, by distance.

        Key vectors start random, from a fixed seed, with a standard deviation of `head_dim^(-1/2)`. Value
        vectors start at 0.
        """
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(self.reach + 1, shape.head_dim, generator=generator) * shape.head_dim**-0.5
        return {"key_vectors": keys} | (
            {"value_vectors": torch.zeros(self.reach + 1, shape.value_dim)} if self.values else {}
        )

    def ranges(self, distance: Tensor) -> Tensor:
        """`min(r, reach)`, int64 `[...]`."""
        return distance.clamp(max=self.reach)

    def key_vectors(self, learned: Mapping[str, Tensor]) -> Tensor:
        """`[reach + 1, head_dim]`."""
        return learned["key_vectors"]

    def value_vectors(self, learned: Mapping[str, Tensor]) -> Tensor | None:
        """`[reach + 1, value_dim]`, or None without `values`."""
        return learned.get("value_vectors")
