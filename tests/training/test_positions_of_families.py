"""Sampled positions in every family: loss and gradients of a naive evaluation, or refused by name."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from batches import tokens
from cases import FACTOR, FAMILIES, TARGET, FamilyCase, family, tiny_model
from covering import families
from runs import described
from tolerances import assert_same_but_rounding, logit_tolerance
from torch import Tensor, nn

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.data.sampled_positions import SAMPLERS, PositionCollator, check_sampled
from rope_extend.loss import next_token_loss
from rope_extend.models.families import family_for
from rope_extend.training import step_plan
from rope_extend.training.sharding import Sharding

LENGTH = 24
METHODS = ("linear", "dynamic_ntk", "yarn")
REFUSED = {
    "blt": "counts patches of bytes",
    "llama4_text": "scale queries by the number of tokens",
    **dict.fromkeys(
        ("dots3_note_text", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text",
         "gemma4_unified", "gemma4_unified_text", "gpt_oss", "laguna", "lfm3", "mellum", "mimo_v2_flash",
         "ministral", "mistral", "modernbert-decoder", "olmo3"),
        "attend to .* tokens, whatever their positions",
    ),
}  # fmt: skip
"""Families that count tokens, and what the error says."""
IN_ORDER = {
    "bailing_hybrid", "bamba", "falcon_h1", "lfm2", "minimax", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "zaya",
}  # fmt: skip
"""Families with layers that take tokens in their order, and no positions."""
SOME = {
    "blt", "cohere2", "deepseek_v2", "falcon_h1", "gemma3_text", "glm", "gpt_neox", "llama", "llama4_text",
    "ministral3", "phi3", "qwen3_5_text", "zaya",
}  # fmt: skip
"""One family of each kind, for the default run."""


def in_the_long_text(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits of the tokens in a text of TARGET tokens, in which a mask hides all others."""
    text, seen = torch.full((1, TARGET), 3), torch.zeros(1, TARGET, dtype=torch.long)
    text[0, positions], seen[0, positions] = ids[0], 1
    whole = model(text, attention_mask=seen, position_ids=torch.arange(TARGET)[None], use_cache=False)
    logits: Tensor = whole.logits[:, positions]
    return logits


def interpolated(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits of the stock model at fractions of positions (2306.15595)."""
    logits: Tensor = model(
        ids, attention_mask=torch.ones_like(ids), position_ids=positions[None] / FACTOR, use_cache=False
    ).logits
    return logits


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    loss.backward()
    found = [value.grad.flatten() for value in model.parameters() if value.grad is not None]
    model.zero_grad()
    return torch.cat(found)


@pytest.mark.parametrize("case", families(some=SOME))
def test_sampled_positions_equal_a_naive_evaluation_or_are_refused(
    case: FamilyCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, number = tiny_model(case), FAMILIES.index(case)
    in_order = case.model_type in IN_ORDER
    static = in_order or family_for(case.model_type).unreachable
    sampler, method = list(SAMPLERS)[number % 3], METHODS[0 if static else number // 3 % 3]
    recipe = described(target_length=TARGET, block_length=LENGTH, positions=sampler, method=method)
    monkeypatch.setattr(step_plan, "empty_model", lambda name: model)
    if case.model_type in REFUSED:
        message = rf"positions {sampler} cannot be combined with .*{REFUSED[case.model_type]}"
        with pytest.raises(RopeExtendError, match=message):
            step_plan.check_recipe(recipe, Sharding())
        return
    step_plan.check_recipe(recipe, Sharding())
    ids = tokens(1, LENGTH)
    positions = torch.from_numpy(PositionCollator(sampler, TARGET, seed=3).positions(LENGTH, 1))
    assert int(np.ptp(positions.numpy())) > 2 * LENGTH
    with rx.extend(model, TARGET, method):
        loss = next_token_loss(model, ids, position_ids=positions[None], attention_mask=torch.ones_like(ids))
        actual = gradients(model, loss)
        logits = None if in_order else in_the_long_text(model, ids, positions)
    logits = interpolated(model, ids, positions) if logits is None else logits
    expected = nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:])
    assert abs(loss.item() - expected.item()) < logit_tolerance(logits)
    assert_same_but_rounding(actual, gradients(model, expected))


def test_sampled_positions_are_accepted_in_windows_as_wide_as_the_target() -> None:
    case = family("mistral")
    for window in (127, 128):
        model = tiny_model(replace(case, config={**case.config, "sliding_window": window}))
        with pytest.raises(RopeExtendError, match="attend to 127") if window < 128 else nullcontext():
            check_sampled("pose", rx.encoding("none"), rx.RopeShape(16, 1e4, 32), model.config, 128)
