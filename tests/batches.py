"""Batches of rows of different lengths, and their logits: in one forward, or in parts with a cache."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tolerances import assert_same_but_rounding
from torch import Tensor
from transformers import PreTrainedModel

LENGTH = 80
"""Tokens in a row, padding included: beyond the trained window of the models in `cases`."""


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


class Batch(dict[str, Tensor]):
    """Rows of different lengths, padded on the left, as keyword arguments of a model."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor) -> None:
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        super().__init__(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)

    def part(self, start: int, stop: int) -> dict[str, Tensor]:
        """Columns for a model whose cache has those before; the mask covers all columns up to `stop`."""
        return {
            name: value[:, :stop] if name == "attention_mask" else value[:, start:stop]
            for name, value in self.items()
        }

    def rows(self, which: Any) -> Batch:
        """The rows `which`, in that order."""
        return Batch(self["input_ids"][which], self["attention_mask"][which])


def batch(padding: tuple[int, ...] = (0, 17, 59)) -> Batch:
    """Rows of `LENGTH` columns. `padding` gives how many of the first columns of each row are padding."""
    mask = torch.ones(len(padding), LENGTH, dtype=torch.long)
    for row, width in enumerate(padding):
        mask[row, :width] = 0
    return Batch(tokens(len(padding), LENGTH), mask)


@torch.no_grad()
def logits(model: PreTrainedModel, input_ids: Tensor, **inputs: Any) -> Tensor:
    """Logits of one forward without a cache."""
    return model(input_ids, use_cache=False, **inputs).logits


@torch.no_grad()
def in_parts(model: PreTrainedModel, data: Batch, stops: list[int], cache: Any = None) -> Tensor:
    """Logits of consecutive parts, each with the cache of those before; by default the model's own cache."""
    parts = []
    for start, stop in itertools.pairwise([0, *stops]):
        output = model(**data.part(start, stop), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


def same(actual: Tensor, expected: Tensor, data: Batch | None = None) -> None:
    """Equal but for float32's rounding at every position that is a token."""
    if data is not None:
        there = data["attention_mask"][:, :, None].bool()
        actual, expected = actual.masked_fill(~there, 0), expected.masked_fill(~there, 0)
    assert_same_but_rounding(actual, expected)


def gradients(model: PreTrainedModel, length: int, *, checkpointing: bool) -> dict[str, Tensor]:
    """Gradients of all weights. Two forwards at other positions come before one backward, so a layer that is
    recomputed needs the positions of its own forward."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    losses = [
        model(
            tokens(1, length, seed=first),
            position_ids=torch.arange(first, first + length)[None],
            labels=tokens(1, length, seed=first),
            use_cache=False,
        ).loss
        for first in (0, 20)
    ]
    sum(losses).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
