"""Plugin-only checkpoints: those that stock readers would silently load with the original window.

If stock transformers does not support an encoding, `config.json` gets a model type, an architecture and a
`rope_type` of its own, and the family's own values are kept under other keys. After `import rope_extend`,
`AutoModelForCausalLM.from_pretrained` knows that type and returns the family's own model, patched. No code of
the checkpoint is run, and `trust_remote_code` is not needed. Without rope_extend, every reader stops:

- `AutoModelForCausalLM` and vLLM stop at the unknown model type.
- llama.cpp's converter stops at the unknown architecture. It ignores the model type.
- A family's own class, such as `LlamaForCausalLM`, stops at the unknown `rope_type`. It only warns of another
  model type.

This module imports nothing heavy.
"""

from __future__ import annotations

from typing import Any

MODEL_TYPE = "rope_extend"
FAMILY = "rope_extend_family"
"""The key of a plugin-only `config.json` that holds the family's own model type."""
ARCHITECTURES = ["RopeExtendForCausalLM"]
_KEPT = "rope_extend_stock_"
"""The prefix of keys that hold other values of the family's own config."""


def guarded_config(data: dict[str, Any]) -> dict[str, Any]:
    """The contents of a plugin-only `config.json`; `plain_config` is the exact inverse.

    Args:
        data: the contents of the family's own `config.json`.
    """
    if data.get("model_type") == MODEL_TYPE:
        return data
    result = {**_without_rope(data), **_replaced(data, {"architectures": ARCHITECTURES})}
    return {**result, "model_type": MODEL_TYPE, FAMILY: data.get("model_type")}


def plain_config(data: dict[str, Any]) -> dict[str, Any]:
    """The contents of a `config.json` with the family's own values, plugin-only or not."""
    if data.get("model_type") != MODEL_TYPE:
        return data
    result = {key: value for key, value in _restored(data).items() if key != FAMILY}
    return {**result, "model_type": data.get(FAMILY)}


def _without_rope(part: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config with an unknown `rope_type` in all its rotary parameters, also in nested configs."""
    result = {key: _without_rope(value) if isinstance(value, dict) else value for key, value in part.items()}
    parameters = part.get("rope_parameters")
    if isinstance(parameters, dict):  # `rope_scaling` is the name in transformers 4
        names = ("rope_parameters", "rope_scaling")
        result |= _replaced(part, {name: _unknown(parameters) for name in names})
    return result


def _unknown(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of a type that nobody else knows, for each layer type if there are several."""
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        return {layer_type: {"rope_type": MODEL_TYPE} for layer_type in parameters}
    return {"rope_type": MODEL_TYPE}


def _replaced(part: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Our values in a part of a config, and those that they replace under other keys."""
    return {**{_KEPT + key: part[key] for key in values if key in part}, **values}


def _restored(part: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config without our values, and with those that they replaced."""
    return {
        key.removeprefix(_KEPT): _restored(value) if isinstance(value, dict) else value
        for key, value in part.items()
        if not _is_ours(value)
    }


def _is_ours(value: Any) -> bool:
    if isinstance(value, dict) and value and value.keys() != {"rope_type"}:
        return all(map(_is_ours, value.values()))
    return bool(value in (ARCHITECTURES, {"rope_type": MODEL_TYPE}))
