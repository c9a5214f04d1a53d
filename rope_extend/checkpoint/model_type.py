"""The model type of plugin-only checkpoints, as `config.json` states it. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

MODEL_TYPE = "rope_extend"
FAMILY = "rope_extend_family"
"""The key of a plugin-only `config.json` that holds the family's own model type."""


def plain_config(data: dict[str, Any]) -> dict[str, Any]:
    """The contents of a `config.json` with the family's own model type, plugin-only or not."""
    if data.get("model_type") != MODEL_TYPE:
        return data
    return {**{key: value for key, value in data.items() if key != FAMILY}, "model_type": data.get(FAMILY)}
