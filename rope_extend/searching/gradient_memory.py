"""The memory of a gradient step, counted on the meta device before weights are loaded."""

from __future__ import annotations

from typing import Any

import torch

from rope_extend.loss import default_chunk_bytes, next_token_loss
from rope_extend.memory.meta_device import META, DirectKernelCalls, MetaBytes, dry_run_attention
from rope_extend.models.planned_device import planned_for
from rope_extend.searching.gradient import differentiable
from rope_extend.searching.space import Space


def gradient_bytes(model: Any, space: Space, tokens: int, device: torch.device) -> int:
    """The peak of a forward and a backward pass over one document, in bytes, without the weights.

    Args:
        model: the model on the meta device.
        space: where the search looks.
        tokens: tokens of the document.
        device: where the search will run.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    counter = MetaBytes(scored=3 * max(1, default_chunk_bytes(device) // (4 * vocabulary)))
    for tensor in (*model.parameters(), *model.buffers()):
        counter.add(tensor)
    weights = counter.live
    table = torch.ones(space.pairs, dtype=torch.float64, device=META, requires_grad=True)
    factor = torch.ones((), dtype=torch.float64, device=META, requires_grad=True)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=META)
    start = space.table([1.0] * (space.pairs - 1) + [space.factor])
    with (
        planned_for(device),
        dry_run_attention(model, maskless=False),
        differentiable(model, space, start, table, factor),
        DirectKernelCalls(),
        counter,
    ):
        loss = next_token_loss(model, ids, ids)
        torch.autograd.grad(loss, (table, factor))
    return counter.peak - weights
