"""Plugin-only checkpoints: those that stock transformers would silently load with the original window.

If stock transformers does not support an encoding, `config.json` gets a model type of its own. After
`import rope_extend`, `AutoModelForCausalLM.from_pretrained` knows that type and returns the family's own
model, patched. No code of the checkpoint is run, and `trust_remote_code` is not needed. Without rope_extend,
every stock loader stops at the unknown type, vLLM and llama.cpp's converter included, instead of producing
garbage.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from rope_extend.checkpoint.manifest import read_json
from rope_extend.checkpoint.model_type import FAMILY, MODEL_TYPE
from rope_extend.encodings import RopeEncoding, encoding_class
from rope_extend.files import write_json
from rope_extend.models.view import config_record, rotary_part


def has_stock_config(config: Any, target_length: int) -> bool:
    """Whether the config of a patched model describes its encoding to stock transformers.

    If not, the patch has left the rotary parameters of the pretrained model in the config. Stock transformers
    may still compute an encoding that depends on the length inexactly.

    Args:
        config: the config of a patched model.
        target_length: the extended window, in tokens.
    """
    record = config_record(config)
    if record is not None and not issubclass(encoding_class(record["encoding"]["name"]), RopeEncoding):
        return False
    part, parameters = rotary_part(config)
    kind = parameters.get("rope_type", "default")
    return bool(part.max_position_embeddings == target_length or kind not in ("default", "proportional"))


def guard(directory: str | PathLike[str]) -> None:
    """Give a checkpoint's `config.json` the model type that only rope_extend reads. Call it before `seal`.

    Raises:
        RopeExtendError: the config is missing or damaged.
    """
    path = Path(directory) / "config.json"
    data = read_json(path)
    if data.get("model_type") != MODEL_TYPE:
        write_json(path, {**data, "model_type": MODEL_TYPE, FAMILY: data.get("model_type")}, sort_keys=True)
