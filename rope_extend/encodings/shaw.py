"""Shaw's relative embeddings: a learned vector for each distance, added to keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.base import ModelShape, RelativeEncoding, check_length


@dataclass(frozen=True)
class Shaw(RelativeEncoding):
    """Shaw's relative embeddings: each distance has a learned vector, which keys have added to them.

    Attributes:
        reach: the distance in tokens from which all share a vector.
        values: whether values have vectors too; attention weights are then computed one by one, which is
            slower.
        per_layer: whether each layer has vectors of its own, as in the paper.
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

        Those of keys are drawn from a fixed seed, with a standard deviation of `head_dim^(-1/2)`; those of
        values start at 0.
        """
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(self.reach + 1, shape.head_dim, generator=generator) * shape.head_dim**-0.5
        return {"key_vectors": drawn} | (
            {"value_vectors": torch.zeros(self.reach + 1, shape.value_dim)} if self.values else {}
        )

    def ranges(self, distance: Tensor) -> Tensor:
        """`min(r, reach)`, int64 `[...]`."""
        return distance.clamp(max=self.reach)

    def of_keys(self, learned: Mapping[str, Tensor]) -> Tensor:
        """`[reach + 1, head_dim]`."""
        return learned["key_vectors"]

    def of_values(self, learned: Mapping[str, Tensor]) -> Tensor | None:
        """`[reach + 1, value_dim]`, if values have any."""
        return learned.get("value_vectors")
