"""Rotary parameters in configs of others: nonsense is one clear error, never a raw one or a wrong table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TARGET, TRAINED, FamilyCase, llama, scaling, tiny_model
from test_families import case_of
from transformers import AutoConfig, AutoModelForCausalLM

import rope_extend as rx

HUGE = 10**400
"""A whole number in JSON that no float holds."""
YARN = scaling("yarn")
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {**YARN, "rope_type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 8.0}
RECORD = {
    "encoding": {"name": "yarn", "factor": 8.0}, "target_length": TARGET, "rope_parameters": {},
    "shape": {"dim": 16, "theta": 10_000.0, "trained_length": TRAINED},
}  # fmt: skip


def nested(depth: int) -> dict[str, Any]:
    encoding: dict[str, Any] = {"name": "none"}
    for _ in range(depth):
        encoding = {"name": "resonance", "inner": encoding}
    return encoding


PARAMETERS: list[dict[str, Any]] = [
    {**YARN, "attention_factor": "x"}, {**YARN, "attention_factor": [8]}, {**YARN, "attention_factor": HUGE},
    {**YARN, "mscale": HUGE, "mscale_all_dim": 1.0}, {**YARN, "original_max_position_embeddings": HUGE},
    {**YARN, "factor": HUGE}, {**LLAMA3, "low_freq_factor": True}, {**LONGROPE, "short_factor": {}},
    {**LONGROPE, "long_factor": []}, {**LONGROPE, "long_factor": ["a"] * 8}, {**DYNAMIC, "factor": 1e300},
    {**LONGROPE, "factor": HUGE},
]  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    {"max_position_embeddings": HUGE},
    {"rope_extend": {**RECORD, "encoding": nested(300)}},
    {"rope_extend": {**RECORD, "encoding": {"name": "yarn", "factor": HUGE}}},
    {"rope_extend": {**RECORD, "shape": {**RECORD["shape"], "theta": HUGE}}},  # type: ignore[dict-item]
    {"rope_extend": {**RECORD, "target_length": None}},
    {"rope_extend": {**RECORD, "target_length": "long"}},
]


@pytest.mark.parametrize("change", [*[{"rope_parameters": each} for each in PARAMETERS], *OTHERS])
def test_a_config_of_others_is_read_or_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    config = llama().config.to_dict() | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(rx.RopeExtendError):
        rx.info(tmp_path)
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    except Exception:  # stock transformers refuses the config
        return
    for options in ({}, {"start": "current"}, {"trained_length": TRAINED}):
        try:
            patch = rx.extend(model, 4 * TARGET, "linear", **options)
        except rx.RopeExtendError:
            continue
        assert torch.isfinite(model(torch.arange(40)[None]).logits).all()
        patch.remove()


@pytest.mark.parametrize("method", ["yarn", "linear", "llama3", "ntk"])
def test_a_share_of_channels_that_the_family_ignores(method: str) -> None:
    """Llama's own table has all channels, but transformers' scaled tables would have half of them."""
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    model, plain = llama(rope_parameters=parameters), llama()
    ids = torch.arange(100).remainder(61)[None]
    with rx.extend(model, TARGET, method) as patch, rx.extend(plain, TARGET, method), torch.no_grad():
        assert patch.shape.dim == 16
        assert torch.equal(model(ids).logits, plain(ids).logits)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("phi3", {"partial_rotary_factor": 0.0}, "rotates no channels"),
        ("qwen3_5_text", {"partial_rotary_factor": 0.0}, "rotates no channels"),
        *[
            ("qwen3_5_text", {"mrope_section": section}, "mrope_section must be three whole numbers")
            for section in (float("nan"), 8, "x", [8], [8, 8, -1], [8, 8, 0.5], None)
        ],
    ],
)
def test_shapes_that_no_model_has(family: str, change: dict[str, Any], message: str) -> None:
    case = case_of(family)
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, **case.config.get("rope_parameters", {})}
    config = {**case.config, "rope_parameters": {**parameters, **change}}
    model = tiny_model(FamilyCase(family, config))
    with pytest.raises(rx.RopeExtendError, match=message):
        rx.extend(model, TARGET)
    assert rx.current_patch(model) is None
