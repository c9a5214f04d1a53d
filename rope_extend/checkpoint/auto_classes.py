"""The classes that transformers' auto classes use for plugin-only checkpoints.

`auto_registration` imports this module while transformers imports `configuration_auto`. So the top of this
module must not import the rest of transformers.
"""

from __future__ import annotations

import copy
from os import PathLike
from typing import Any

from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rope_extend.checkpoint.model_type import FAMILY, MODEL_TYPE, plain_config
from rope_extend.errors import RopeExtendError

_OWN = ("__class__", "__dict__", "family", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__")
"""The attributes that are not the family's: a copy of the family's config would load without the encoding."""

_SET_BY_MODELS = "_attn_implementation_internal"
"""What every model of transformers sets first in the config that it is made of. `GuardedModel` hands over the
family's config, so a model that sets it in a `GuardedConfig` is made without the encoding."""


class GuardedConfig(PretrainedConfig):  # type: ignore[misc]  # transformers is untyped
    """The config of a plugin-only checkpoint. It wraps the family's own config, in `family`.

    Every attribute is the family's, `model_type` included, so code that only reads the config works. Copies
    and pickles are wrapped too.
    """

    model_type = MODEL_TYPE
    family: Any

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config of the family, wrapped."""
        data = plain_config(config_dict)
        model_type = data.get("model_type")
        if model_type not in CONFIG_MAPPING:
            raise RopeExtendError(
                f"config.json: {FAMILY} is {model_type!r}, which this transformers does not know"
            )
        result = CONFIG_MAPPING[model_type].from_dict(data, **kwargs)
        # With `return_unused_kwargs`, it is a tuple.
        return (_wrapped(result[0]), *result[1:]) if isinstance(result, tuple) else _wrapped(result)

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "__dict__")["family"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == _SET_BY_MODELS:
            raise RopeExtendError(
                "this config is of a checkpoint that only rope_extend reads, and this class would make its "
                "model without its encoding; load it with rope_extend.load or "
                "AutoModelForCausalLM.from_pretrained"
            )
        setattr(self.family, name, value)

    def __copy__(self) -> GuardedConfig:
        return _wrapped(copy.copy(self.family))

    def __reduce__(self) -> tuple[Any, ...]:
        return _wrapped, (self.family,)  # for `copy.deepcopy` and `pickle`


def _wrapped(family: Any) -> GuardedConfig:
    config = GuardedConfig.__new__(GuardedConfig)
    config.__dict__["family"] = family
    return config


class GuardedModel:
    """The model class of a plugin-only checkpoint: it returns the family's own model, patched."""

    config_class = GuardedConfig

    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], *args: Any, config: Any, **kwargs: Any) -> Any:
        """The patched model, or the tuple with it that `from_pretrained` returns."""
        from rope_extend.checkpoint.restoring import apply_record, checked_record
        from rope_extend.models.loading import auto_class
        from rope_extend.models.locating import hub_options, local_directory, refuse_other_files

        refuse_other_files(kwargs)
        directory = local_directory(name, **hub_options(kwargs))
        record = checked_record(directory, check_files=True)
        result = auto_class(config.family).from_pretrained(name, *args, config=config.family, **kwargs)
        apply_record(result[0] if isinstance(result, tuple) else result, record, directory)
        return result

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(config.family, **kwargs)
