"""Checkpoints that are scaled already, and the tokens that a command processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cases import TRAINED
from torch import nn

from rope_extend.models.load_options import LoadOptions

ROPE_PARAMETERS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": TRAINED,
        "short_factor": [1.0] * 8, "long_factor": [1.0 + pair / 4 for pair in range(8)],
    },
}  # fmt: skip
"""Stock scaling of the model in `work` to four times its window, by `rope_type`."""


def scaled_copy(model: Path, directory: Path, rope_type: str) -> Path:
    """A copy of the model in `work` with stock scaling."""
    copy = directory / f"scaled by {rope_type}"
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    base = config["rope_parameters"]["rope_theta"]
    config["rope_parameters"] = {"rope_type": rope_type, "rope_theta": base, **ROPE_PARAMETERS[rope_type]}
    if rope_type != "dynamic":  # which reads the trained window there
        config["max_position_embeddings"] = 4 * TRAINED
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def counted_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each forward of the models that are loaded with weights from now on."""
    counts: list[int] = []
    load = LoadOptions.load

    def counted(self: LoadOptions, *args: Any, **more: Any) -> nn.Module:
        model: Any = load(self, *args, **more)
        model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: counts.append(ids[0].numel()))
        return model

    monkeypatch.setattr(LoadOptions, "load", counted)
    return counts
