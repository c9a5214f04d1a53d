"""The recipe that `advise` writes: how many tokens, and what fits into its hours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from known_models import a_plan, write_config

from rope_extend.advice import advised_recipe, answer
from rope_extend.advice.advised_recipe import FEWEST_STEPS, STEPS, within_hours
from rope_extend.advice.answer import advise
from rope_extend.memory.gpus import find_gpu
from rope_extend.training.recipe import Recipe


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
    if 32_768 <= window <= 524_288:
        assert work.tokens == 200 * 64 * 8192


def hours_of(fields: dict[str, Any], hours: float | None, notes: list[str]) -> tuple[dict[str, Any], float]:
    """The recipe for a number of hours, and how long it takes at most."""
    made, _, work = within_hours(fields, a_plan(), find_gpu("h100"), hours, 2048, notes)
    assert work is not None
    assert work.hours is not None
    return made, work.hours.most


def test_few_hours_give_short_blocks_and_never_more_time_than_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(advised_recipe, "fit", lambda fields, *_: (dict(fields), a_plan(), None))
    monkeypatch.setattr(advised_recipe, "operations_per_token", lambda *_: 1e10)
    notes: list[str] = []
    fields = {
        "model": "m", "data": "texts", "output_dir": "runs/m", "target_length": 32_768, "method": "yarn",
        "steps": STEPS, "batch_size": 1, "gradient_accumulation": 8, "quantize": "4bit",
    }  # fmt: skip
    full, most = hours_of(fields, None, notes)
    assert full == fields
    half, time = hours_of(fields, 0.625 * most, notes)
    assert time <= 0.625 * most
    assert half == {**fields, "steps": int(0.625 * STEPS)}
    short, time = hours_of(fields, most / 4, notes)
    assert time <= most / 4
    assert (short["positions"], short["block_length"]) == ("pose", 2048)
    assert short["steps"] >= FEWEST_STEPS
    assert "quantize" not in short  # what is short may fit without
    few, least = hours_of(fields, 0.1 * time, notes)
    assert least <= 0.1 * time
    assert few["gradient_accumulation"] < 8
    assert few["steps"] >= FEWEST_STEPS
    assert not notes
    fewest, _ = hours_of(fields, 1e-9, notes)
    assert (fewest["steps"], fewest["gradient_accumulation"]) == (FEWEST_STEPS, 1)
    assert "not enough for 200 steps of one sequence" in notes[0]


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
    (tmp_path / "recipe.yaml").write_text(advice.recipe_yaml())
    recipe = Recipe.from_yaml(tmp_path / "recipe.yaml")
    assert {name: getattr(recipe, name) for name in advice.recipe} == dict(advice.recipe)
    own = advise(model, target, data="path/to/texts")
    assert not any("Give longer documents" in note for note in own.notes)
