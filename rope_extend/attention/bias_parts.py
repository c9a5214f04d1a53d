"""A bias on attention logits in parts, never for all queries and keys at once.

If positions have no gaps, a bias that depends on the distance alone is one table `[heads, distances]`. The
row of each query is the row of the next query, moved by one. So with queries in reverse order, the bias of
consecutive queries is a strided view of that table, without a copy. In all other cases the bias is computed
for a few dozen queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rope_extend.encodings import BiasEncoding, ModelShape, Shaw
from rope_extend.models.planned_device import device_of

PART_ELEMENTS, GPU_PART_ELEMENTS = 2**22, 2**28
"""The largest number of elements of a part, unless it would have fewer than `FEWEST` queries.

On a CPU a part should fit into its caches; a GPU needs enough queries to be busy.
"""
FEWEST, MOST, GPU_MOST = 32, 256, 2048
"""The smallest and the largest number of queries of a part."""


def rows_of_part(heads: int, keys: int, device: torch.device, *, from_table: bool = True) -> int:
    """The number of queries of a part; `from_table` if the bias is a view of a table.

    On a GPU, a bias that is computed gets a quarter, because several float32 tensors of its size exist.
    """
    elements = PART_ELEMENTS
    if device.type != "cpu":
        elements = GPU_PART_ELEMENTS if from_table else GPU_PART_ELEMENTS // 4
    return max(FEWEST, min(_most_rows(device), elements // (heads * keys)))


def in_blocks(
    attend: Callable[..., tuple[Tensor, Tensor | None]],
    blocks: Iterable[tuple[Any, ...]],
    tensors: Sequence[Tensor],
    *,
    dropout: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one block of queries after the other, each computed again for the backward pass.

    `attend` is called with a block and the `tensors`, which gradients have to reach.
    """
    recompute = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    outputs, weights = [], []
    for block in blocks:
        compute = partial(attend, *block)
        if recompute:
            output, weight = checkpoint(compute, *tensors, use_reentrant=False, preserve_rng_state=dropout)
        else:
            output, weight = compute(*tensors)
        outputs.append(output)
        if weight is not None:
            weights.append(weight)
    return torch.cat(outputs, dim=1), torch.cat(weights, dim=2) if weights else None


def _most_rows(device: torch.device) -> int:
    return MOST if device.type == "cpu" else GPU_MOST


class PartialBias:
    """The bias of one layer in one attention call, computed in parts.

    Args:
        encoding: the bias.
        shape: the sizes that the bias follows from, with the number of heads of the layer.
        heads: those of which the bias is computed.
        queries: positions `[1 or rows, Q]`; the last Q keys are those of the queries.
        keys: positions `[rows, K]`; rows is 1 or the batch size.
        gapless: whether each position is one more than the position before it.
        learned: the learned parameters; gradients reach them through `sources`.
        causal: whether the bias also excludes the keys after a query; otherwise a mask does.

    Attributes:
        sources: the tensors that parts are computed from: the table, or the learned parameters.
    """

    def __init__(
        self,
        encoding: BiasEncoding,
        shape: ModelShape,
        heads: range,
        queries: Tensor,
        keys: Tensor,
        learned: Mapping[str, Tensor],
        *,
        gapless: bool,
        causal: bool,
    ) -> None:
        self.encoding, self.shape, self.queries, self.keys = encoding, shape, queries, keys
        self.heads = slice(heads.start, heads.stop)
        self.before = keys.shape[1] - queries.shape[1]
        self.causal = causal
        self.names = tuple(learned)
        self.table = encoding.by_distance and gapless
        if not self.table:
            self.sources = tuple(learned.values())
            return
        count = keys.shape[1]
        distances = torch.arange(count - 1, -1, -1, device=keys.device)  # the nearest last
        table = encoding.bias(shape, distances, torch.zeros_like(distances), learned)[self.heads]
        # After distance 0 come the keys after the query, as many as a part or a mask can include.
        later = table[:, -1:].expand(-1, _most_rows(device_of(keys)) + (0 if causal else count))
        self.sources = (torch.cat([table, torch.full_like(later, -math.inf) if causal else later], dim=1),)

    def part(
        self, start: int, stop: int, first: int, end: int, sources: Sequence[Tensor], query: Tensor
    ) -> Tensor:
        """The bias of queries `stop - 1` down to `start`, in this order, for keys `first` to `end`.

        Args:
            sources: `sources` of this object, or tensors of the same values that gradients have to reach.
            query: the scaled queries in the same order, `[batch, heads, stop - start, head_dim]`.

        Returns:
            `[rows, heads, stop - start, end - first]` float32.
        """
        if self.table:
            (table,) = sources
            farthest = self.before + stop - 1 - first
            skipped = self.keys.shape[1] - 1 - farthest
            window = table[:, skipped : skipped + (stop - start) + (end - first) - 1]
            return window.unfold(1, end - first, 1)[None]
        queries = self.queries[:, start:stop].flip(1)[:, :, None]
        distance = (queries - self.keys[:, None, first:end]).clamp(min=0)
        learned = dict(zip(self.names, sources, strict=True))
        if isinstance(self.encoding, Shaw):
            bias = self.encoding.bias_of(query, distance, learned)
        else:
            bias = self.encoding.bias(self.shape, distance, queries, learned)[self.heads].movedim(0, 1)
        if not self.causal:
            return bias
        keys = torch.arange(first, end, device=bias.device)
        last_key = self.before + torch.arange(stop - 1, start - 1, -1, device=bias.device)
        return bias.masked_fill(keys > last_key[:, None], -math.inf)
