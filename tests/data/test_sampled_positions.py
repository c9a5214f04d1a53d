"""Sampled positions follow their papers and reach the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import TRAINED, tiny_llama
from covering import few
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.data.blocks import cut_blocks
from rope_extend.data.documents import Document
from rope_extend.data.sampled_positions import SAMPLERS, PositionCollator, check_sampled, cream, pose
from rope_extend.encodings import RopeShape, rotary_method
from rope_extend.loss import next_token_loss
from rope_extend.models.rotary import ExtendedRotaryEmbedding
from rope_extend.training.finetune import Recipe, finetune

SHAPE = RopeShape(dim=8, theta=10_000.0, trained_length=32)


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, int]:
    length = draw(st.integers(3, 60))
    return length, draw(st.integers(length, 60 * length))


def runs(positions: np.ndarray) -> list[tuple[int, int]]:
    """First and last of each run of consecutive positions."""
    cuts = np.flatnonzero(np.diff(positions) > 1) + 1
    return [(int(part[0]), int(part[-1])) for part in np.split(positions, cuts)]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """All position ids that a patched rotary module receives."""
    positions: list[torch.Tensor] = []
    original = ExtendedRotaryEmbedding.forward

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, *rest: Any) -> Any:
        if not position_ids.is_meta:  # those of the dry run before the training
            positions.append(position_ids.clone())
        return original(self, x, position_ids, *rest)

    monkeypatch.setattr(ExtendedRotaryEmbedding, "forward", forward)
    return positions


@pytest.mark.parametrize("name", SAMPLERS)
@given(window=windows(), seed=st.integers(0, 2**31), number=st.integers(0, 2**40))
def test_positions_increase_within_the_window_and_follow_from_seed_and_number(
    name: str, window: tuple[int, int], seed: int, number: int
) -> None:
    length, target = window
    collator = PositionCollator(name, target, seed=seed)
    positions = collator.positions(length, number)
    assert positions.dtype == np.int64
    assert positions.shape == (length,)
    assert (np.diff(positions) > 0).all()
    assert positions[0] >= 0
    assert positions[-1] < target
    again = PositionCollator(name, target, seed=seed, drawn=7).positions(length, number)
    assert np.array_equal(positions, again)
    if target == length:
        assert np.array_equal(positions, np.arange(length))


@given(window=windows(), seed=st.integers(0, 2**31))
def test_pose_is_two_chunks_of_which_the_first_stays(window: tuple[int, int], seed: int) -> None:
    length, target = window
    positions = pose(length, target, np.random.default_rng(seed))
    parts = runs(positions)
    assert len(parts) <= 2
    assert parts[0][0] == 0
    if len(parts) == 2:
        assert 1 <= parts[0][1] + 1 <= (length + 1) // 2
        assert 1 <= parts[1][0] - parts[0][1] - 1 <= target - length


def test_pose_draws_first_chunk_and_skip_evenly() -> None:
    length, target, count = 8, 20, 12_000
    generator = np.random.default_rng(0)
    firsts: Counter[int] = Counter()
    skips: Counter[int] = Counter()
    for _ in range(count):
        positions = pose(length, target, generator)
        skip = int(positions[-1]) - (length - 1)
        skips[skip] += 1
        if skip:
            firsts[runs(positions)[0][1] + 1] += 1
    assert sorted(skips) == list(range(13))
    assert sorted(firsts) == [1, 2, 3, 4]
    for found, values in ((skips, 13), (firsts, 4)):
        expected = found.total() / values
        chi = sum((n - expected) ** 2 / expected for n in found.values())
        assert chi < 40  # beyond the 99.99 % quantile at 12 degrees of freedom


@given(window=windows(), seed=st.integers(0, 2**31))
def test_cream_keeps_head_and_tail_and_moves_one_piece_between(window: tuple[int, int], seed: int) -> None:
    length, target = window
    positions = cream(length, target, np.random.default_rng(seed))
    edges = {length // 3, min(length // 3, int(4 * target / length))}
    assert len(runs(positions)) <= 3
    fits = []
    for edge in edges:
        head = np.array_equal(positions[:edge], np.arange(edge))
        tail = np.array_equal(positions[-edge:], np.arange(target - edge, target))
        fits.append(head and tail and len(runs(positions[edge:-edge])) == 1)
    assert any(fits)


def test_cream_dwells_on_the_middle_and_draws_its_truncated_normal() -> None:
    """The mean is known: the end of the piece is uniform between two bounds that are linear in a."""
    length, target = 300, 4800
    scale, edge = target / length, length // 3
    generator = np.random.default_rng(1)
    ends = np.array([
        positions[-edge - 1]
        for positions in (cream(length, target, generator) for _ in range(20_000))
        if positions[edge] != edge and positions[edge - 1] == edge - 1 and positions[-edge] == target - edge
        and positions[edge] - positions[edge - 1] > 1
    ])  # fmt: skip
    halves = np.random.default_rng(2).normal(1 + scale, 3, 400_000)
    halves = halves[(halves >= 2) & (halves <= 2 * scale)] / 2
    middle = length - 2 * edge
    expected = (edge + (middle - 1) * halves + length * halves - edge - 1) / 2
    assert abs(ends.mean() - expected.mean()) < 0.01 * target
    centre = np.abs(ends - middle / 2 - target / 2) < target / 4
    assert centre.mean() > 0.7
    assert 0.4 < len(ends) / 20_000 < 0.6  # the other half has short edges


def test_a_collator_works_in_a_loader_and_resumes_at_a_number() -> None:
    made = cut_blocks([Document("a", torch.arange(320))], 16)
    whole = list(DataLoader(made, batch_size=4, collate_fn=PositionCollator("pose", 64, seed=5)))
    assert whole[0]["input_ids"].shape == whole[0]["position_ids"].shape == (4, 16)
    assert whole[0]["position_ids"].dtype == torch.int64
    assert (whole[0]["attention_mask"] == 1).all()
    rows = torch.cat([batch["position_ids"] for batch in whole])
    assert len({tuple(row.tolist()) for row in rows}) > 15
    later = PositionCollator("pose", 64, seed=5, drawn=8)
    assert torch.equal(later([made[i] for i in range(8, 12)])["position_ids"], rows[8:12])
    assert later.drawn == 12


def test_workers_draw_other_positions_in_each_epoch() -> None:
    made = cut_blocks([Document("a", torch.arange(256))], 32)
    loader = DataLoader(made, batch_size=1, collate_fn=PositionCollator("random", 4096), num_workers=2)
    drawn = [tuple(batch["position_ids"][0].tolist()) for _ in range(2) for batch in loader]
    assert len(set(drawn)) == len(drawn) == 16


def test_workers_leave_the_positions_of_blocks_as_they_are() -> None:
    model = tiny_llama()
    rx.extend(model, 128)
    blocks = rx.blocks([Document("a", torch.arange(256))], 32, positions="pose", model=model)
    batches = list(DataLoader(blocks, batch_size=2, num_workers=2))
    found = torch.cat([batch["position_ids"] for batch in batches])
    assert torch.equal(found, torch.stack([block["position_ids"] for block in blocks]))


def test_blocks_that_have_positions_are_refused_and_items_are_copies() -> None:
    made = cut_blocks([Document("a", torch.arange(64))], 32)
    made[0]["labels"][:] = -100
    assert torch.equal(made[0]["input_ids"], torch.arange(32))
    with pytest.raises(RopeExtendError, match=r"have position_ids already.*leave the collator out"):
        PositionCollator("pose", 64)([{**made[0], "position_ids": torch.arange(32)}])


def test_stock_training_takes_the_gaps_as_one_text() -> None:
    """Without the mask, transformers cuts a text at every gap, and its loss differs."""
    model = tiny_llama()
    rx.extend(model, 128)
    batch = PositionCollator("pose", 128)(cut_blocks([Document("a", torch.arange(64))], 32))
    ours = next_token_loss(model, **batch)
    stock = model(**batch, use_cache=False).loss
    assert ours.item() == pytest.approx(stock.item(), abs=1e-5)
    cut = model(**{**batch, "attention_mask": None}, use_cache=False).loss
    assert abs(cut.item() - stock.item()) > 1e-4


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("drope", "does not use positions"),
        ("logn(yarn)", "number of tokens that a query can see"),
        ("dynamic_ntk", None),
        ("xpos(yarn)", None),
        ("none", None),
    ],
)
def test_methods_without_meaning_for_sampled_positions_are_refused(method: str, message: str | None) -> None:
    """Tables for each query are exact: `tests/training/test_positions_of_families.py`."""
    encoding = rotary_method(method).for_target(SHAPE, 256)
    if message is None:
        check_sampled("pose", encoding, SHAPE, tiny_llama().config, 256)
        return
    with pytest.raises(RopeExtendError, match=rf"positions pose cannot be combined with .*{message}"):
        check_sampled("pose", encoding, SHAPE, tiny_llama().config, 256)


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    return Recipe(
        model=str(work / "model"), data=str(work / "data"), output_dir=str(tmp_path / "run"),
        target_length=256, block_length=TRAINED, positions="pose", steps=6, gradient_accumulation=2,
        learning_rate=1e-2, lora_rank=4, lora_dropout=0.2, save_every=2, gradient_checkpointing=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", few(SAMPLERS, 3))
def test_a_run_with_short_blocks_uses_positions_up_to_the_target(
    recipe: Recipe, name: str, seen: list[torch.Tensor]
) -> None:
    recipe = replace(recipe, positions=name)
    result = finetune(recipe)
    expected = PositionCollator(name, 256, seed=recipe.seed)
    assert len(seen) == 12
    for number, positions in enumerate(seen):
        assert positions.shape == (1, TRAINED)
        assert positions[0].tolist() == expected.positions(TRAINED, number).tolist()
    flat = torch.cat(seen)
    assert flat.max() > 200
    assert result.share_beyond == expected.share_beyond(TRAINED, TRAINED, 8192)
    assert expected.share_beyond(TRAINED, TRAINED, 12) == (flat >= TRAINED).double().mean().item()
    assert "it used no text as long as the window" in Path(recipe.output_dir, "README.md").read_text()
