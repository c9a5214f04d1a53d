"""Checkpoints that stock transformers must not read: it would, on the old window, without a word.

Where an encoding has no stock form, `config.json` gets a model type of its own. After `import rope_extend`,
`AutoModelForCausalLM.from_pretrained` knows that type and returns the family's own model, patched; no code of
the checkpoint is run, and `trust_remote_code` is not needed. Without it, every stock loader, vLLM's and
llama.cpp's converter included, stops at a type that it does not know, instead of emitting garbage.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rope_extend.checkpoint.manifest import read_json
from rope_extend.encodings import RopeEncoding, encoding_class
from rope_extend.errors import RopeExtendError
from rope_extend.inspection import config_record, rotary_part

MODEL_TYPE = "rope_extend"
FAMILY = "rope_extend_family"
"""The key of a guarded config.json that holds the family's own model type."""


def has_stock_form(config: Any, target_length: int) -> bool:
    """Whether the config of a patched model says its encoding in a form that stock transformers has.

    For an encoding that follows the length, that form may still be read inexactly. Without one, a patch
    leaves what the model was pretrained with.
    """
    record = config_record(config)
    if record is not None and not issubclass(encoding_class(record["encoding"]["name"]), RopeEncoding):
        return False
    part, parameters = rotary_part(config)
    kind = parameters.get("rope_type", "default")
    return bool(part.max_position_embeddings == target_length or kind not in ("default", "proportional"))


def guard(directory: str | PathLike[str]) -> None:
    """Give a checkpoint's `config.json` the model type that only rope_extend reads; before it is sealed.

    Raises:
        RopeExtendError: no or a damaged config.
    """
    path = Path(directory) / "config.json"
    data = read_json(path)
    if data.get("model_type") != MODEL_TYPE:
        guarded = {**data, "model_type": MODEL_TYPE, FAMILY: data.get("model_type")}
        path.write_text(json.dumps(guarded, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def plain_config(data: dict[str, Any]) -> dict[str, Any]:
    """What a `config.json` says without the guard, if it has one."""
    if data.get("model_type") != MODEL_TYPE:
        return data
    return {**{key: value for key, value in data.items() if key != FAMILY}, "model_type": data.get(FAMILY)}


class GuardedConfig(PretrainedConfig):  # type: ignore[misc]  # transformers is untyped
    """The config of a guarded checkpoint: the family's own, in `family`, under another type.

    It answers with the family's values, `model_type` included, so that what looks at a config alone works.
    """

    model_type = MODEL_TYPE
    family: Any

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config of the family, wrapped.

        Raises:
            RopeExtendError: a family that transformers does not know.
        """
        data = plain_config(config_dict)
        if data["model_type"] not in CONFIG_MAPPING:
            raise RopeExtendError(
                f"config.json: {FAMILY} is {data['model_type']!r}, which this transformers does not know"
            )
        unused = kwargs.pop("return_unused_kwargs", False)
        family, rest = CONFIG_MAPPING[data["model_type"]].from_dict(data, return_unused_kwargs=True, **kwargs)
        made = cls.__new__(cls)
        made.__dict__["family"] = family
        return (made, rest) if unused else made

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__", "family"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "__dict__")["family"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.family, name, value)


class GuardedModel:
    """What `AutoModelForCausalLM` finds under the guard: it makes the family's own model, patched."""

    config_class = GuardedConfig

    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], *args: Any, config: Any, **kwargs: Any) -> Any:
        """The patched model, or what `from_pretrained` returns with it.

        Raises:
            RopeExtendError: no or a damaged record, or files that are not those on record.
        """
        from rope_extend.checkpoint import saving  # here, because it may guard what it saves

        directory = saving.local_directory(name, revision=kwargs.get("revision"))
        record = saving.checked_record(directory, check_files=True)
        found = AutoModelForCausalLM.from_pretrained(name, *args, config=config.family, **kwargs)
        saving.apply_record(found[0] if isinstance(found, tuple) else found, record, directory)
        return found

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return AutoModelForCausalLM.from_config(config.family, **kwargs)


AutoConfig.register(MODEL_TYPE, GuardedConfig, exist_ok=True)
AutoModelForCausalLM.register(GuardedConfig, GuardedModel, exist_ok=True)
