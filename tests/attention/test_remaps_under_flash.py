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


@pytest.mark.parametrize("case", REMAPS, ids=str)
def test_packed_documents_equal_rows_of_their_own(case: EncodingCase, calls: Calls) -> None:
    """Documents begin where positions restart, or where `cu_seq_lens_q` says so as well."""
    model, lengths = llama(head_dim=16), (37, 12, 29)
    input_ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    cuts = torch.tensor([0, 37, 49, 78], dtype=torch.int32)
    with patched(model, case):
        expected = [logits(model, ids) for ids in input_ids.split(lengths, dim=1)]
        model.config._attn_implementation_internal = "flash_attention_2"
        for given in ({}, {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}):
            packed = logits(model, input_ids, position_ids=positions, **given)
            same(packed, torch.cat(expected, dim=1))
    assert not calls


@pytest.mark.parametrize("case", few(REMAPS, 4), ids=str)
def test_batches_of_packed_rows_equal_those_under_a_mask(case: EncodingCase, calls: Calls) -> None:
    """As a training run packs them: lengths of all rows, one after the other."""
    model, input_ids = llama(head_dim=16), tokens(2, LENGTH)
    positions = torch.stack([
        torch.cat([torch.arange(length) for length in lengths]) for lengths in ((50, 30), (12, 40, 28))
    ])  # fmt: skip
    with patched(model, case):
        expected = logits(model, input_ids, **document_inputs(model, positions, restarts=True))
        model.config._attn_implementation_internal = "flash_attention_2"
        inputs = document_inputs(model, positions, restarts=True)
        assert inputs["cu_seq_lens_q"].tolist() == [0, 50, 80, 92, 132, 160]
        same(logits(model, input_ids, **inputs), expected)
    assert not calls


def test_other_documents_than_the_positions_are_refused_by_name(calls: Calls) -> None:
    model, case = llama(head_dim=16), REMAPS[0]
    cuts = torch.tensor([0, 30, LENGTH], dtype=torch.int32)
    positions = torch.cat([torch.arange(40), torch.arange(LENGTH - 40)])[None]
    with patched(model, case):
        model.config._attn_implementation_internal = "flash_attention_2"
        one_text = torch.arange(LENGTH)[None]
        for given in (
            {"cu_seq_lens_q": cuts},
            {"cu_seq_lens_q": cuts, "position_ids": one_text},
            {"position_ids": positions + 3},
        ):
            inputs = {"position_ids": positions, **given}
            with pytest.raises(PatchError, match=r"flash_attention_2 cannot cut.*sdpa"):
                logits(model, tokens(1, LENGTH), **inputs)


@pytest.mark.parametrize("lengths", [(6, 4), (50, 30)], ids=["within the trained window", "beyond it"])
def test_several_packed_rows_need_all_lengths(lengths: tuple[int, int], calls: Calls) -> None:
    """As without a patch: the positions of several rows do not tell transformers where documents begin."""
    model, case = llama(head_dim=16), REMAPS[0]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    input_ids = tokens(2, sum(lengths))
    with patched(model, case):
        model.config._attn_implementation_internal = "flash_attention_2"
        inputs = document_inputs(model, positions, restarts=True)
        logits(model, input_ids, **inputs)
        calls.clear()
        del inputs["max_length_q"]
        restarting = {"position_ids": positions}
        through = {**inputs, "position_ids": torch.arange(sum(lengths))[None]}
        for given, missing in (
            (restarting, "cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k"),
            (inputs, "max_length_q"),
            (through, "max_length_q"),
        ):
            with pytest.raises(PatchError, match=f"documents of 2 packed rows without {missing}; .*sdpa"):
                logits(model, input_ids, **given)
        assert not calls
        logits(model, input_ids[:1], position_ids=positions[:1])  # one row needs none
        logits(model, input_ids)
