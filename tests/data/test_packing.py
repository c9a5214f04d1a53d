"""Packed documents train as they would alone: equal loss and gradients, no attention across borders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FAMILIES, FamilyCase, tiny_config, tiny_llama, tiny_model
from covering import few
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_mixed_windows import results
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.attention.packed import (
    check_packed_attention,
    document_attention,
    document_inputs,
    packed_attention,
    takes_no_mask,
)
from rope_extend.data.blocks import pack
from rope_extend.data.documents import Document
from rope_extend.data.packing import check_packing, packed_blocks, packing_reason
from rope_extend.loss import IGNORED, next_token_loss
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.memory.meta_device import DirectKernelCalls
from rope_extend.training.finetune import Recipe, finetune

BY_TYPE = {case.model_type: case for case in FAMILIES}
SIZES = (13, 1, 9, 40, 17)
"""Lengths of the documents of a block: one longer than the window, and one in which nothing is predicted."""


def documents(sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    return [
        torch.randint(3, 60, (size,), generator=torch.Generator().manual_seed(i))
        for i, size in enumerate(sizes)
    ]


def apart(model: PreTrainedModel, texts: list[Tensor]) -> Tensor:
    """The loss of documents that run separately, by transformers' own loss on full logits."""
    losses = [model(text[None], labels=text[None]).loss * (len(text) - 1) for text in texts if len(text) > 1]
    return torch.stack(losses).sum() / sum(len(text) - 1 for text in texts)


def together(model: PreTrainedModel, *rows: list[Tensor], mask: bool = True) -> Tensor:
    """The loss of rows of documents, with a mask or without one."""
    batch = {
        name: torch.stack([pack(row)[name] for row in rows])
        for name in ("input_ids", "labels", "position_ids")
    }
    with nullcontext() if mask else packed_attention(model):
        inputs = document_inputs(model, batch["position_ids"])
        return next_token_loss(model, batch["input_ids"], batch["labels"], **inputs)


def assert_equal_losses_and_gradients(
    model: PreTrainedModel, one: Callable[[], Tensor], other: Callable[[], Tensor]
) -> None:
    expected, gradients = results(model, one())
    found, ours = results(model, other())
    torch.testing.assert_close(expected, found, rtol=0, atol=1e-5)
    assert gradients.keys() == ours.keys()
    for name, gradient in gradients.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5 * scale, msg=name)


PLAIN = ("llama", "gpt_neox", "qwen3", "glm", "phi3", "deepseek_v3")
"""Families with plain causal attention, which needs no mask; in deepseek, values are narrower than keys."""
MASKED = ("gemma3_text", "gpt_oss", "llama4_text", "stablelm")
"""Families that need a mask. The last one does not pass the lengths to its layers."""


@pytest.mark.parametrize(
    ("family", "mask"), [(name, True) for name in PLAIN + MASKED] + [(name, False) for name in PLAIN]
)
def test_a_packed_block_equals_its_documents_apart(family: str, mask: bool) -> None:
    model = tiny_model(BY_TYPE[family])
    texts = documents()
    with rx.patch_model(model, rx.encoding("yarn", factor=8.0)):
        assert takes_no_mask(model) == (family in PLAIN)
        assert_equal_losses_and_gradients(
            model, lambda: apart(model, texts), lambda: together(model, texts, mask=mask)
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in FAMILIES if case.model_type != "jetmoe"], ids=str)
def test_a_model_on_the_meta_device_shows_whether_a_mask_is_needed(case: FamilyCase) -> None:
    """For the plan of a run. JetMoE does not run on the meta device."""
    model = tiny_model(case)
    with torch.device("meta"):
        empty = type(model)(model.config)
    with DirectKernelCalls(), LiveBytes(scored=2):
        found = takes_no_mask(empty)
    assert found == takes_no_mask(model)


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3),
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    st.integers(0, 2**31),
)
def test_attention_within_documents_equals_naive_attention_in_float64(
    sizes: list[list[int]], heads: tuple[int, int], seed: int
) -> None:
    tokens = max(map(sum, sizes))
    rows = [row + [tokens - sum(row)] * (sum(row) < tokens) for row in sizes]
    number = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(len(rows), count, tokens, width, generator=generator, dtype=torch.float64)
        for count, width in zip((heads[0], heads[1], heads[1]), (8, 8, 4), strict=True)
    )
    edges = torch.tensor([0, *(size for row in rows for size in row)]).cumsum(0)
    ours = document_attention(query, key, value, edges, scale=0.3)
    allowed = (number[:, :, None] == number[:, None, :]).tril()[:, None]
    wide = heads[0] // heads[1]
    scores = 0.3 * query @ key.repeat_interleave(wide, 1).mT
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    torch.testing.assert_close(ours, (weights @ value.repeat_interleave(wide, 1)).transpose(1, 2))


@pytest.mark.slow
def test_without_a_mask_memory_is_not_quadratic() -> None:
    model, tokens = tiny_llama(), 8192
    peaks = []
    for mask in (True, False):
        with LiveBytes() as memory, torch.no_grad():
            together(model, documents((tokens // 2,) * 2), mask=mask)
        peaks.append(memory.peak)
    assert peaks[0] > tokens**2 > 2 * peaks[1]


def test_the_models_attention_is_restored(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: Any, **__: Any) -> None:
        raise AssertionError("a mask was made")

    monkeypatch.setattr("rope_extend.attention.packed.create_masks_for_generate", allocate)
    result = finetune(replace(recipe, steps=1))
    assert result.model.config._attn_implementation == "sdpa"
    with pytest.raises(AssertionError, match="a mask was made"):
        together(result.model, documents())


ENCODINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "dynamic_ntk": {"factor": 8.0},
    "logn": {"inner": {"name": "ntk", "factor": 8.0}},
    "xpos": {},
    "alibi": {},
    "t5_bias": {},
    "sinusoidal": {},
}


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_kind_of_encoding_treats_a_packed_document_as_alone(name: str, implementation: str) -> None:
    model = tiny_model(BY_TYPE["llama"])
    model.set_attn_implementation(implementation)
    texts = documents()
    with rx.patch_model(model, rx.encoding(name, **ENCODINGS[name])):
        assert_equal_losses_and_gradients(model, lambda: apart(model, texts), lambda: together(model, texts))


def test_rows_of_a_batch_have_different_borders() -> None:
    model, rows = tiny_model(BY_TYPE["qwen3"]), [documents((20, 30, 14)), documents((5, 59))]
    for mask in (True, False):
        ours = together(model, *rows, mask=mask)
        torch.testing.assert_close(ours, apart(model, rows[0] + rows[1]), rtol=0, atol=1e-5)


def test_flash_attention_gets_the_borders_of_documents() -> None:
    """The function that is compared with float64 above, under a name of flash attention."""
    seen: list[Tensor] = []

    def varlen(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        assert attention_mask is None
        edges = kwargs["cu_seq_lens_q"]
        seen.append(edges)
        assert kwargs["max_length_k"] == int(edges.diff().max())
        return document_attention(query, key, value, edges, scale=kwargs["scaling"]), None

    AttentionInterface.register("test_flash", varlen)
    AttentionMaskInterface.register("test_flash", flash_attention_mask)
    model = tiny_model(BY_TYPE["llama"])
    rows = [documents((20, 30, 14)), documents((5, 59))]
    expected = apart(model, rows[0] + rows[1])
    model.config._attn_implementation_internal = "test_flash"
    torch.testing.assert_close(together(model, *rows), expected, rtol=0, atol=1e-5)
    assert seen[0].tolist() == [0, 20, 50, 64, 69, 128]


def test_a_mask_that_does_not_fit_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("rope_extend.attention.packed.create_masks_for_generate", allocate)
    with pytest.raises(RopeExtendError, match=r"2 × 64² numbers; use a shorter block_length"):
        document_inputs(tiny_llama(), torch.arange(64).expand(2, -1))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(2, 30))
def test_blocks_hold_every_token_once_in_order(sizes: list[int], length: int) -> None:
    texts = [Document(str(i), torch.arange(size) + 1000 * i) for i, size in enumerate(sizes)]
    if sum(sizes) < length:
        with pytest.raises(RopeExtendError, match="together, but a packed block needs"):
            packed_blocks(texts, length)
        return
    made = packed_blocks(texts, length)
    assert len(made) == sum(sizes) // length
    assert repr(made).endswith(f", {sum(sizes) % length} tokens left over)")
    tokens = torch.cat([text.input_ids for text in texts])
    for number, ids in enumerate(tokens.split(length)[: len(made)]):
        item = made[number]
        assert torch.equal(item["input_ids"], ids)
        start = 0
        for place, token in enumerate(ids.tolist()):
            start = place if place == 0 or token % 1000 == 0 else start
            assert item["position_ids"][place] == place - start
            assert item["labels"][place] == (IGNORED if place == start else token)
    positions = torch.stack([item["position_ids"] for item in made])
    for window in (0, 3, 30):
        share = (positions >= window).double().mean().item()
        assert made.share_beyond(window) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("case", few(FAMILIES, 4), ids=str)
def test_documents_are_apart_under_chunked_loss_or_refused(case: FamilyCase) -> None:
    """What is refused by its config alone is what two forwards of the trial find."""
    model = tiny_model(case)
    if packing_reason(rx.encoding("none"), model.config) is None:
        check_packed_attention(model)
        return
    with pytest.raises(RopeExtendError, match=f"packing does not work with {case.model_type}"):
        check_packed_attention(model)
    with rx.chunked_loss(model), pytest.raises(RopeExtendError, match="packing cannot be combined"):
        model(documents((24,))[0][None], position_ids=torch.arange(24)[None] % 14)


def test_the_trial_leaves_a_model_in_training_and_works_in_half_precision() -> None:
    model = tiny_llama().to(torch.bfloat16).train()
    with packed_attention(model):
        check_packed_attention(model)
    assert model.training


def test_an_encoding_that_cannot_be_packed_is_refused() -> None:
    with pytest.raises(
        RopeExtendError, match=r"packing cannot be combined with .*carries sums.*packing: none"
    ):
        check_packing(rx.encoding("linear_attention"), tiny_config(BY_TYPE["llama"]))


def test_accumulation_equals_a_larger_batch_token_by_token(recipe: Recipe, tmp_path: Path) -> None:
    """Blocks predict different numbers of tokens; each token has the same weight in every forward pass."""
    recipe = replace(recipe, steps=2)
    finetune(recipe)
    other = replace(recipe, batch_size=2, gradient_accumulation=1, output_dir=str(tmp_path / "other"))
    finetune(other)
    ours, theirs = (load_file(Path(r.output_dir) / "adapter_model.safetensors") for r in (recipe, other))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-6, rtol=1e-4)
