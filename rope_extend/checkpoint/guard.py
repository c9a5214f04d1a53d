"""Plugin-only checkpoints: those that stock transformers would silently load with the original window.

If stock transformers does not support an encoding, `config.json` gets a model type, an architecture and a
`rope_type` of its own. After `import rope_extend`, `AutoModelForCausalLM.from_pretrained` knows that type and
returns the family's own model, patched. No code of the checkpoint is run, and `trust_remote_code` is not
needed. Without rope_extend, a stock loader stops instead of producing garbage:

- `AutoModelForCausalLM` and vLLM stop at the unknown model type.
- llama.cpp's converter stops at the unknown architecture. It ignores the model type.
- A family's own class, such as `LlamaForCausalLM`, stops at the unknown `rope_type`. It only warns of another
  model type.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from rope_extend.checkpoint.manifest import read_json
from rope_extend.checkpoint.model_type import guarded_config
from rope_extend.encodings import RopeEncoding
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
    if record is not None and not isinstance(record.encoding, RopeEncoding):
        return False
    part, parameters = rotary_part(config)
    kind = parameters.get("rope_type", "default")
    return bool(part.max_position_embeddings == target_length or kind not in ("default", "proportional"))


def guard(directory: str | PathLike[str]) -> None:
    """Make a checkpoint's `config.json` one that only rope_extend reads. Call it before `seal`.

    Raises:
        RopeExtendError: the config is missing or damaged.
    """
    path = Path(directory) / "config.json"
    write_json(path, guarded_config(read_json(path)), sort_keys=True)
