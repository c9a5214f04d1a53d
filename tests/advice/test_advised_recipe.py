"""The recipe that `advise` writes: how many tokens, and what fits into its hours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from known_models import a_plan, write_config
from torch import nn

from rope_extend.advice import advised_recipe, answer
from rope_extend.advice.answer import advise
from rope_extend.advice.describing import _time
from rope_extend.memory.gpus import LEAST_STEP, find_gpu
from rope_extend.models.loading import empty_model
from rope_extend.training.recipe import Recipe
from rope_extend.training.step_plan import plan


@pytest.mark.parametrize(
    ("window", "steps", "sequences"),
    [(2048, 400, 8), (32_768, 400, 8), (65_536, 400, 4), (131_072, 400, 2), (2**19, 200, 1), (2**22, 200, 1)],
)
def test_tokens_do_not_grow_with_the_window(
    window: int, steps: int, sequences: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """105 million from 32k to 512k, as position interpolation needed: 200 steps of 64 sequences of 8k."""
    monkeypatch.setattr(answer, "fit", lambda fields, *_: (dict(fields), a_plan(), None))
    monkeypatch.setattr(advised_recipe, "operations_per_token", lambda *_: 1.0)
    work = advise(write_config(tmp_path, "tinyllama-1b", max_position_embeddings=512), window).work
    assert work is not None
    assert (work.steps, work.tokens) == (steps, steps * sequences * window)
    # With one operation for each token, what counts is the least time of a step.
    assert work.hours == pytest.approx((steps * LEAST_STEP / 3600,) * 2)
    if window == 32_768:
        said = "H100 40 s: a step is assumed to take at least 0.1 s, and its operations take less"
        assert _time(work).startswith(said)
        long, short = (replace(work, operations=n).on(find_gpu("rtx-4090")) for n in (1e18, 2.5e15))
        assert _time(long).endswith("; not measured")
        assert _time(work, short).endswith("; a step is assumed to take at least 0.1 s")
        values = {"model": "m", "data": "d", "output_dir": "o", "target_length": window}
        assert Recipe.from_dict(values).steps == steps  # what a bare `finetune` takes
    if 32_768 <= window <= 524_288:
        assert work.tokens == 200 * 64 * 8192


@pytest.mark.parametrize(("target", "reached"), [("1M", (131_072,)), ("128k", None)])
def test_books_are_evaluated_at_windows_that_they_reach(
    target: str, reached: tuple[int, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No book of PG-19's test split has a million tokens, so a run at the target could not start."""
    monkeypatch.setattr(answer, "fit", lambda fields, *_: (dict(fields), a_plan(), None))
    monkeypatch.setattr(advised_recipe, "operations_per_token", lambda *_: None)
    model = write_config(tmp_path, "mistral-7b-v0.3", num_hidden_layers=1)
    advice = advise(model, target)
    assert advice.recipe.get("eval_lengths") == reached
    assert any("Give longer documents" in note for note in advice.notes) == (reached is not None)
    assert any("downloads from the hub, and evaluates" in note for note in advice.notes)
    (tmp_path / "recipe.yaml").write_text(advice.recipe_yaml())
    recipe = Recipe.from_yaml(tmp_path / "recipe.yaml")
    assert {name: getattr(recipe, name) for name in advice.recipe} == dict(advice.recipe)
    own = advise(model, target, data=["a", "b c"])
    assert not any("PG-19" in note for note in own.notes)
    assert own.recipe["data"] == ("a", "b c")


def test_operations_of_all_weights_are_two_for_each_weight_more(work: Path) -> None:
    """A trained weight takes 6 operations for each token, and a frozen one 4."""
    model = empty_model(str(work / "model"))
    linear = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    fields = {"model": str(work / "model"), "data": "d", "output_dir": "o", "target_length": 64}
    counts = []
    for more in ({}, {"lora_targets": "none"}):
        recipe = Recipe.from_dict({**fields, **more, "gradient_checkpointing": False})
        planned = plan(recipe, limit_memory=10**9)
        counts.append(advised_recipe.operations_per_token(recipe.to_dict(), planned) - 6 * planned.lora)
    assert planned.lora == 0
    assert counts[1] - counts[0] == 2 * linear
