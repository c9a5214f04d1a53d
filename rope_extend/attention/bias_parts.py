"""A bias of attention in parts: never for all queries and keys at once, and where it can, as a view.

Where positions follow each other without a gap, a bias that depends on the distance alone is one table
`[heads, distances]`: read backwards, the row of each query is the same row moved by one. So with queries in
reverse order, the bias of any run of queries is a strided view of that table, and nothing is built at all.
Elsewhere, the parts are computed, of a few dozen queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rope_extend.encodings import BiasEncoding, ModelShape, RelativeEncoding

PART_ELEMENTS = 2**22
"""How many numbers a part of a bias may hold; so long as that leaves it `FEWEST` queries."""
FEWEST, MOST = 32, 256
"""Queries of a part."""


@dataclass(frozen=True)
class Places:
    """Where the queries and keys of one call of attention stand.

    Attributes:
        queries: positions `[rows, Q]`, where rows is 1 or the batch.
        keys: positions `[rows, K]` of the keys that are handed over, the queries' own last.
        gapless: whether each position is one after the position before it.
        last: the greatest position of a query.
        farthest: the greatest distance from a query to a key, in any row.
    """

    queries: Tensor
    keys: Tensor
    gapless: bool
    last: int
    farthest: int

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, device: torch.device) -> Places:
        """From positions, `[1 or batch, Q]` and `[1 or batch, K]`, that may be on another device."""
        rows = max(len(queries), len(keys))
        return cls(
            queries.to(device).expand(rows, -1),
            keys.to(device).expand(rows, -1),
            bool((keys.diff() == 1).all()),
            int(queries.max()),
            int((queries.amax(dim=1) - keys.amin(dim=1)).max()),
        )

    @property
    def before(self) -> int:
        """How many keys come before the first query's own."""
        return self.keys.shape[1] - self.queries.shape[1]


def rows_of_part(heads: int, keys: int) -> int:
    """How many queries make a part."""
    return max(FEWEST, min(MOST, PART_ELEMENTS // (heads * keys)))


class PartialBias:
    """The bias of one layer in one call of attention, handed out in parts.

    Args:
        encoding: what the bias is.
        shape: the numbers it follows from, with as many heads as the layer has.
        places: where queries and keys stand.
        learned: the learned parameters; gradients reach them through `sources`.
        causal: whether keys after a query are shut out here; otherwise a mask does.
        share: of the bias that acts, and of vectors on values; less than 1 while a model is annealed to it.

    Attributes:
        sources: the tensors that parts are made from, the table or the learned parameters.
        weighs: whether the weights of attention are asked for, see `values`.
    """

    def __init__(
        self,
        encoding: BiasEncoding,
        shape: ModelShape,
        places: Places,
        learned: Mapping[str, Tensor],
        *,
        causal: bool,
        share: float = 1.0,
    ) -> None:
        self.encoding = encoding
        self.shape = shape
        self.places = places
        self.causal = causal
        self.share = share
        self.names = tuple(learned)
        self.table = self.weighs = False
        if isinstance(encoding, RelativeEncoding):
            self.weighs = encoding.of_values(learned) is not None
            self.sources = tuple(learned.values())
            return
        device, keys = places.keys.device, places.keys.shape[1]
        self.table = places.last <= encoding.same_until(shape, learned) and (
            places.gapless or places.farthest < 4 * keys
        )
        if not self.table:
            self.sources = tuple(learned.values())
            return
        longest = keys if places.gapless else places.farthest + 1
        distances = torch.arange(longest - 1, -1, -1, device=device)  # the nearest last
        table = self._shared(encoding.bias(shape, distances, torch.zeros_like(distances), learned))
        if places.gapless:
            # Behind the nearest there are keys after the query: as far as a part reaches, or a mask lets it.
            later = table[:, -1:].expand(-1, MOST + (0 if causal else keys))
            table = torch.cat([table, torch.full_like(later, -math.inf) if causal else later], dim=1)
        self.sources = (table,)

    def part(
        self, start: int, stop: int, first: int, end: int, sources: Sequence[Tensor], query: Tensor
    ) -> Tensor:
        """The bias of queries `stop - 1` down to `start`, in this order, and keys `first` to `end`.

        `[rows, heads, stop - start, end - first]` float32. `sources` are those of this object, or tensors of
        their values that gradients shall reach; `query` are the scaled queries, in the same order,
        `[batch, heads, stop - start, head_dim]`.
        """
        places = self.places
        if self.table and places.gapless:
            (table,) = sources
            farthest = places.before + stop - 1 - first
            skipped = places.keys.shape[1] - 1 - farthest
            window = table[:, skipped : skipped + (stop - start) + (end - first) - 1]
            return window.unfold(1, end - first, 1)[None]
        queries = places.queries[:, start:stop].flip(1)[:, :, None]
        distance = queries - places.keys[:, None, first:end]
        if isinstance(self.encoding, RelativeEncoding):
            vectors = self.encoding.of_keys(self._learned(sources))
            index = self._ranges(start, stop, first, end)
            bias = self._shared(query.float() @ vectors.T).gather(-1, index.expand(*query.shape[:3], -1))
        elif self.table:
            (table,) = sources
            index = table.shape[1] - 1 - distance.clamp(min=0)
            bias = functional.embedding(index, table.T).movedim(-1, 1)
        else:
            learned = self._learned(sources)
            bias = self.encoding.bias(self.shape, distance.clamp(min=0), queries, learned)
            bias = self._shared(bias).movedim(0, 1)
        if not self.causal:
            return bias
        slots = torch.arange(first, end, device=bias.device)
        own = torch.arange(places.before + stop - 1, places.before + start - 1, -1, device=bias.device)
        return bias.masked_fill(slots > own[:, None], -math.inf)

    def values(
        self, start: int, stop: int, first: int, end: int, sources: Sequence[Tensor], weights: Tensor
    ) -> Tensor:
        """What vectors on values add to the output of queries `stop - 1` down to `start`.

        `weights` `[batch, heads, stop - start, end - first]` are those of attention; gives
        `[batch, heads, stop - start, value_dim]`.
        """
        assert isinstance(self.encoding, RelativeEncoding)
        vectors = self.encoding.of_values(self._learned(sources))
        assert vectors is not None
        index = self._ranges(start, stop, first, end).expand_as(weights)
        shares = weights.new_zeros(*weights.shape[:3], len(vectors)).scatter_add(-1, index, weights)
        return shares @ self._shared(vectors).to(shares.dtype)

    def _shared(self, values: Tensor) -> Tensor:
        return values if self.share == 1 else self.share * values

    def _ranges(self, start: int, stop: int, first: int, end: int) -> Tensor:
        """`[rows, 1, stop - start, end - first]`, the range of each distance."""
        assert isinstance(self.encoding, RelativeEncoding)
        queries = self.places.queries[:, start:stop].flip(1)[:, :, None]
        return self.encoding.ranges((queries - self.places.keys[:, None, first:end]).clamp(min=0))[:, None]

    def _learned(self, sources: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.names, sources, strict=True))
