"""Padding and caches change nothing for a row: random chats in a batch equal one forward, and each row alone.

One forward without a cache needs no positions of keys, and a row alone has no padding. Other tests compare
these with the definitions of the methods in float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from batches import LENGTH, logits, same, tokens
from cases import ALTERNATIVES, KINDS, TARGET, FamilyCase, tiny_model
from covering import few
from test_biases import stir
from test_modes import METHODS as INSIDE_AND_REMAPS
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

import rope_extend as rx
from rope_extend.attention import masks
from rope_extend.errors import PatchError

FAMILIES = {
    "full": FamilyCase("llama", {"head_dim": 16}),
    "wide": FamilyCase("mistral", {"head_dim": 16, "sliding_window": 4096}),  # hides nothing
    "both": FamilyCase("qwen2", {**KINDS, "use_sliding_window": True, "sliding_window": 40}),
    "pairs": FamilyCase("glm", {"head_dim": 32, "pad_token_id": 0}),
}
METHODS: dict[str, Callable[[Any], rx.Encoding]] = {
    **INSIDE_AND_REMAPS,
    **{str(case): lambda _, case=case: case.build() for case in ALTERNATIVES},
    "near_far(dynamic_ntk)": lambda _: rx.encoding(
        "near_far", far=rx.encoding("dynamic_ntk", factor=2.0, step=0.0), window=8
    ),
}
PAIRS = [
    (method, family)
    for method, family in product(METHODS, FAMILIES)
    if method != "linear_attention" or family in ("full", "pairs")  # which has no windows
]
TEXTS = tokens(3, LENGTH)
CHATS = 6


def new_turn(rows: list[int], starts: list[int], pick: random.Random) -> Tensor:
    """The next tokens of some texts `[rows, width]`, with padding on the left, on the right, or inside."""
    most, multiple = pick.choice([1, 1, 12, 30]), pick.choice([1, 8])
    counts = [pick.randint(0, min(most, LENGTH - start)) for start in starts]
    width = -(-max(1, *counts) // multiple) * multiple
    turn = torch.zeros(len(rows), width, dtype=torch.long)
    for row, (text, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        inside = sorted(pick.sample(range(width), count))
        at = pick.choice([range(count), range(width - count, width), inside])
        turn[row, list(at)] = TEXTS[text, start : start + count]
    return turn


def positions(mask: Tensor, pick: random.Random, *, by_column: bool) -> Tensor | None:
    """Of all columns, with any number for padding; None to let the model count."""
    if by_column:
        return torch.arange(mask.shape[1]).expand_as(mask)
    counted = mask.cumsum(-1) - 1
    of_padding = [counted.clamp(min=0), torch.tensor(0), torch.tensor(1), torch.tensor(70)]
    return pick.choice([None, *(torch.where(mask == 1, counted, each) for each in of_padding)])


@pytest.mark.parametrize(("method", "family"), few(PAIRS, 5, 2))
@torch.no_grad()
def test_chats_equal_one_forward_and_rows_alone(
    method: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "MASK_ROWS", 7)
    model = tiny_model(FAMILIES[family])
    caches: list[Any] = [DynamicCache, lambda config: DynamicCache(), lambda config: StaticCache(config, 400)]
    if method == "sinks" and family in ("full", "pairs"):
        caches = [lambda config: rx.sink_cache(model), *caches]
    if method == "linear_attention":  # which needs a cache that can hold a state
        caches.pop()
    with rx.patch_model(model, METHODS[method](model), target_length=TARGET) as patch:
        stir(patch)
        model.set_attn_implementation("sdpa")
        alone = torch.cat([logits(model, text[None]) for text in TEXTS])
        for chat in range(CHATS):
            pick = random.Random(f"{method} {family} {chat}")
            past, by_column = caches[chat % len(caches)](config=model.config), pick.random() < 0.2
            rows = list(range(pick.randint(1, 3)))
            ids, found = torch.zeros(len(rows), 0, dtype=torch.long), torch.zeros(len(rows), 0, 64)
            for _ in range(pick.randint(2, 9)):
                model.set_attn_implementation(pick.choice(["sdpa", "eager"]))
                new = new_turn(rows, (ids != 0).sum(1).tolist(), pick)
                ids = torch.cat([ids, new], dim=1)
                mask = (ids != 0).long()
                at = positions(mask, pick, by_column=by_column)
                given = {} if at is None else {"position_ids": at[:, -new.shape[1] :]}
                embeds = pick.random() < 0.2
                given |= (
                    {"inputs_embeds": model.get_input_embeddings()(new)} if embeds else {"input_ids": new}
                )
                output = model(**given, attention_mask=mask, past_key_values=past)
                found = torch.cat([found, output.logits], dim=1)
                if pick.random() < 0.2:
                    order = [pick.randrange(len(rows)) for _ in rows]
                    past.reorder_cache(torch.tensor(order))
                    rows, ids, found = [rows[row] for row in order], ids[order], found[order]
                dynamic = all(type(layer) is DynamicLayer for layer in past.layers)
                if pick.random() < 0.2 and dynamic and ids.shape[1] > new.shape[1]:
                    count = pick.randint(1, new.shape[1])
                    past.crop(-count)
                    ids, found = ids[:, :-count], found[:, :-count]
            mask = (ids != 0).long()
            at = torch.arange(ids.shape[1]) if by_column else (mask.cumsum(-1) - 1).clamp(min=0)
            whole = logits(model, ids, attention_mask=mask, position_ids=at.expand_as(ids))
            found, whole = found * mask[..., None], whole * mask[..., None]
            same(found, whole)
            if family != "both" and not by_column:  # windows count columns, not tokens
                expected = torch.zeros_like(found)
                for row, text in enumerate(rows):
                    expected[row, mask[row] == 1] = alone[text, : mask[row].sum()]
                same(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 24, 4096])
@pytest.mark.parametrize("name", ["dynamic_yarn", "alibi"])
def test_a_cache_of_positions_with_gaps_is_refused(name: str, window: int | None) -> None:
    """Also where each layer has a window, whether it hides keys or not."""
    family = FamilyCase("mistral" if window else "llama", {"head_dim": 16, "sliding_window": window})
    model, ids, at = tiny_model(family), tokens(1, 45), torch.arange(45) + 40 * (torch.arange(45) >= 20)
    with rx.patch_model(model, rx.encoding(name), target_length=TARGET):
        for stop in (41, 45):
            cache = model(ids[:, :40], position_ids=at[None, :40]).past_key_values
            with pytest.raises(PatchError, match=r"position 80 sees \d+ cached tokens.*use_cache=False"):
                model(ids[:, 40:stop], past_key_values=cache, position_ids=at[None, 40:stop])
