"""The fitness of a candidate: losses against naive float64, each measured once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import TRAINED, tiny_llama
from fakes import FakeEvaluator, config
from test_perplexity import naive_losses, texts
from tolerances import logit_tolerance

import rope_extend as rx
from rope_extend.searching.evaluations import Evaluator, score
from rope_extend.searching.space import Space, Table

TARGET = 2 * TRAINED


def test_the_score_is_the_mean_loss_under_the_candidate() -> None:
    """Held-out documents have their own."""
    model, documents = tiny_llama().eval(), texts(TARGET, TARGET, TARGET)
    space = Space(rx.info(model).shape, TARGET)
    settings = config(target_length=TARGET, documents=2, holdout=1)
    evaluator = Evaluator(model, documents, settings, space)
    table = space.table([1 + pair / 4 for pair in range(space.pairs)], 1.1)
    measured = evaluator.scores([table])[0]
    held_out = score(evaluator.held_out(table))
    with rx.patch_model(model, space.encoding(table), target_length=TARGET):
        for numbers, value in (([0, 1], measured), ([2], held_out)):
            losses = torch.cat([naive_losses(model, documents[number].input_ids) for number in numbers])
            assert value == pytest.approx(float(losses.mean()), abs=logit_tolerance(losses))
    assert (evaluator.cost.passes, evaluator.cost.forward_tokens) == (3, 3 * TARGET)
    assert rx.current_patch(model) is None


def test_a_loss_that_is_no_number_is_the_worst_and_stays_in_the_log(tmp_path: Path) -> None:
    for nothing in ("nan", "inf"):
        assert score([float(nothing)]) == float("inf")
    assert score([0.5, 1.5]) == 1.0
    with FakeEvaluator(config(), file=tmp_path / "log.jsonl") as first:
        first.add(Table((1.0,)), {"search 0": float("nan")}, 0.0)
    again = FakeEvaluator(config(), file=tmp_path / "log.jsonl")
    assert again.losses == first.losses == {(Table((1.0,)), "search 0"): float("inf")}
