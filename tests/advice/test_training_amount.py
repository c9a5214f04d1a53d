"""What a recipe of `advise` trains and evaluates on, and what fits into its hours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from known_models import a_plan, write_config

from rope_extend.advice import answer, training_amount
from rope_extend.advice.advice import Advice
from rope_extend.advice.answer import advise
from rope_extend.advice.estimates import Cost, cost_of
from rope_extend.advice.training_amount import within_hours
from rope_extend.evaluation.forward_plan import Window
from rope_extend.memory.gpus import find_gpu
from rope_extend.training.recipe import Recipe

FITS = a_plan()


def fitting(monkeypatch: pytest.MonkeyPatch, model: Path, target: str, **options: str) -> Advice:
    """The advice for a GPU that everything fits."""
    monkeypatch.setattr(answer, "fit", lambda fields, *_: (dict(fields), FITS, None))
    monkeypatch.setattr(training_amount, "cost_of", lambda *_: None)
    return advise(model, target, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "target", "lengths"),
    [
        ("mistral-7b-v0.3", "1M", (32_768, 65_536, 131_072)),
        ("llama31-8b", "1M", (131_072,)),
        ("mistral-7b-v0.3", "128k", None),
    ],
)
def test_books_are_evaluated_at_windows_that_they_reach(
    name: str, target: str, lengths: tuple[int, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No book of PG-19's test split has a million tokens, so a run at the target could not start."""
    model = write_config(tmp_path, name, num_hidden_layers=1)
    advice = fitting(monkeypatch, model, target)
    assert advice.recipe.get("eval_lengths") == lengths
    assert any("Give longer documents" in note for note in advice.notes) == (lengths is not None)
    (tmp_path / "recipe.yaml").write_text(advice.recipe_yaml())
    assert Recipe.from_yaml(tmp_path / "recipe.yaml").eval_lengths == lengths
    own = fitting(monkeypatch, model, target, data="path/to/texts")
    assert not any("Give longer documents" in note for note in own.notes)


def test_short_blocks_are_not_quantised_for_the_memory_of_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few hours give short blocks, which may fit without weights of 4 bits."""
    monkeypatch.setattr(training_amount, "fit", lambda fields, *_: (dict(fields), FITS, None))
    monkeypatch.setattr(training_amount, "cost_of", lambda *_: Cost(1e9, 0.0))
    fields = {
        "model": "m", "data": "texts", "output_dir": "runs/m", "target_length": 32_768, "method": "yarn",
        "steps": 400, "batch_size": 1, "gradient_accumulation": 8, "quantize": "4bit",
    }  # fmt: skip
    gpu = find_gpu("l4")
    long, _, work = within_hours(fields, FITS, gpu, None, 2048, [])
    assert work is not None
    assert long["quantize"] == "4bit"
    short, _, _ = within_hours(fields, FITS, gpu, work.hours[0].most / 10, 2048, [])
    assert short["positions"] == "pose"
    assert "quantize" not in short


def test_evaluations_that_take_long_are_named_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hours are those of training; counted by hand, 2 operations per weight and token."""
    model = write_config(tmp_path, "tinyllama-1b", num_hidden_layers=2)
    fields = {
        "model": str(model), "data": "texts", "output_dir": "runs/m", "target_length": 32_768,
        "method": "yarn", "steps": 200, "batch_size": 1, "gradient_accumulation": 5, "block_length": 2048,
        "positions": "pose", "eval_data": "books", "eval_documents": 8, "eval_every": 50,
    }  # fmt: skip
    cost = cost_of(fields, FITS)
    assert cost is not None
    layer = 2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632
    attention = 2 * 4 * 2048 * 32_769 / 2
    document = 32_768 * (2 * (2 * layer + 2048 * 32_000) + attention)
    assert cost.evaluation == pytest.approx(8 * document, rel=1e-3)
    # Before, after steps 50, 100 and 150, and at the end.
    assert cost.evaluations(fields) == 5 * cost.evaluation
    assert cost.evaluations({**fields, "steps": 201}) == 6 * cost.evaluation
    assert cost.evaluations({**fields, "eval_every": 0}) == 2 * cost.evaluation
    monkeypatch.setattr(training_amount, "SHORT_BLOCK_STEPS", 200)
    monkeypatch.setattr(training_amount, "sequences_per_step", lambda _: 5)
    notes: list[str] = []
    _, _, work = within_hours(fields, FITS, find_gpu("h100"), None, 2048, notes)
    assert work is not None
    share = 100 * 5 * cost.evaluation / work.operations
    assert share > 50
    assert notes == [
        f"The hours are those of training. The run's evaluations have {share:.0f} % of its operations in "
        "addition. For fewer, raise eval_every or lower eval_documents in the recipe."
    ]
    window = Window(weights=0, peak=10**12, length=32_768, chunk_size=256, strategy="layer by layer")
    assert cost_of(fields, replace(FITS, evaluation=window)) == replace(cost, evaluation=0.0)
