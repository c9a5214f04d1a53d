"""Plugin-only checkpoints: those that stock readers would silently load with the original window.

If stock transformers does not support an encoding, `config.json` gets a model type, an architecture and a
`rope_type` of its own, and the family's own contents are kept under one key. After `import rope_extend`,
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

from rope_extend.errors import refuse_if

MODEL_TYPE = "rope_extend"
FAMILY, CONFIG = "rope_extend_family", "rope_extend_config"
"""The keys of a plugin-only `config.json` that hold the family's model type, and its other contents. If one
held both, transformers would take it for a nested config, and load it."""
ARCHITECTURES = ["RopeExtendForCausalLM"]


def guarded_config(data: dict[str, Any]) -> dict[str, Any]:
    """A family's `config.json` as a plugin-only one; `plain_config` is the exact inverse."""
    data = plain_config(data)
    ours = {"architectures": ARCHITECTURES, "model_type": MODEL_TYPE, FAMILY: data.get("model_type")}
    rest = {key: value for key, value in data.items() if key != "model_type"}
    return {**_without_rope(rest), **ours, CONFIG: rest}


def plain_config(data: dict[str, Any]) -> dict[str, Any]:
    """The contents of a `config.json` with the family's own values, plugin-only or not."""
    if data.get("model_type") != MODEL_TYPE:
        return data
    rest: Any = data.get(CONFIG)
    refuse_if(not isinstance(rest, dict), f"config.json: {CONFIG} is {rest!r}; save the model again")
    return {**rest, "model_type": data.get(FAMILY)}


def _without_rope(part: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config with an unknown `rope_type` in all its rotary parameters, also in nested configs."""
    result = {key: _without_rope(value) if isinstance(value, dict) else value for key, value in part.items()}
    parameters = part.get("rope_parameters")
    if isinstance(parameters, dict):
        by_layer = parameters and all(isinstance(value, dict) for value in parameters.values())
        for name in ("rope_parameters", "rope_scaling"):  # the second is the name in transformers 4
            ours = {"rope_type": MODEL_TYPE}
            result[name] = {layer_type: dict(ours) for layer_type in parameters} if by_layer else ours
    return result
