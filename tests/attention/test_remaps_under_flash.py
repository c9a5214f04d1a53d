"""Methods that change positions under `flash_attention_2`, with log-sum-exps of torch's own kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import LENGTH, ONE_BY_ONE, batch, in_parts, logits, same, tokens
from cases import REMAPS, TARGET, EncodingCase, llama
from covering import few
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations import flash_attention

import rope_extend as rx
from rope_extend.attention import remap_parts
from rope_extend.attention.packed import document_inputs
from rope_extend.errors import PatchError
from rope_extend.models.view import shape_of

Calls = list[tuple[int, int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The queries and keys of each call of the kernel of `flash_attention_2`, which a CPU does not have."""
    found: Calls = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        found.append((query.shape[1], key.shape[1]))
        allowed = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(
            key.shape[1] - query.shape[1]
        )[None, None]
        if mask is not None:
            assert mask.dim() == 2
            allowed = allowed & mask[:, None, None].bool()
        out = torch.nn.functional.scaled_dot_product_attention(
            *(states.transpose(1, 2) for states in (query, key, value)), attn_mask=allowed,
            scale=kwargs["softmax_scale"], enable_gqa=True,
        )  # fmt: skip
        return out.transpose(1, 2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", kernel)
    return found


def patched(model: PreTrainedModel, case: EncodingCase) -> rx.Patch:
    return rx.patch_model(model, case.build(shape_of(model)), target_length=TARGET)


@pytest.mark.parametrize("case", few(REMAPS, 3), ids=str)
def test_prefills_tokens_and_padding_equal_sdpa(
    case: EncodingCase, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text without changed pairs and a single token take the kernel; a long prefill is cut in parts."""
    model, data = llama(head_dim=16), batch()
    parts = []
    attend = remap_parts.attend
    with patched(model, case):
        expected = logits(model, **data), in_parts(model, data, ONE_BY_ONE)
        model.config._attn_implementation_internal = "flash_attention_2"
        monkeypatch.setattr(
            "rope_extend.attention.remaps.attend", lambda *args: parts.append(1) or attend(*args)
        )
        same(logits(model, **data), expected[0], data)
        assert parts
        assert not calls
        same(in_parts(model, data, ONE_BY_ONE), expected[1], data)
        calls.clear()
        logits(model, tokens(1, 5))
        assert calls == [(5, 5)] * 2


@torch.no_grad()
def test_packed_rows_are_refused_where_positions_change(calls: Calls) -> None:
    """Documents begin where positions restart, or where the lengths say so."""
    model, positions = llama(head_dim=16), torch.cat([torch.arange(40), torch.arange(LENGTH - 40)])[None]
    with patched(model, REMAPS[0]):
        model.config._attn_implementation_internal = "flash_attention_2"
        inputs = document_inputs(model, positions, restarts=True)
        for given in (
            inputs,
            {"position_ids": positions},
            {**inputs, "position_ids": torch.arange(LENGTH)[None]},
        ):
            with pytest.raises(PatchError, match=r"flash_attention_2 cannot cut.*sdpa"):
                logits(model, tokens(1, LENGTH), **given)
        assert not calls
        logits(model, tokens(1, 10), position_ids=torch.arange(5).repeat(2)[None])  # nothing changes
        assert calls == [(10, 10)] * 2
