"""S² attention follows its mask, is causal, and is used in training mode only."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FAMILIES, tiny_llama, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tolerances import assert_same_but_rounding
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError, UnsupportedModelError
from rope_extend.attention.shifted_sparse import (
    check_shifted_sparse,
    shifted_sparse,
    shifted_sparse_attention,
)
from rope_extend.checkpoint.restoring import load
from rope_extend.loss import hidden_states, next_token_loss
from rope_extend.training.finetune import Recipe, finetune
from rope_extend.training.memory_options import set_gradient_checkpointing

BY_TYPE = {case.model_type: case for case in FAMILIES}


def allowed(heads: int, tokens: int, group: int) -> Tensor:
    """`[heads, tokens, tokens]`: which token attends to which, by their groups."""
    seen = torch.zeros(heads, tokens, tokens, dtype=torch.bool)
    for head in range(heads):
        offset = group // 2 if head >= (heads + 1) // 2 else 0
        for i in range(tokens):
            for j in range(i + 1):
                seen[head, i, j] = (i + offset) // group == (j + offset) // group
    return seen


def naive(query: Tensor, key: Tensor, value: Tensor, group: int, scale: float) -> Tensor:
    """Dense attention in float64, one head at a time."""
    batch, heads, tokens, _ = query.shape
    seen = allowed(heads, tokens, group)
    share = heads // key.shape[1]
    out = torch.zeros(batch, heads, tokens, value.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            logits = query[b, h].double() @ key[b, h // share].double().T * scale
            out[b, h] = logits.masked_fill(~seen[h], -torch.inf).softmax(-1) @ value[b, h // share].double()
    return out


@settings(deadline=None, max_examples=20)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (6, 2), (6, 3), (8, 4)]),
    half=st.integers(1, 5),
    groups=st.integers(1, 4),
    batch=st.integers(1, 2),
    wide=st.booleans(),
)
def test_it_equals_naive_attention_in_float64(
    heads: tuple[int, int], half: int, groups: int, batch: int, wide: bool
) -> None:
    torch.manual_seed(0)
    group, tokens = 2 * half, 2 * half * groups
    query = torch.randn(batch, heads[0], tokens, 8, dtype=torch.float64, requires_grad=True)
    key = torch.randn(batch, heads[1], tokens, 8, dtype=torch.float64, requires_grad=True)
    value = torch.randn(batch, heads[1], tokens, 8 + 4 * wide, dtype=torch.float64, requires_grad=True)
    ours = shifted_sparse_attention(query, key, value, group, scale=0.3)
    theirs = naive(query, key, value, group, 0.3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weights = torch.randn_like(theirs)
    gradients = [
        torch.autograd.grad((result * weights).sum(), (query, key, value)) for result in (ours, theirs)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "qwen3", "phi3", "gpt_neox", "glm", "olmo2", "granite", "deepseek_v3", "seed_oss"],
)
def test_a_model_trains_as_with_the_mask_written_out(family: str) -> None:
    """Hidden states and gradients of stock attention with an explicit mask for each head, in every layer."""
    model = tiny_model(BY_TYPE[family]).train()
    for module in model.modules():  # Seed-OSS has dropout by default
        for name in ("attention_dropout", "residual_dropout"):
            if getattr(module, name, 0):
                setattr(module, name, 0.0)
    tokens, group = 32, 8
    ids = torch.randint(3, 60, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = allowed(model.config.num_attention_heads, tokens, group).expand(2, -1, -1, -1)
    with rx.patch_model(model, rx.encoding("yarn", factor=8.0)):
        with shifted_sparse(model, group):
            ours = hidden_states(model, ids)
        theirs = hidden_states(model, ids, attention_mask=mask)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        weights = torch.randn_like(theirs)
        parameters = list(model.base_model.parameters())
        for one, other in zip(
            torch.autograd.grad((ours * weights).sum(), parameters, allow_unused=True),
            torch.autograd.grad((theirs * weights).sum(), parameters, allow_unused=True),
            strict=True,
        ):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=0, atol=1e-3 * max(1.0, float(other.abs().max())))
        assert not torch.allclose(theirs, hidden_states(model, ids), atol=1e-2)


def test_its_cost_grows_with_the_length_and_the_group_rather_than_the_square() -> None:
    counted = []
    for group in (None, 16, 32):
        parts = [torch.randn(1, 4, 128, 8) for _ in range(3)]
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            if group is None:
                torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            else:
                shifted_sparse_attention(*parts, group)
        counted.append(counter.get_total_flops())
    full, small, large = counted
    assert 0 < small <= full * 16 / 128
    assert large <= full * 32 / 128
    assert large == pytest.approx(2 * small, rel=0.2)


def test_a_later_token_changes_no_earlier_state() -> None:
    """A change of a token reaches no earlier one, through all layers, also not the first tokens."""
    model = tiny_llama().train()
    ids = torch.arange(3, 35)[None]
    with shifted_sparse(model, 8), torch.no_grad():
        before = hidden_states(model, ids)
        for place in (31, 28, 20, 4):
            other = ids.clone()
            other[0, place] = 99
            after = hidden_states(model, other)
            assert torch.equal(after[:, :place], before[:, :place])
            assert not torch.equal(after[:, place], before[:, place])


def test_evaluation_mode_and_what_comes_after_are_full_attention() -> None:
    model = tiny_llama().eval()
    ids = torch.arange(3, 35)[None]
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    names = [config._attn_implementation for config in configs.values()]
    with torch.no_grad():
        full = model(ids).logits
        generated = model.generate(ids, max_new_tokens=4, do_sample=False)
        with shifted_sparse(model, 8):
            assert torch.equal(model(ids).logits, full)
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)
            model.train()
            assert not torch.allclose(model(ids).logits, full, atol=1e-3)
        assert torch.equal(model(ids).logits, full)
        with pytest.raises(ZeroDivisionError), shifted_sparse(model, 8):
            raise ZeroDivisionError
        assert torch.equal(model(ids).logits, full)
    assert [config._attn_implementation for config in configs.values()] == names


def test_gradient_checkpointing_changes_nothing() -> None:
    model = tiny_llama().train()
    ids = torch.arange(3, 67).view(2, 32)
    gradients = []
    for enabled in (False, True):
        set_gradient_checkpointing(model, enabled)
        model.zero_grad()
        with shifted_sparse(model, 8):
            next_token_loss(model, ids).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mistral", "layers of type sliding_attention"),
        ("gemma3_text", "layers of type sliding_attention"),
        ("gpt_oss", "layers of type sliding_attention"),
        ("lfm2", "layers of type conv"),
        ("falcon", "computes attention itself"),
        ("deepseek_v32", "indexer"),
    ],
)
def test_families_of_another_attention_are_refused_by_name(family: str, reason: str) -> None:
    if family not in BY_TYPE:
        pytest.skip("younger than the installed transformers")
    with pytest.raises(UnsupportedModelError, match=rf"does not work with {family}: .*{reason}"):
        check_shifted_sparse(tiny_model(BY_TYPE[family]), rx.encoding("yarn", factor=8.0))


@pytest.mark.parametrize("name", ["alibi", "linear_attention", "dynamic_ntk", "logn"])
def test_encodings_that_act_inside_attention_are_refused(name: str) -> None:
    model = tiny_llama()
    given = {
        "dynamic_ntk": {"factor": 4.0, "per": "query"},
        "logn": {"inner": {"name": "ntk", "factor": 4.0}},
    }
    with (
        rx.patch_model(model, rx.encoding(name, **given.get(name, {}))) as patch,
        pytest.raises(UnsupportedModelError, match="acts inside attention"),
    ):
        check_shifted_sparse(model, patch.encoding)


@pytest.mark.parametrize("family", ["doge", "mllama"])
def test_what_only_a_trial_shows_is_refused_before_anything_is_trained(family: str) -> None:
    if family not in BY_TYPE:
        pytest.skip("younger than the installed transformers")
    model = tiny_model(BY_TYPE[family])
    with pytest.raises(UnsupportedModelError, match="remove shifted_sparse"), shifted_sparse(model, 8):
        pass
    assert not model.training


def test_padding_and_texts_that_groups_do_not_divide_are_refused() -> None:
    model = tiny_llama().train()
    ids = torch.arange(3, 35)[None]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with shifted_sparse(model, 8):
        with pytest.raises(UnsupportedModelError, match="a mask or a cache, as for padding"):
            hidden_states(model, ids, attention_mask=mask)
        with pytest.raises(RopeExtendError, match="groups of 8 tokens for 31 tokens"):
            hidden_states(model, ids[:, :31])
    with pytest.raises(RopeExtendError, match="an even group"), shifted_sparse(model, 5):
        pass


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    return Recipe(
        model=str(work / "model"), data=str(work / "data"), output_dir=str(tmp_path / "run"),
        target_length=128, shifted_sparse=32, steps=4, gradient_accumulation=2, learning_rate=1e-2,
        lora_rank=4, lora_dropout=0.2, save_every=2, eval_data=str(work / "data" / "a.txt"),
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_trains_with_it_and_saves_a_model_with_full_attention(
    recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        result = finetune(recipe)
    assert "training uses shifted sparse attention (2309.12307), an approximation" in caplog.text
    assert "in groups of 32 tokens: an approximation" in (Path(recipe.output_dir) / "README.md").read_text()
    full = finetune(replace(recipe, shifted_sparse=None, output_dir=str(tmp_path / "full")))
    ours, theirs = (load_file(Path(r.output_dir) / "adapter_model.safetensors") for r in (result, full))
    assert any(not torch.equal(value, theirs[name]) for name, value in ours.items())

    ids = torch.arange(TARGET := 128)[None]
    assert result.model.get_base_model().config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(result.model(ids).logits, load(recipe.output_dir)(ids).logits)
    rx.merge(recipe.output_dir, tmp_path / "merged")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert_same_but_rounding(stock(ids).logits, result.model(ids).logits)
    assert result.perplexity[TARGET] == pytest.approx(
        rx.perplexity(result.model, _held_out(recipe), [TARGET]).ppl[TARGET], rel=1e-5
    )

    other = replace(recipe, output_dir=str(tmp_path / "other"))
    finetune(replace(other, steps=2))
    finetune(other, resume=True)
    again = load_file(Path(other.output_dir) / "adapter_model.safetensors")
    assert all(torch.equal(value, again[name]) for name, value in ours.items())
    with pytest.raises(RopeExtendError, match="shifted_sparse was 32 and is None"):
        finetune(replace(other, shifted_sparse=None), resume=True)


def _held_out(recipe: Recipe) -> Any:
    from transformers import PreTrainedTokenizerFast

    from rope_extend.data.documents import load_documents

    tokenizer = PreTrainedTokenizerFast.from_pretrained(recipe.model)
    return load_documents(recipe.eval_data or "", tokenizer, max_tokens=128)


def test_it_trains_in_half_precision_with_embeddings_in_float32(recipe: Recipe) -> None:
    result = finetune(replace(recipe, dtype="bfloat16", train_norm_embed=True, steps=2))
    assert result.skipped == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shifted_sparse": 128}, "groups of 128 tokens for blocks of 128"),
        ({"shifted_sparse": 1}, "groups of 1 tokens"),
        ({"shifted_sparse": 32, "curriculum": [[32, 1]]}, "groups of 32 tokens for blocks of 32"),
        ({"packing": "restart"}, "shifted_sparse and packing restart cannot be combined"),
        ({"method": "dynamic_ntk", "method_parameters": {"per": "query"}}, "acts inside attention"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(
    recipe: Recipe, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RopeExtendError, match=message):
        finetune(replace(recipe, **changes))
    assert not Path(recipe.output_dir).exists()
