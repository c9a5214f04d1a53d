"""Encodings that replace RoPE."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.core.encoding import Encoding
from rope_extend.encodings.core.shapes import ModelShape, RopeShape

LearnedValues = Mapping[str, Tensor]
"""The learned parameters of an encoding, float32, by the names of `initial`."""


class BiasEncoding(Encoding):
    """A bias on the attention logits, as in ALiBi and T5; queries and keys are not rotated.

    The logits keep the model's own scale. The bias is added to the scaled logits.
    """

    replaces_rotation = True
    by_distance: ClassVar[bool] = True
    """Whether the bias depends on the distance alone."""

    @abstractmethod
    def bias(self, shape: ModelShape, distance: Tensor, query: Tensor, learned: LearnedValues) -> Tensor:
        """The bias on the logit of a query and a key, `[heads, ...]` float32.

        `distance` `[...]` is the number of whole tokens from a key to a later query, at least 0. `query` is
        the position of that query, of a shape that broadcasts to `distance`. `learned` holds the learned
        parameters, float32, by the names of `initial`.
        """


class AbsoluteEncoding(Encoding):
    """Vectors added to the token embeddings, by position; queries and keys are not rotated."""

    replaces_rotation = True

    def why_not_one_table(self, shape: RopeShape) -> str:
        """Vectors on token embeddings."""
        return "it adds vectors to the token embeddings instead of rotating"

    @abstractmethod
    def vectors(self, shape: ModelShape, position_ids: Tensor, learned: LearnedValues) -> Tensor:
        """`[..., hidden_size]` float32 for `position_ids` `[...]`, whole tokens from 0.

        Raises:
            RopeExtendError: the encoding has no vector for a position.
        """
