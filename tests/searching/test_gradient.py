"""The gradient steps of the race: derivatives, order and range, memory, cost, descent and resuming."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TRAINED, tiny_llama
from fakes import SHAPE
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_same_but_rounding, logit_tolerance

import rope_extend as rx
from rope_extend.loss import next_token_loss
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.searching import gradient, race
from rope_extend.searching.closed_forms import published
from rope_extend.searching.evaluations import Evaluator
from rope_extend.searching.fitness import Fitness, NeedleWindow
from rope_extend.searching.gradient_memory import gradient_bytes
from rope_extend.searching.run_search import plan_search
from rope_extend.searching.search_log import SearchLog
from rope_extend.searching.space import Space, Table
from rope_extend.searching.strategies import Context

TARGET = 4 * TRAINED


def context(log: SearchLog | None = None, dtype: torch.dtype = torch.float32, **values: Any) -> Context:
    generator = torch.Generator().manual_seed(0)
    texts = [rx.Document(f"d{n}", torch.randint(1, 90, (TARGET,), generator=generator)) for n in range(3)]
    config = rx.SearchConfig(
        **{
            "model": "m/m", "target_length": TARGET, "documents": 2, "holdout": 1,
            "lengths": (40, TARGET), "needle_weight": 0.25, **values,
        }
    )  # fmt: skip
    model = tiny_llama().eval().to(dtype)
    needles = [NeedleWindow(document.input_ids.flip(0), 5, slice(0, 0)) for document in texts]
    space = Space(rx.info(model).shape, TARGET, race.HEAD_ROOM)
    fitness = Fitness(texts, [40, TARGET], needles)
    evaluator = Evaluator(model, fitness, config.weights(), 2, log=log or SearchLog(None, {}))
    return Context(config, space, evaluator, random.Random(0))


def start_of(space: Space) -> Table:
    return space.table([1 + 3 * pair / (space.pairs - 1) for pair in range(space.pairs)], 1.1)


def table_of(point: gradient.OrderedPoint, space: Space) -> torch.Tensor:
    return space.shape.inv_freq() / point.divisors()


def encoding_of(point: gradient.OrderedPoint) -> rx.Encoding:
    divisors = point.divisors().tolist()
    return rx.encoding(
        "longrope", factor=4.0, long_factor=divisors, short_factor=divisors,
        attention_scale=float(point.attention.exp()),
    )  # fmt: skip


def test_the_rotation_with_gradients_is_that_of_the_encoding() -> None:
    """At any table, not only at that of the patch; and the patch's own rotation is back afterwards."""
    found = context()
    model, ids = found.evaluator.model, found.evaluator.fitness.documents[0].input_ids[None]
    start = start_of(found.space)
    point = gradient.OrderedPoint(start, found.space)
    with torch.no_grad():
        point.numbers += torch.randn(len(point.numbers), generator=torch.Generator().manual_seed(1))
        point.attention += 0.1
        with rx.patch_model(model, encoding_of(point), target_length=TARGET):
            expected = model(ids).logits
        with rx.patch_model(model, found.space.encoding(start), target_length=TARGET):
            before = model(ids).logits
            with gradient.differentiable_rotation(model, table_of(point, found.space), point.attention.exp()):
                actual = model(ids).logits
            assert torch.equal(model(ids).logits, before)
    assert_same_but_rounding(actual, expected)
    assert not torch.allclose(actual, before, atol=10 * logit_tolerance(expected))


def test_the_gradient_is_that_of_the_naive_loss() -> None:
    """Two lengths and a needle, by torch from the logits of whole texts.

    Not by differences of losses: norms are float32 in a float64 model, and their noise is too large.
    """
    found = context(dtype=torch.float64)
    start = start_of(found.space)
    point = gradient.OrderedPoint(start, found.space)
    values = gradient.gradient_of_document(found, point, start, 1)
    model, fitness = found.evaluator.model, found.evaluator.fitness
    with (
        rx.patch_model(model, found.space.encoding(start), target_length=TARGET),
        gradient.differentiable_rotation(model, table_of(point, found.space), point.attention.exp()),
    ):
        rows = []
        for tokens in (fitness.documents[1].input_ids, fitness.needles[1].input_ids):
            logits = model(tokens[None]).logits[0, :-1]
            rows.append(-torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0])
        loss = 0.375 * rows[0][:39].mean() + 0.375 * rows[0].mean() + 0.25 * rows[1][-5:].mean()
        expected = torch.autograd.grad(loss, (point.numbers, point.attention))
    norm = max(map(abs, values))
    assert values == pytest.approx([*expected[0].tolist(), expected[1].item()], rel=0, abs=1e-4 * norm)
    assert norm > 1e-5


def test_weights_and_rotation_are_left_as_they_were() -> None:
    found = context()
    model, start = found.evaluator.model, start_of(found.space)
    before = torch.randint(1, 90, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model(before).logits
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    gradient.gradient_of_document(found, gradient.OrderedPoint(start, found.space), start, 0)
    assert [p for p in model.parameters() if not p.requires_grad] == [frozen]
    assert all(p.grad is None for p in model.parameters())
    assert rx.current_patch(model) is None
    with torch.no_grad():
        assert torch.equal(model(before).logits, logits)


def test_layers_are_recomputed_and_left_as_they_were() -> None:
    """Each layer runs twice for a gradient, so that only its inputs are kept."""
    found = context(needle_weight=0.0, lengths=(TARGET,))
    start, calls = start_of(found.space), list[int]()
    layers = found.evaluator.model.model.layers  # type: ignore[union-attr]
    bound = layers[1].forward  # as accelerate binds one
    layers[1].forward = bound
    for number, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    gradient.gradient_of_document(found, gradient.OrderedPoint(start, found.space), start, 0)
    assert sorted(calls) == [0, 0, 1, 1]
    assert "forward" not in vars(layers[0])
    assert vars(layers[1])["forward"] is bound


def test_a_lack_of_memory_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    found = context()
    monkeypatch.setattr(gradient, "next_token_loss", allocate)
    with pytest.raises(rx.RopeExtendError, match="use gradient_steps=False"):
        race.run(found)
    assert rx.current_patch(found.evaluator.model) is None


def test_planned_bytes_are_those_of_a_step() -> None:
    found = context(needle_weight=0.0, lengths=(TARGET,))
    model, ids = found.evaluator.model, found.evaluator.fitness.documents[0].input_ids[None]
    with torch.device("meta"):
        empty = type(model)(model.config).eval()  # type: ignore[call-arg, arg-type]
    counter = LiveBytes()
    for tensor in (*model.parameters(), *model.buffers()):
        counter.add(tensor)
    weights, space = counter.live, found.space
    point = gradient.OrderedPoint(start_of(space), space)
    table = table_of(point, space).detach().requires_grad_()
    with gradient.differentiable(model, space, start_of(space), table, point.attention.exp()), counter:
        torch.autograd.grad(next_token_loss(model, ids, ids), (table, point.attention))
    planned = gradient_bytes(empty, space, TARGET, torch.device("cpu"))
    row = 4 * TARGET  # the loss of all tokens takes a few rows of numbers, and frees them in another order
    assert abs(planned - (counter.peak - weights)) <= 8 * row
    assert planned > 100 * row
    assert rx.current_patch(empty) is None


@pytest.mark.parametrize("strategy", ["race", "gradient", "longrope"])
def test_a_plan_refuses_gradient_steps_that_do_not_fit(strategy: str, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    plan = plan_search(rx.SearchConfig(model=str(tmp_path), target_length=TARGET, strategy=strategy))
    plan.check()
    assert plan.forward is not None
    assert ("a gradient step needs" in str(plan)) is (strategy != "longrope")
    between = plan.forward.longest.memory + 1000  # room for a pass, and hardly more
    small = replace(plan, forward=replace(plan.forward, available=between))
    if strategy == "longrope":
        small.check()
    else:
        with pytest.raises(rx.RopeExtendError, match="a gradient step over 128 tokens needs about"):
            small.check()
    if strategy == "race":
        settings = rx.SearchConfig(model=str(tmp_path), target_length=TARGET, gradient_steps=False)
        assert plan_search(settings).gradient_step is None


@given(seed=st.integers(0, 10_000), width=st.floats(0, 8))
@settings(max_examples=12)
def test_divisors_are_in_order_and_range_after_any_step(seed: int, width: float) -> None:
    space = Space(SHAPE, 2048, race.HEAD_ROOM)
    point = gradient.OrderedPoint(published(space)["yarn"], space)
    before = point.numbers.detach().clone()
    noise = torch.randn(len(before), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        point.numbers += width * noise
    point.settle(before)
    logs = point.divisors().detach().log()
    assert bool((logs.diff() >= 0).all())
    assert logs[0] == 0
    assert float(logs[-1]) <= point.largest + 1e-12
    space.check(point.table(space))


def test_what_is_in_order_stays_and_fast_pairs_move_less() -> None:
    """Against the formula in plain floats: pairs with a period or less move in full, with 2 by half."""
    space = Space(SHAPE, 2048, race.HEAD_ROOM)
    point = gradient.OrderedPoint(published(space)["yarn"], space)
    before = point.numbers.detach().clone()
    moves = torch.linspace(0.01, 0.15, len(before), dtype=torch.float64)
    with torch.no_grad():
        point.numbers += moves
    point.settle(before)
    for pair, (old, new, move) in enumerate(
        zip(before.tolist(), point.numbers.tolist(), moves.tolist(), strict=True), start=1
    ):
        periods = 256 * 1e4 ** (-pair / 16) / (2 * torch.pi)
        assert new - old == pytest.approx(move * min(1.0, 1 / periods), rel=1e-9)


def test_the_race_descends_within_its_budget_and_resumes_to_the_same_table(tmp_path: Path) -> None:
    whole = context(SearchLog(tmp_path / "whole.jsonl", {}))
    finalists = race.run(whole)
    assert len(whole.evaluator.log.gradients) >= 2
    assert whole.evaluator.passes <= race.budget(whole.config)
    scores = whole.scores(finalists)
    assert scores == sorted(scores)
    assert scores[0] < min(whole.evaluator.scores(whole.space, list(published(whole.space).values())))
    for table in finalists:
        whole.space.check(table)
    content = (tmp_path / "whole.jsonl").read_bytes()
    for cut in (len(content) // 3, 2 * len(content) // 3):
        file = tmp_path / f"{cut}.jsonl"
        file.write_bytes(content[:cut])
        assert race.run(context(SearchLog(file, {}))) == finalists


@pytest.mark.slow
def test_without_gradient_steps_none_is_computed() -> None:
    found = context(gradient_steps=False)
    race.run(found)
    assert not found.evaluator.log.gradients
    assert found.evaluator.passes <= race.budget(found.config)


@pytest.mark.slow
def test_a_fixed_attention_factor_does_not_move() -> None:
    found = context(attention_factor=1.05)
    assert {table.attention_factor for table in race.run(found)} == {1.05}
