"""Block lengths by step: the content of a step follows from its number, and all steps have equal tokens."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases import TRAINED
from covering import few
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rope_extend import RopeExtendError
from rope_extend.data.blocks import cut_blocks
from rope_extend.data.curriculum import Curriculum, Stage
from rope_extend.data.documents import Document
from rope_extend.data.mixing import Mixture
from rope_extend.loss import NextTokenLoss
from rope_extend.training.finetune import Recipe, finetune

STAGES = ((32, 2), (64, 3))


def stage(first: int, length: int) -> Stage:
    made = cut_blocks([Document("a", torch.arange(256))], length)
    return Stage(first, length, 128 // length, Mixture([made]))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 40))
def test_a_step_is_in_the_stage_that_a_list_of_all_steps_says(durations: list[int], steps: int) -> None:
    lengths = [16, 32, 64, 128][: len(durations)]
    stages, written = [], []
    for length, duration in zip(lengths, durations, strict=True):
        stages.append(stage(len(written), length))
        written += [length] * duration
    written += [lengths[-1]] * 50
    made = Curriculum(stages)
    assert [made.at(step).length for step in range(steps)] == written[:steps]
    beyond = sum(max(0, length - 24) / length for length in written[:steps]) / steps
    assert made.share_beyond(24, steps) == pytest.approx(beyond)
    # Each step of 3 sequences of 128 tokens reads 384 of the 256 tokens, in blocks of any length.
    assert made.epochs(steps, 3) == [pytest.approx(1.5 * steps)]


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    return Recipe(
        model=str(work / "model"), data=str(work / "data"), output_dir=str(tmp_path / "run"),
        target_length=128, curriculum=STAGES, steps=8, batch_size=1, gradient_accumulation=2,
        learning_rate=1e-2, warmup_steps=2, lora_rank=4, lora_dropout=0.2, save_every=2,
        gradient_checkpointing=False,
    )  # fmt: skip


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    original = NextTokenLoss.forward

    def forward(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not input_ids.is_meta:  # those of the dry run before the training
            seen.append(tuple(input_ids.shape))
        return original(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(NextTokenLoss, "forward", forward)
    return seen


def test_all_stages_of_a_run_have_the_same_tokens_per_step(
    recipe: Recipe, shapes: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        result = finetune(recipe)
    assert shapes == [(4, 32)] * 4 + [(2, 64)] * 6 + [(1, 128)] * 6
    assert result.tokens == 8 * 2 * 128
    assert result.share_beyond == pytest.approx((0 * 2 + 3 * 0.5 + 3 * 0.75) / 8)
    assert "Curriculum(32 from step 0: Blocks(" in caplog.text
    lines = [
        json.loads(line) for line in (Path(recipe.output_dir) / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["block_length"] for line in lines] == [32, 32, 64, 64, 64, 128, 128, 128]


@pytest.mark.slow
@pytest.mark.parametrize("at", few((1, 2, 4, 5, 6), 5, 3))
def test_a_run_resumes_bit_for_bit_within_and_between_stages(recipe: Recipe, tmp_path: Path, at: int) -> None:
    finetune(recipe)
    other = replace(recipe, output_dir=str(tmp_path / "other"))
    finetune(replace(other, steps=at))
    finetune(other, resume=True)
    ours, theirs = (load_file(Path(r.output_dir) / "adapter_model.safetensors") for r in (recipe, other))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_another_curriculum_is_another_run(recipe: Recipe) -> None:
    finetune(replace(recipe, steps=2))
    with pytest.raises(RopeExtendError, match=r"curriculum was \[\[32, 2\], \[64, 3\]\] and is None"):
        finetune(replace(recipe, curriculum=None), resume=True)


@pytest.mark.slow
def test_a_run_that_ends_before_its_longest_blocks_logs_a_warning(
    recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    finetune(replace(recipe, steps=5))
    assert "the run ends after 5 steps, before any block of 128 tokens" in caplog.text


def test_stages_mix_and_pack(recipe: Recipe, work: Path, shapes: list[tuple[int, ...]]) -> None:
    data = tuple(str(work / "data" / f"{name}.txt") for name in "abc")
    finetune(replace(recipe, data=data, data_weights=(1, 2, 3), packing="restart", steps=6))
    assert shapes == [(4, 32)] * 4 + [(2, 64)] * 6 + [(1, 128)] * 2


def test_it_is_written_and_read_as_yaml(recipe: Recipe) -> None:
    assert Recipe.from_dict(yaml.safe_load(recipe.to_yaml())) == recipe
    assert json.loads(json.dumps(recipe.to_dict()))["curriculum"] == [[32, 2], [64, 3]]
    long = replace(recipe, target_length="32k", curriculum=[["4k", 1], ["16k", 2]])
    assert long.curriculum == ((4096, 1), (16384, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curriculum": [[48, 2]]}, "curriculum has blocks of 48 tokens, and block_length is 128"),
        ({"curriculum": [[128, 2]]}, "curriculum has blocks of 128 tokens"),
        ({"curriculum": [[1, 2]]}, "curriculum has blocks of 1 tokens"),
        ({"curriculum": [[32, 0]]}, "curriculum must be a list of block lengths and steps"),
        ({"curriculum": [32, 2]}, "curriculum must be a list of block lengths and steps"),
        ({"curriculum": []}, "curriculum must be a list of block lengths and steps"),
        ({"curriculum": "32"}, "curriculum must be a list of block lengths and steps"),
        (
            {"curriculum": [[16, 2]], "block_length": TRAINED, "positions": "pose"},
            "positions pose and curriculum cannot be combined",
        ),
    ],
)
def test_invalid_stages_are_refused(recipe: Recipe, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeExtendError, match=message):
        replace(recipe, **changes)
