"""What holds for every method inside attention: gradients, packed documents, texts within the window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import gradients, logits, same, tokens
from cases import PARTIAL, TARGET, TRAINED, FamilyCase, llama, tiny_model
from test_biases import stir
from test_chats import METHODS
from tolerances import assert_same_but_rounding
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import rope_extend as rx
from rope_extend.attention import bias_parts
from rope_extend.encodings import RopeEncoding
from rope_extend.models.rotary_tables import shape_of

every_method = pytest.mark.parametrize("method", METHODS)
SHAPE = rx.RopeShape(16, 10_000.0, TRAINED)


def patched(model: PreTrainedModel, method: str) -> rx.Patch:
    patch = rx.patch_model(model, METHODS[method](model), target_length=TARGET)
    stir(patch)
    return patch


@every_method
def test_gradients_are_those_of_eager_attention_also_if_layers_run_again(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotation has no code in common under eager attention and sdpa; biases have other parts, too."""
    expected = None
    for implementation, checkpointing, rows in (
        ("eager", False, 256),
        ("sdpa", False, 16),
        ("sdpa", True, 16),
    ):
        monkeypatch.setattr(bias_parts, "FEWEST", min(32, rows))
        monkeypatch.setattr(bias_parts, "MOST", rows)
        model = llama(head_dim=16, attn_implementation=implementation)
        with patched(model, method):
            found = gradients(model, 60, checkpointing=checkpointing)
            assert found.keys() == dict(model.named_parameters()).keys()
        expected = expected or found
        for name, gradient in found.items():
            if not name.endswith("bias2"):  # of FIRE, which the softmax ignores
                assert gradient.abs().max() > 0, name
                assert_same_but_rounding(gradient, expected[name])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "linear_attention"])
def test_packed_documents_equal_rows_of_their_own(method: str, implementation: str) -> None:
    model, lengths = llama(head_dim=16, attn_implementation=implementation), (37, 12, 29)
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with patched(model, method):
        packed = logits(model, ids, position_ids=positions).split(lengths, dim=1)
        for found, own in zip(packed, ids.split(lengths, dim=1), strict=True):
            same(found, logits(model, own))


def longest_plain(method: rx.Encoding, shape: rx.RopeShape) -> int:
    """The longest text of which a method says that it is that of plain RoPE; 0 if there is none."""
    if not isinstance(method, RopeEncoding) or not method.rotates_in_attention:
        return 0
    return max((n for n in range(1, TRAINED + 1) if method.is_plain(shape, 0, n - 1)), default=0)


PLAIN = [name for name, make in METHODS.items() if longest_plain(make(llama()), SHAPE)]


@torch.no_grad()
def steps(model: PreTrainedModel, input_ids: Tensor) -> Any:
    """Logits of a text, token by token, and its cache."""
    cache = DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache).logits for part in input_ids.split(1, dim=1)]
    return torch.cat(parts, dim=1), [layer.keys for layer in cache.layers]


@pytest.mark.parametrize("method", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_within_the_window_are_those_of_the_model_bit_for_bit(method: str, dtype: torch.dtype) -> None:
    """In one forward and token by token, with the same keys in the cache."""
    for case in (
        FamilyCase("llama"), FamilyCase("gpt_neox", {**PARTIAL, "hidden_size": 64}),
        FamilyCase("gemma2", {"head_dim": 16, "sliding_window": 24}),
        FamilyCase("glm", {"head_dim": 32, "pad_token_id": 0}),
    ):  # fmt: skip
        model = tiny_model(case)
        for weight in model.parameters():  # as in a model that was loaded: the frequencies are not cast
            weight.data = weight.data.to(dtype)
        length = longest_plain(METHODS[method](model), shape_of(model))
        assert length >= 5
        ids = tokens(2, length)
        expected, (expected_steps, keys) = logits(model, ids), steps(model, ids)
        with patched(model, method):
            assert torch.equal(logits(model, ids), expected)
            found_steps, found_keys = steps(model, ids)
            assert torch.equal(found_steps, expected_steps)
            assert all(map(torch.equal, found_keys, keys))
