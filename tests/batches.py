"""Batches of rows of different lengths, and what a model says of them: at once, and in parts with a cache."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

LENGTH = 80
"""Tokens in a row, padding included: beyond the trained window of the models in `cases`."""


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


class Batch(dict[str, Tensor]):
    """Rows of different lengths, padded on the left, by the names under which a model takes them."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor) -> None:
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        super().__init__(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)

    def part(self, start: int, stop: int) -> dict[str, Tensor]:
        """Some columns, for a model that has read those before; its mask says which of them are tokens."""
        return {
            name: value[:, :stop] if name == "attention_mask" else value[:, start:stop]
            for name, value in self.items()
        }

    def rows(self, which: Any) -> Batch:
        """Some rows, in an order of choice."""
        return Batch(self["input_ids"][which], self["attention_mask"][which])


def batch(padding: tuple[int, ...] = (0, 17, 59)) -> Batch:
    """Rows of `LENGTH` columns, of which the first so many are padding."""
    mask = torch.ones(len(padding), LENGTH, dtype=torch.long)
    for row, width in enumerate(padding):
        mask[row, :width] = 0
    return Batch(tokens(len(padding), LENGTH), mask)


@torch.no_grad()
def logits(model: PreTrainedModel, input_ids: Tensor, **inputs: Any) -> Tensor:
    """Of one forward without a cache."""
    return model(input_ids, use_cache=False, **inputs).logits


@torch.no_grad()
def in_parts(model: PreTrainedModel, data: Batch, stops: list[int], cache: Any = None) -> Tensor:
    """Logits of consecutive parts, each read with the cache of those before; by default the model's own."""
    parts = []
    for start, stop in itertools.pairwise([0, *stops]):
        output = model(**data.part(start, stop), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


def same(actual: Tensor, expected: Tensor, data: Batch | None = None) -> None:
    """Equal to 1e-4 wherever a token stands."""
    if data is not None:
        there = data["attention_mask"][:, :, None].bool()
        actual, expected = actual.masked_fill(~there, 0), expected.masked_fill(~there, 0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def gradients(model: PreTrainedModel, length: int, *, checkpointing: bool) -> dict[str, Tensor]:
    """Of all weights, by two forwards before one backward: layers run again stand where they stood."""
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
