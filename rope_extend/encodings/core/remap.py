"""Encodings that give queries and keys other positions, or other frequencies, by how far apart they are.

A model that never saw distant tokens does well with near ones. So near pairs keep their distance, and distant
pairs are given one that occurred in training. Nothing is trained.

Such a method is data: the borders between regions of pairs, and for each region the positions that its
queries and keys are rotated to. `rope_extend/attention/rotation.py` computes attention for all of them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from rope_extend.checks import checked
from rope_extend.encodings.core.regions import Bands, Chunks, Region, StartAndWindow
from rope_extend.encodings.core.rope import RopeEncoding, log_n_scale
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError


class RemapEncoding(RopeEncoding):
    """A method that changes the positions of distant pairs, and needs no training.

    Frequencies are plain RoPE's. Caches hold keys as the stock model rotates them.
    """

    remaps = True

    within: ClassVar[tuple[str, ...]] = ("window",)
    """The parameters, or sums of parameters, that must not exceed the trained window."""

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """Parameters from the lengths, see the class; a parameter that is given is kept."""
        cls.check_names(parameters)
        given = checked(cls, parameters)
        built = cls.make(cls._from_lengths(shape.trained_length, target_length, given) | given)
        built.check_lengths(shape, target_length)
        return built

    @classmethod
    def _from_lengths(cls, trained: int, target: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters that follow from the lengths and from those that are given."""
        return {}

    def check_lengths(self, shape: RopeShape, target_length: int) -> None:
        """Refuse near pairs that the model was not trained for, and a text that is too long.

        Raises:
            RopeExtendError: one of these.
        """
        trained = shape.trained_length
        for names in self.within:
            value = sum(getattr(self, name) for name in names.split(" + "))
            if value > trained:
                raise RopeExtendError(
                    f"{self.name}: {names}={value} exceeds the {trained} tokens that the model was trained "
                    f"on; use {names}={trained} or less"
                )
        reach = self._reach(shape)
        if reach is not None and reach < target_length:
            raise RopeExtendError(
                f"{self} reaches {reach} tokens, not {target_length}; leave its parameters out, which then "
                f"follow from the target, or use self_extend, rerope, jet_long or dual_chunk"
            )

    def _reach(self, shape: RopeShape) -> int | None:
        """The longest text that the method is good for; None if there is no limit."""
        return self.target_length(shape)

    rotates_in_attention = True

    window: int
    log_n: bool = False

    @property
    def borders(self) -> Bands | Chunks | StartAndWindow:
        """Which pairs belong to which region; here, distances from `window` on are changed."""
        return Bands(self.window)

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """`max(1, ln(p+1) / ln L)` with `log_n`, for methods that have it."""
        return log_n_scale(shape, position_ids) if self.log_n else None

    @abstractmethod
    def regions(self, shape: RopeShape, length: int) -> tuple[Region, ...]:
        """The regions; the first is the same for all lengths, and so are all regions of most methods."""

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Plain RoPE's, `[dim/2]` float64, radians per token."""
        return shape.inv_freq()

    def target_length(self, shape: RopeShape) -> int | None:
        """The longest text with given distances below the trained length; None if there is none."""
        return None

    def is_plain(self, shape: RopeShape, lowest: int, highest: int) -> bool:
        """Whether a text with positions from `lowest` to `highest` is processed as by plain RoPE."""
        return self.borders.is_plain(lowest, highest)

    def factor_of_queries(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """The factor on a query's logits that schedules state as one on cos and sin; None for 1.

        Float64, of the shape of `position_ids` `[...]`.
        """
        return None

    def distance(self, shape: RopeShape, query: Tensor, key: Tensor) -> Tensor:
        """The distance that pairs are given, float64; NaN for pairs that do not attend.

        `query` and `key` are positions, int64, of shapes that broadcast.
        """
        both = (query - key).shape
        query, key = query.expand(both), key.expand(both)
        region, lengths = self.borders.region(query, key), self.table_length(shape, query + 1)
        given = torch.full(both, math.nan, dtype=torch.float64, device=query.device)
        for length in torch.unique(lengths).tolist():
            for index, each in enumerate(self.regions(shape, length)):
                here = (region == index) & (lengths == length)
                given[here] = each.query(query[here].double()) - each.key(key[here].double())
        return given
