"""What layers share belongs to one forward: it depends on nothing but the call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from batches import LENGTH, logits, same, tokens
from cases import TARGET, llama
from torch import Tensor

import rope_extend as rx

METHODS = ("dynamic_ntk", "self_extend", "fire")


@pytest.mark.parametrize("name", METHODS)
def test_the_same_positions_may_come_with_other_weights(name: str) -> None:
    """A training loop may use one tensor of positions again."""
    model, ids, positions = llama(head_dim=16), tokens(1, LENGTH), torch.arange(LENGTH)[None]
    with rx.extend(model, TARGET, name) as patch:
        logits(model, ids, position_ids=positions)
        with torch.no_grad():
            for parameter in [*model.parameters(), *(patch.learned.parameters() if patch.learned else ())]:
                parameter.mul_(1.3)
        again = logits(model, ids, position_ids=positions)
        assert torch.equal(again, logits(model, ids, position_ids=positions.clone()))
        positions += 40  # in place
        assert torch.equal(
            logits(model, ids, position_ids=positions), logits(model, ids, position_ids=positions.clone())
        )


@pytest.mark.parametrize("name", METHODS)
def test_threads_do_not_see_each_other(name: str) -> None:
    model = llama(head_dim=16)
    texts = [tokens(1, length, seed=length) for length in (70, 80, 75, 60)]
    with rx.extend(model, TARGET, name):
        expected = [logits(model, text) for text in texts]

        def run(text: Tensor, alone: Tensor) -> None:
            for _ in range(20):
                same(logits(model, text), alone)

        with ThreadPoolExecutor(len(texts)) as threads:
            list(threads.map(run, texts, expected))  # raises what a thread has raised
