"""A cache of attention sinks holds a bounded number of tokens, and gives the logits of an unbounded one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from batches import LENGTH, batch, in_parts, logits, tokens
from cases import PLAIN, FamilyCase, family, llama, tiny_config, tiny_model
from tolerances import assert_same_but_rounding
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM, MllamaForCausalLM

import rope_extend as rx
from rope_extend.attention.sink_cache import SinkCache
from rope_extend.errors import PatchError, UnsupportedModelError

SINKS, WINDOW = 3, 7
MOST = SINKS + WINDOW - 1 + 16
"""The most tokens that are held: those that are seen, and as many as are dropped at once."""


def patched(**sizes: Any) -> LlamaForCausalLM:
    """A model in float64 with attention sinks."""
    model = llama(head_dim=16, **sizes).double()
    rx.patch_model(model, rx.encoding("sinks", sinks=SINKS, window=WINDOW), target_length=64)
    return model


def exactly(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the rounding of float64."""
    assert_same_but_rounding(actual, expected, torch.float64)


def held_bytes(cache: SinkCache) -> int:
    """The bytes of all tensors of a cache."""
    storages = {}
    for owner in (cache, *cache.layers):
        for leaf in tree_leaves(list(vars(owner).values())):
            if isinstance(leaf, Tensor):
                storages[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
    return sum(storages.values())


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_logits_are_those_of_the_whole_text_and_memory_is_bounded(implementation: str) -> None:
    """Token by token, in parts that are longer than the window, and after a copy."""
    model = patched(attn_implementation=implementation)
    ids = tokens(1, 240)
    expected = model(ids, use_cache=False).logits
    cache = rx.sink_cache(model)
    found, sizes = [], []
    for number, part in enumerate(ids.split([30, *[1] * 90, 20, *[1] * 100], dim=1)):
        if number in (50, 60):
            cache = copy.deepcopy(cache) if number == 50 else pickle.loads(pickle.dumps(cache))
        found.append(model(part, past_key_values=cache).logits)
        if part.shape[1] == 1:
            assert cache.held <= MOST
            sizes.append(held_bytes(cache))
    softmax = torch.float32 if implementation == "eager" else torch.float64  # of eager attention, always
    assert_same_but_rounding(torch.cat(found, dim=1), expected, softmax)
    assert cache.get_seq_length() == ids.shape[1]
    assert max(sizes[-30:]) <= max(sizes[:60])


@torch.no_grad()
def test_rows_are_selected_after_tokens_were_dropped() -> None:
    """The cache still knows where they were, which is after the padding of another row."""
    model, data = patched(), batch((0, 30))
    row, cache = data.rows([0]), rx.sink_cache(model)
    in_parts(model, data, [50, *range(51, 71)], cache)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(-(cache.held - (30 + SINKS) - (WINDOW - 1)))
    start = cache.get_seq_length()
    found = model(**row.part(start, LENGTH), past_key_values=cache).logits
    exactly(found, logits(model, **row)[:, start:])


@pytest.mark.parametrize("beams", [1, 3])
def test_generated_texts_are_the_same(beams: int) -> None:
    model = patched()
    data = {"input_ids": tokens(2, 20), "attention_mask": torch.ones(2, 20, dtype=torch.long)}
    data["attention_mask"][1, :6] = 0
    options = {"max_new_tokens": 50, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    cache = rx.sink_cache(model)
    found = model.generate(**data, **options, past_key_values=cache)
    assert torch.equal(found, model.generate(**data, **options))
    assert cache.held <= MOST + 6


@torch.no_grad()
def test_a_few_tokens_can_be_removed() -> None:
    """As long as none is needed that was dropped."""
    model, ids = patched(), tokens(1, 60)
    cache = rx.sink_cache(model)
    for part in ids.split(
        [20] + [1] * 40, dim=1
    ):  # texts within the window take the model's own float32 tables
        model(part, past_key_values=cache)
    room = cache.held - SINKS - (WINDOW - 1)
    assert cache.dropped > 0
    assert room > 0
    with pytest.raises(
        PatchError, match=rf"dropped {cache.dropped} tokens.*cropped by {room + 1}.*DynamicCache"
    ):
        cache.crop(-room - 1)
    cache.crop(-room)
    found = model(ids[:, -room:], past_key_values=cache).logits
    exactly(found, model(ids, use_cache=False).logits[:, -room:])
    for positions in ([5], [60, 61, 5]):
        new = {
            "position_ids": torch.tensor([positions]),
            "attention_mask": torch.ones(1, 60 + len(positions)),
        }
        with pytest.raises(PatchError, match=r"position 5 sees 60 cached tokens|do not follow each other"):
            model(ids[:, : len(positions)], past_key_values=copy.deepcopy(cache), **new)
    cache.reset()
    exactly(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits)


def test_what_cannot_work_is_refused() -> None:
    plain, model = llama(head_dim=16), patched()
    with pytest.raises(PatchError, match=r"not patched with sinks, but with nothing; call"):
        rx.sink_cache(plain)
    other = llama(head_dim=16)
    rx.patch_model(other, rx.encoding("sinks", sinks=2, window=7), target_length=64)
    with pytest.raises(PatchError, match=r"works in a model that is patched with sinks\(sinks=3, window=7\)"):
        other(tokens(1, 4), past_key_values=rx.sink_cache(model))
    gemma = tiny_model(FamilyCase("gemma2", {"head_dim": 16, "sliding_window": 24}))
    rx.patch_model(gemma, rx.encoding("sinks", sinks=3, window=7), target_length=64)
    with pytest.raises(UnsupportedModelError, match=r"DynamicSlidingWindowLayer.*ordinary cache"):
        rx.sink_cache(gemma)
    # From transformers 5.24 on, `generate` refuses it first.
    with pytest.raises((PatchError, ValueError), match=r"prompt lookup|a cache that can be cropped"):
        model.generate(
            tokens(1, 20), max_new_tokens=60, do_sample=False, prompt_lookup_num_tokens=30, pad_token_id=0,
            past_key_values=rx.sink_cache(model),
        )  # fmt: skip


def test_layers_that_see_every_token_are_refused() -> None:
    """Without RoPE, or with keys of images: the patch does not act there, so no keys may be dropped."""
    smollm3 = {"head_dim": 16, **PLAIN, "no_rope_layers": [1, 0], "pad_token_id": 0}
    cohere2 = {"head_dim": 16, **PLAIN, "layer_types": ["full_attention"] * 2}
    for model, layers in (
        (tiny_model(FamilyCase("smollm3", smollm3)), "1"),
        (tiny_model(FamilyCase("cohere2", cohere2)), "0, 1"),
        (MllamaForCausalLM(tiny_config(family("mllama")).text_config).eval(), "1"),
    ):
        rx.patch_model(model, rx.encoding("sinks", sinks=3, window=7), target_length=64)
        says = rf"{model.config.model_type} .*keys of images \(layers {layers} of 2\).*ordinary cache"
        with pytest.raises(UnsupportedModelError, match=says):
            rx.sink_cache(model)
