"""Long prompts, processed in chunks before the answer is generated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rope_extend.evaluation import chunked_forward
from rope_extend.evaluation.loss_computer import LossComputer


@torch.no_grad()
def filled_cache(model: Any, ids: Tensor, new_tokens: int) -> DynamicCache | None:
    """The cache of prompts longer than 131,072 tokens, filled in chunks, so that activations stay small.

    transformers' `generate` continues from it. It processes prompts whole: for an 8B model at 262k tokens,
    the MLPs alone then need 29 GB.

    Args:
        model: a causal language model.
        ids: prompts of equal length, int64 `[batch, T]`.
        new_tokens: number of tokens that will be generated at most; the cache has room for them.

    Returns:
        A cache of all tokens but the last. None for shorter prompts, and for models that give other results
        in chunks.
    """
    tokens = ids.shape[1]
    if tokens <= chunked_forward.MAX_WHOLE:
        return None
    computer = LossComputer(model, ids.device)
    size = computer.chunked.default_chunk(tokens)
    if size >= tokens or not computer.can_chunk(tokens, size):
        return None
    cache = computer.chunked.cache_of(tokens + new_tokens)
    for _ in computer.chunked.with_cache(torch.split(ids[:, :-1], size, dim=1), cache):
        pass  # the states are not needed: the last token gives the first logits
    return cache
