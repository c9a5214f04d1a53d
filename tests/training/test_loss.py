"""The chunked loss equals the loss that stock transformers computes from all logits."""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PromptTuningConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rope_extend.errors import RopeExtendError
from rope_extend.loss import IGNORED, next_token_loss

VOCABULARY = 97
SIZE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD_DIM = {"head_dim": 8}
# What surrounds each family's last matrix, made strong enough that leaving it out could not go unnoticed.
FAMILIES = {
    "llama": {},
    "gpt_neox": {},
    "gemma2": {**HEAD_DIM, "final_logit_softcapping": 1.5, "query_pre_attn_scalar": 8},
    "granite": {"logits_scaling": 7.0},
    "hyperclovax": {"logits_scaling": 7.0},  # the same name as granite's, and it multiplies
    "cohere": {"logit_scale": 0.125},
    "phi": {},
    "llama4_text": {**HEAD_DIM, "num_local_experts": 2, "intermediate_size_mlp": 48},
}


def tiny(family: str, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    options = {k: v for k, v in SIZE.items() if (family, k) != ("gpt_neox", "num_key_value_heads")}
    config = CONFIG_MAPPING[family](**{**options, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or name == "lm_head.bias":  # the default gives logits of nearly nothing
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def batch(length: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = IGNORED
    labels[1, -3:] = IGNORED
    return ids, labels


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_autocast_trains_the_head_too() -> None:
    """Autocast caches its casts of weights; the gradient of each chunk must still reach the weight."""
    model = tiny("llama")
    ids, labels = batch()
    steps = []
    for loss in (
        lambda: model(ids, labels=labels).loss,
        lambda: next_token_loss(model, ids, labels, chunk_bytes=2000),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss()
        value.backward()
        steps.append(gradients(model))
        model.zero_grad(set_to_none=True)
    stock, ours = steps
    assert ours.keys() == stock.keys() == dict(model.named_parameters()).keys()
    for name, gradient in stock.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0.1, atol=0.05 * gradient.abs().max().item())


def test_positions_with_gaps_stay_one_text() -> None:
    model = tiny("llama")
    ids, labels = batch()
    positions = torch.arange(ids.shape[1])[None] * 3
    ours = next_token_loss(model, ids, labels, position_ids=positions).item()
    # With a cache, as by default, stock transformers does not look for packed texts.
    assert ours == pytest.approx(model(ids, labels=labels, position_ids=positions).loss.item(), abs=1e-5)
    # Without one it does, and cuts the text at every gap: this is what we must not do.
    cut = model(ids, labels=labels, position_ids=positions, use_cache=False).loss.item()
    assert ours != pytest.approx(cut, abs=1e-3)
    assert ours != pytest.approx(next_token_loss(model, ids, labels).item(), abs=1e-3)


def flops(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    with FlopCounterMode(display=False) as counter:
        result = run()
    return result, counter.get_total_flops()


@pytest.mark.parametrize(("trained", "products"), [(["norm"], 2), (["norm", "lm_head"], 3), (["lm_head"], 2)])
def test_the_head_is_multiplied_no_more_often_than_its_gradients_need(
    trained: list[str], products: int
) -> None:
    model = tiny("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    ids, labels = batch()
    hidden, decoder = flops(lambda: model.model(ids, use_cache=False).last_hidden_state)
    loss, forward = flops(lambda: next_token_loss(model, ids, labels, chunk_bytes=2000))
    product = 2 * 32 * VOCABULARY  # of one token
    scored = int((labels[:, 1:] != IGNORED).sum())
    assert forward - decoder == (products * scored + 1) * product
    through_decoder = flops(lambda: hidden.sum().backward())[1] if hidden.requires_grad else 0
    assert flops(lambda: loss.backward())[1] == through_decoder


@cache
def small(family: str, vocabulary: int, tied: bool) -> torch.nn.Module:
    model = tiny(family, vocab_size=vocabulary, num_hidden_layers=1, tie_word_embeddings=tied)
    if not tied:
        model.set_output_embeddings(torch.nn.Linear(32, vocabulary))
    return model


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=10)
@given(
    vocabulary=st.sampled_from([13, 50]),
    tied=st.booleans(),
    trained=st.sampled_from([["decoder"], ["head"], ["decoder", "head"]]),
    texts=st.integers(1, 3).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(0, 12), min_size=width, max_size=width), min_size=1, max_size=3
        )
    ),
    ignored=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9))),
    chunk=st.integers(1, 12),
    items=st.none() | st.integers(1, 40),
)
def test_loss_and_gradients_are_those_of_float64(
    family: str, vocabulary: int, tied: bool, trained: list[str], texts: list[list[int]],
    ignored: set[tuple[int, int]], chunk: int, items: int | None,
) -> None:  # fmt: skip
    """Compared with log-probabilities in float64, with every quotient and sum written out.

    Token 0, the padding of many models, is a target like any other: only labels of -100 are not scored.
    """
    model = small(family, vocabulary, tied)
    head = set(model.get_output_embeddings().parameters())
    for parameter in model.parameters():
        parameter.requires_grad_(("head" if parameter in head else "decoder") in trained)
    ids = torch.tensor(texts)
    labels = ids.clone()
    for row, column in ignored:
        if row < ids.shape[0] and column < ids.shape[1]:
            labels[row, column] = IGNORED
    exact = copy.deepcopy(model).double()
    exact.zero_grad(set_to_none=True)
    logits = exact(ids).logits
    terms = [
        logits[row, place - 1].exp().sum().log() - logits[row, place - 1, labels[row, place]]
        for row in range(ids.shape[0])
        for place in range(1, ids.shape[1])
        if labels[row, place] != IGNORED
    ]
    expected = sum(terms, start=torch.zeros((), dtype=torch.float64)) / (items or max(1, len(terms)))
    model.zero_grad(set_to_none=True)
    loss = next_token_loss(model, ids, labels, chunk_bytes=chunk * 4 * vocabulary, num_items_in_batch=items)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    if not terms:
        assert all(not gradient.any() for gradient in gradients(model).values())
        return
    expected.backward()
    found, wanted = gradients(model), gradients(exact)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        largest = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(found[name].double(), gradient, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_half_precision_rounds_no_more_than_the_stock_model(scale: float) -> None:
    """Gradients of a bfloat16 model, and their scale, compared with the same weights in float64."""
    model = tiny("llama").bfloat16()
    ids, labels = batch()
    exact = copy.deepcopy(model).double()
    (exact(ids, labels=labels).loss * scale).backward()
    wanted = gradients(exact)
    errors = []
    for loss in (lambda: model(ids, labels=labels).loss, lambda: next_token_loss(model, ids, labels)):
        model.zero_grad(set_to_none=True)
        (loss() * scale).backward()
        found = gradients(model)
        assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}
        errors.append({n: ((found[n].double() - g).norm() / g.norm()).item() for n, g in wanted.items()})
    stock, ours = errors
    for name, error in ours.items():
        assert error < 1.2 * stock[name] + 1e-3, name


def test_backward_runs_twice_but_there_is_no_second_derivative() -> None:
    model = tiny("llama")
    ids, labels = batch()
    loss = next_token_loss(model, ids, labels)
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, 2 * once[name])
    with pytest.raises(RopeExtendError, match="no second derivative"):
        next_token_loss(model, ids, labels).backward(create_graph=True)


def test_models_without_a_usable_head_are_refused() -> None:
    config = CONFIG_MAPPING["llama"](**SIZE)
    ids, _ = batch()
    with pytest.raises(RopeExtendError, match="AutoModelForCausalLM"):
        next_token_loss(AutoModelForSequenceClassification.from_config(config), ids)
    with pytest.raises(RopeExtendError):
        next_token_loss(torch.nn.Linear(2, 2), ids)
    prompt = get_peft_model(tiny("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(RopeExtendError, match="shifts every position"):
        next_token_loss(prompt, ids)
    config = CONFIG_MAPPING["opt"](
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(RopeExtendError, match="'decoder'"):
        next_token_loss(AutoModelForCausalLM.from_config(config), ids)


def test_data_parallel_is_refused_where_gradients_would_not_be_synchronised(tmp_path: object) -> None:
    model = tiny("llama")
    ids, labels = batch()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        with pytest.raises(RopeExtendError, match=r"call chunked_loss\(model\) before it is wrapped"):
            next_token_loss(wrapped, ids, labels)
        with torch.no_grad():
            expected = next_token_loss(model, ids, labels)
            assert torch.equal(next_token_loss(wrapped, ids, labels), expected)
    finally:
        torch.distributed.destroy_process_group()
