"""Vectors added to the embeddings equal formulas and stock Llama on the same embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import LENGTH, logits, tokens
from cases import ALTERNATIVES, TARGET, TRAINED, llama, tiny_model

import rope_extend as rx
from rope_extend.encodings import ModelShape
from rope_extend.errors import UnsupportedModelError

SHAPE = ModelShape(heads=2, hidden_size=32, trained_length=TRAINED)
VECTORS = [case for case in ALTERNATIVES if case.vectors is not None]


def test_far_positions_keep_their_precision() -> None:
    made: Any = rx.encoding("sinusoidal")
    row = made.vectors(SHAPE, torch.tensor([10_000_019]), {})[0]
    assert row[0].item() == pytest.approx(
        torch.tensor(10_000_019.0, dtype=torch.float64).sin().item(), abs=1e-6
    )


@pytest.mark.parametrize("case", VECTORS, ids=str)
@pytest.mark.parametrize("first", [0, 100])
def test_logits_equal_stock_llama_on_the_sum(case: Any, first: int) -> None:
    """Stock Llama with all tokens at position 0, on embeddings with the vectors added."""
    model = llama()
    input_ids, positions = tokens(2, LENGTH), torch.arange(first, first + LENGTH)
    with rx.patch_model(model, case.build()) as patch:
        actual = logits(model, input_ids, position_ids=positions[None])
        learned = {} if patch.learned is None else patch.learned.of()
    embeddings = model.model.embed_tokens(input_ids).double()
    embeddings += case.vectors({n: v.double() for n, v in learned.items()}, 32, positions.tolist())
    with torch.no_grad():
        zeros = torch.zeros(1, LENGTH, dtype=torch.long)
        mask = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)
        stock = model.double()(
            inputs_embeds=embeddings, position_ids=zeros, attention_mask=mask[None, None], use_cache=False
        ).logits
    torch.testing.assert_close(actual.double(), stock, rtol=0, atol=2e-5)


def test_a_table_refuses_positions_past_its_end() -> None:
    model = llama()
    with rx.patch_model(model, rx.encoding("learned")) as patch:
        assert patch.target_length == TRAINED
        logits(model, tokens(1, TRAINED))
        with pytest.raises(rx.RopeExtendError, match=r"position 32 is past the last, 31.*interpolate.*tile"):
            logits(model, tokens(1, TRAINED + 1))
    fresh = rx.encoding("learned", beyond="fresh", length=40)
    past = pytest.raises(rx.RopeExtendError, match="position 40 is past the last, 39")
    with rx.patch_model(model, fresh), past:
        logits(model, tokens(1, 41))


def test_a_trained_table_is_extended_by_each_rule() -> None:
    """Parameters learned for one window are the start for a longer one."""
    model = llama()
    with rx.patch_model(model, rx.encoding("learned")) as patch:
        assert patch.learned is not None
        with torch.no_grad():
            patch.learned.shared.table.normal_(generator=torch.Generator().manual_seed(4))
        trained = logits(model, tokens(1, TRAINED))
    table = patch.learned.state_dict()
    for rule in ("tile", "fresh", "interpolate"):
        with rx.extend(model, TARGET, "learned", beyond=rule) as longer:
            assert longer.target_length == TARGET
            start = None if longer.learned is None else longer.learned.shared.table.clone()
        assert start is not None
        made = longer.encoding
        with rx.patch_model(model, made, target_length=TARGET, learned=table) as longer:
            assert longer.learned is not None
            assert torch.equal(longer.learned.shared.table, table["shared.table"])
            assert not torch.equal(start, table["shared.table"])
            within = logits(model, tokens(1, TRAINED))
            assert logits(model, tokens(1, 200)).isfinite().all()
            assert torch.equal(within, trained) == (rule != "interpolate")
            if rule == "interpolate":
                whole = made.vectors(SHAPE, torch.tensor([0, TARGET - 1]), longer.learned.of())  # type: ignore
                assert torch.equal(whole, table["shared.table"][[0, -1]])


def test_values_that_do_not_fit_are_refused() -> None:
    model = llama()
    before = logits(model, tokens(1, 20))
    for values, message in (
        (
            {"shared.table": torch.zeros(3, 32)},
            r"'shared.table' has shape \(3, 32\) in the source, and has shape \(32, 32\)",
        ),
        ({"shared.rows": torch.zeros(32, 32)}, "'shared.rows'"),
    ):
        with pytest.raises(rx.RopeExtendError, match=message):
            rx.patch_model(model, rx.encoding("learned"), learned=values)
        assert torch.equal(logits(model, tokens(1, 20)), before)
    with pytest.raises(rx.RopeExtendError, match="sinusoidal learns none"):
        rx.patch_model(model, rx.encoding("sinusoidal"), learned={"shared.table": torch.zeros(32, 32)})
    assert torch.equal(logits(model, tokens(1, 20)), before)


@pytest.mark.parametrize("name", ["gemma3n_text", "hrm_text", "hy_v4"])
def test_layers_that_read_something_else_are_refused(name: str) -> None:
    model = tiny_model(name)
    with pytest.raises(UnsupportedModelError, match=f"first layer, which .* in {name}; a rotary schedule"):
        rx.patch_model(model, rx.encoding("sinusoidal"))
