"""Every length-dependent method and every position map, in every mode of decoding.

Their logits are compared with the definition in float64 in `test_attention.py` and `test_remaps.py`. Here the
tokens of whole forwards are the oracle: these need no cache, no positions of keys and no layout of columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import same, tokens
from cases import PARTIAL, REMAPS, TARGET, FamilyCase, tiny_model
from test_attention import INSIDE
from torch import Tensor
from torch.nn import functional

import rope_extend as rx
from rope_extend.errors import PatchError
from rope_extend.models.rotary_tables import shape_of

FAMILIES = [
    FamilyCase("llama", {"head_dim": 16}),
    FamilyCase("glm", {"head_dim": 32, "pad_token_id": 0}),
    FamilyCase("gpt_neox", {**PARTIAL, "hidden_size": 64}),
]
"""Halves, neighbours, and some of the channels."""
METHODS: dict[str, Callable[[Any], rx.Encoding]] = {
    **{name: lambda _, values=values: rx.Encoding.from_dict(values) for name, values in INSIDE.items()},
    **{str(case): lambda model, case=case: case.build(shape_of(model)) for case in REMAPS},
}
NEW, PAD = 12, 0
OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": None,
    "pad_token_id": PAD, "suppress_tokens": [PAD],
}  # fmt: skip


def best(logits: Tensor) -> Tensor:
    """The likeliest token but padding."""
    return logits[..., PAD + 1 :].argmax(-1) + PAD + 1


def whole(model: Any, prompt: Tensor) -> Tensor:
    """The tokens that follow a prompt `[n]`, each by a forward over all before it."""
    row = prompt
    for _ in range(NEW):
        row = torch.cat([row, best(model(row[None], use_cache=False).logits[0, -1:])])
    return row[len(prompt) :]


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as one batch, padded on the left, and its mask."""
    widest = max(map(len, rows))
    batch = torch.stack([functional.pad(row, (widest - len(row), 0)) for row in rows])
    return batch, (batch != PAD).long()


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_every_mode_decodes_the_tokens_of_whole_forwards(method: str, family: FamilyCase) -> None:
    model, draft = tiny_model(family), tiny_model(family)
    for parameter in draft.parameters():  # it agrees at times
        parameter.mul_(1.05)
    prompts = [tokens(40, seed=1), tokens(25, seed=2), tokens(52, seed=3)]
    with (
        rx.patch_model(model, METHODS[method](model), target_length=TARGET),
        rx.patch_model(draft, METHODS[method](draft), target_length=TARGET),
    ):
        expected = torch.stack([whole(model, prompt) for prompt in prompts])
        left, seen = padded(prompts)
        for more in ({}, {"cache_implementation": "static"}):
            found = model.generate(left, attention_mask=seen, **OPTIONS, **more)
            assert torch.equal(found[:, left.shape[1] :], expected)
        first = prompts[0][None]
        for more in (
            {"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 7},
            {"cache_implementation": "static"},  # without padding, its first forward has no mask
        ):  # fmt: skip
            with torch.inference_mode():
                found = model.generate(first, attention_mask=torch.ones_like(first), **OPTIONS, **more)
            assert torch.equal(found[:, len(prompts[0]) :], expected[:1])
        beams = [
            model.generate(left, attention_mask=seen, **{**OPTIONS, "num_beams": 3, "use_cache": cached})
            for cached in (True, False)
        ]
        assert torch.equal(*beams)


def test_generate_after_padding_on_the_right() -> None:
    """Two tokens get one position. That has no effect where no pair is changed, and is refused elsewhere."""
    model, mask = tiny_model(FAMILIES[0]), torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0]])
    inputs = {"inputs": tokens(2, 4), "attention_mask": mask}
    expected = model.generate(**inputs, **OPTIONS)
    with rx.patch_model(model, rx.encoding("jet_long", near=5, window=16)):
        assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
        with pytest.raises(PatchError, match=r"position 16 sees 17 cached tokens: their positions.*overlap"):
            model.generate(**inputs, **{**OPTIONS, "max_new_tokens": 20})


@pytest.mark.parametrize("method", METHODS)
def test_positions_and_masks_that_change_in_place(method: str) -> None:
    """Also where torch counts no changes, after an early exit, and after layers were computed again."""
    model = tiny_model(FAMILIES[0])
    rx.patch_model(model, METHODS[method](model), target_length=TARGET)
    ids = tokens(60, seed=1)[None]
    whole_depth, model.config.num_hidden_layers = model.config.num_hidden_layers, 1
    with torch.inference_mode():
        cache, at = model(ids[:, :50]).past_key_values, torch.tensor([[50]])
        found = []
        for step in range(50, 60):
            found.append(model(ids[:, step, None], position_ids=at, past_key_values=cache).logits)
            at += 1
        same(torch.cat(found, dim=1), model(ids, use_cache=False).logits[:, 50:])
    model.config.num_hidden_layers = whole_depth
    model.train()
    model.gradient_checkpointing_enable()
    at, mask = torch.arange(60)[None], torch.ones(1, 1, 60, 60, dtype=torch.bool).tril()
    model(ids, attention_mask=mask, position_ids=at, use_cache=False).logits.sum().backward()
    mask[..., 30:, :30] = False
    found = [
        model(ids, attention_mask=m, position_ids=p, use_cache=False).logits
        for m, p in ((mask, at), (mask.clone(), at.clone()))
    ]
    assert torch.equal(*found)
