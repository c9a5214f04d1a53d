"""What a recipe of `advise` trains and evaluates on, and what fits into its hours."""

from __future__ import annotations

from pathlib import Path

import pytest
from known_models import write_config

from rope_extend.advice import answer, training_amount
from rope_extend.advice.advice import Advice
from rope_extend.advice.answer import advise
from rope_extend.advice.estimates import Memory
from rope_extend.advice.gpus import find_gpu
from rope_extend.advice.training_amount import within_hours
from rope_extend.training.recipe import Recipe

FITS = Memory("24 GB", 24 * 10**9, 1, 0, "none", fits=True, evaluates=True, recomputes=False)


def fitting(monkeypatch: pytest.MonkeyPatch, model: Path, target: str, **options: str) -> Advice:
    """The advice for a GPU that everything fits."""
    monkeypatch.setattr(answer, "fit", lambda fields, *_: (dict(fields), FITS))
    monkeypatch.setattr(training_amount, "operations_per_token", lambda *_: None)
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
    monkeypatch.setattr(training_amount, "fit", lambda fields, *_: (dict(fields), FITS))
    monkeypatch.setattr(training_amount, "operations_per_token", lambda *_: 1e9)
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
