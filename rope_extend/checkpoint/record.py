"""`rope_extend.json`, the record of a checkpoint's position encoding.

It is a file of its own, because a `config.json` in an adapter's directory keeps
`AutoModelForCausalLM.from_pretrained(adapter_directory)` from finding the base model.
"""

from __future__ import annotations

import logging
import re
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Self, cast

from accelerate.utils.constants import FSDP_MODEL_NAME
from packaging.version import InvalidVersion, Version
from torch import nn

from rope_extend.checkpoint.manifest import config_digests, locate, read_json, weight_digests
from rope_extend.checkpoint.model_type import plain_config
from rope_extend.checkpoint.peft_models import base_fingerprint, is_peft_model
from rope_extend.checkpoint.staging import how_to_restore
from rope_extend.checks import Checked, integer, such
from rope_extend.encodings import Encoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home, is_private, public_name, write_json
from rope_extend.journal import differences
from rope_extend.models.checkpoint_directory import ADAPTER_CONFIG, CONFIG, RECORD_NAME, is_adapter
from rope_extend.models.config_facts import CONFIG_RECORD
from rope_extend.models.decoders import unwrap
from rope_extend.models.gguf_checkpoint import gguf_file, how_to_convert
from rope_extend.models.loading import one_error
from rope_extend.patching import current_patch
from rope_extend.report.versions import package_version

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2
_ADDED = frozenset({"base_revision"})
"""Fields that the first records of this schema lack. A field that a reader must know needs a new schema."""
ADAPTER_MARK = "rope_extend"
"""The key in `auto_mapping` of an adapter's config that holds the encoding it was trained with. It is the one
part of that config which peft keeps unchanged, and for a model with a task type, nothing else uses it."""
_TEXT = such("text", lambda value: isinstance(value, str))
_NAME = such("a name that a model can have", lambda value: _is_name(value))
_REVISION = such("a branch, tag or commit", lambda value: _is_name(value) and ".." not in value)
_MAPPING = such("a mapping", lambda value: isinstance(value, dict))
_DIGESTS = such(
    "SHA-256 digests by file name",
    lambda value: (
        isinstance(value, dict) and all(re.fullmatch("[0-9a-f]{64}", str(each)) for each in value.values())
    ),
)


@cache
def checkpoint_versions() -> dict[str, str]:
    """Versions of the libraries that decide what a checkpoint computes, by package name."""
    return {name: package_version(name) for name in ("rope_extend", "torch", "transformers", "peft")}


@dataclass(frozen=True)
class Record(Checked):
    """The contents of `rope_extend.json`: a checkpoint's position encoding, and what it was made from.

    Attributes:
        encoding: the position encoding.
        shape: the rotary shape of the pretrained model.
        target_length: the extended window, in tokens.
        model_type: `config.model_type` of the base model.
        base_model: name or path of the base model; None if it has none, such as a model made in memory. In a
            full checkpoint, which does not need it, only the last part of a local path is recorded.
        base_revision: branch, tag or commit of the base model on the hub; None for the newest.
        base_fingerprint: fingerprint of the base model that an adapter was trained on, see
            `peft_models.base_fingerprint`; None in a full checkpoint, or if it could not be computed.
        weights: SHA-256 of every weight file next to the record, by name; empty if not computed.
        configs: SHA-256 of the contents of each config next to it, by name; empty if not computed.
        versions: versions of the libraries that wrote it.
        schema_version: version of the file's layout.
    """

    encoding: Encoding
    shape: RopeShape
    target_length: Annotated[int, integer(1)]
    model_type: Annotated[str, _TEXT]
    base_model: Annotated[str | None, _NAME] = None
    base_fingerprint: Annotated[str | None, _TEXT] = None
    base_revision: Annotated[str | None, _REVISION] = None
    weights: Annotated[dict[str, str], _DIGESTS] = field(default_factory=dict)
    configs: Annotated[dict[str, str], _DIGESTS] = field(default_factory=dict)
    versions: Annotated[dict[str, str], _MAPPING] = field(default_factory=lambda: dict(checkpoint_versions()))
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def of(cls, model: nn.Module, base_model: str | None = None, base_revision: str | None = None) -> Self:
        """The record of a patched model, without digests. For an adapter, it holds the base's fingerprint.

        The `revision` of an adapter's config is recorded, unless another one is given.
        """
        patch = current_patch(model)
        if patch is None:
            raise RopeExtendError(
                "this model carries no patch, so there is no encoding to record; apply rope_extend.extend "
                "first, or use the model's own save_pretrained"
            )
        config = unwrap(model).config
        name = base_model or config.name_or_path or None
        record = cls(
            patch.encoding, patch.shape, patch.target_length, config.model_type, name,
            base_revision=base_revision,
        )  # fmt: skip
        if not is_peft_model(model):
            return record.without_local_path()
        if is_peft_model(cast(Any, model).get_base_model()):
            # Its weights have names that no loader finds in the base model.
            raise RopeExtendError(
                "this model is a PeftModel around another PeftModel, and no loader could load its adapter; "
                "call get_peft_model once, on the base model, or merge the first adapter (merge_and_unload)"
            )
        configs = cast(Any, model).peft_config.values()
        pinned = next((each.revision for each in configs if each.revision), None)
        return replace(
            record, base_fingerprint=base_fingerprint(model), base_revision=base_revision or pinned
        )

    @property
    def schedule(self) -> dict[str, Any]:
        """What decides the positions that a model computes, as plain values: encoding, shape and window."""
        return {
            "encoding": self.encoding.to_dict(),
            "shape": asdict(self.shape),
            "target_length": self.target_length,
        }

    def base(
        self, directory: Path, name: str | None = None, revision: str | None = None
    ) -> tuple[str, str | None]:
        """Name and revision of the base model to load: those that were given, or else the recorded ones.

        The recorded revision is one of the recorded model, so it does not apply to another name.
        """
        name = expand_home(name) if name else self.base_model
        if name is None:
            raise RopeExtendError(
                f"the record in {directory} names no base model; give base_model= (--base-model)"
            )
        return name, revision or (self.base_revision if name == self.base_model else None)

    def without_local_path(self) -> Self:
        """The record of a full checkpoint: of a local path to its base model only the last part."""
        return replace(self, base_model=self.base_model and public_name(self.base_model))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the exact inverse."""
        data = {name: getattr(self, name) for name in ("schema_version", *self.__dataclass_fields__)}
        return data | self.schedule

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The record that `to_dict` described; unknown schema versions, keys and values are refused.

        Keys that a newer version of rope_extend has added within the schema are left out, with a warning.
        """
        if not isinstance(data, dict):
            raise RopeExtendError(f"a record is a mapping, got {type(data).__name__}")
        version = data.get("schema_version")
        if type(version) is not int or version != SCHEMA_VERSION:
            raise RopeExtendError(
                f"schema_version is {version!r}, and this version of rope_extend reads {SCHEMA_VERSION}; a "
                "newer one may have written it"
            )
        keys = set(cls.__dataclass_fields__)
        missing, unknown = sorted(keys - data.keys() - _ADDED), sorted(map(str, data.keys() - keys))
        writer = versions.get("rope_extend") if isinstance(versions := data.get("versions"), dict) else None
        if missing or (unknown and not _is_newer(writer)):
            raise RopeExtendError(f"missing keys: {missing}; unknown keys: {unknown}")
        if unknown:
            logger.warning(
                "rope_extend %s wrote this record, and its fields %s are ignored: this version does not know "
                "them; update rope_extend",
                writer, unknown,
            )  # fmt: skip
        data = {key: value for key, value in data.items() if key in keys}
        try:
            data |= {"encoding": Encoding.from_dict(data["encoding"]), "shape": RopeShape(**data["shape"])}
        except RopeExtendError:
            raise
        except Exception as error:  # values of types that no encoding checks for
            raise RopeExtendError(
                f"shape is {data['shape']!r}, encoding is {data['encoding']!r}: {error}"
            ) from error
        return cls(**data)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 4096 and "\0" not in value


def _is_newer(writer: Any) -> bool:
    """Whether a version of rope_extend is newer than this one."""
    try:
        return Version(writer) > Version(checkpoint_versions()["rope_extend"])
    except (InvalidVersion, TypeError):
        return False


def write_record(directory: str | PathLike[str], record: Record) -> None:
    """Write `rope_extend.json` into a directory, whole or not at all."""
    path = Path(directory) / RECORD_NAME
    with one_error(f"cannot write {path}"):
        write_json(path, record.to_dict(), durable=True)


def write_record_with_digests(directory: Path, record: Record, *, renamed: bool = False) -> None:
    """Write the record next to complete weights, with digests of all files.

    An adapter's config also gets a note of the encoding, with which a changed record does not agree. Call
    this last: files that change afterwards are refused on loading.

    `renamed`: the user gave the base model's name in the record, so it replaces the one in an adapter's
    config. Otherwise it only replaces a local path outside the working directory.
    """
    config = directory / ADAPTER_CONFIG
    if is_adapter(directory):
        data = read_json(config)
        note = "trained with this position encoding, which peft does not apply: use rope_extend.load"
        mark = {**record.schedule, "note": note}
        data["auto_mapping"] = {**(data.get("auto_mapping") or {}), ADAPTER_MARK: mark}
        named = data.get("base_model_name_or_path")
        if record.base_model and (renamed or (isinstance(named, str) and is_private(named))):
            data["base_model_name_or_path"] = record.base_model
        with one_error(f"cannot write {config}"):
            write_json(config, data, durable=True)
    with one_error(f"cannot read the checkpoint {directory}"):
        record = replace(record, weights=weight_digests(directory), configs=config_digests(directory))
    write_record(directory, record)


def check_agreement(directory: Path, record: Record) -> None:
    """Refuse a record that disagrees with the config next to it about the encoding."""
    path = directory / ADAPTER_CONFIG
    if is_adapter(directory):
        mapping = read_json(path).get("auto_mapping")
        note = mapping.get(ADAPTER_MARK) if isinstance(mapping, dict) else None
    else:
        path = directory / CONFIG
        note = plain_config(read_json(path)).get(CONFIG_RECORD)
    if note is None:
        return
    noted = {key: note.get(key) for key in record.schedule} if isinstance(note, dict) else {}
    if changed := differences(noted, record.schedule):
        raise RopeExtendError(
            f"{path} does not agree with the {RECORD_NAME} next to it: {changed}. One of the two is not what "
            "was saved; restore the directory, or save the model again"
        )


def read_record(directory: str | PathLike[str]) -> Record:
    """The record in a directory; one that is missing, damaged or of another schema is refused."""
    path = Path(directory) / RECORD_NAME
    with one_error(f"cannot read {directory}"):
        exists = path.exists()
    if not exists:
        if not path.parent.exists():
            raise RopeExtendError(f"there is no directory {directory} (in {Path.cwd()})")
        if (file := gguf_file(path.parent)) is not None:
            raise RopeExtendError(
                f"{file} is a GGUF file, not a checkpoint of rope_extend. To load it, {how_to_convert(file)}"
            )
        if shards := [each.name for each in path.parent.glob(f"{FSDP_MODEL_NAME}_*")]:
            raise RopeExtendError(
                f"{directory} is a checkpoint of FSDP, with the weights in shards ({shards[0]}) that only a "
                "resumed run reads. Resume the run, and load its output directory; or train with "
                "fsdp_state_dict_type FULL_STATE_DICT, whose checkpoints can be loaded"
            )
        advice = how_to_restore(path.parent) or (
            "peft wrote this adapter; if you know how its model was extended, extend it so again, load the "
            "adapter with peft, and save it with rope_extend.save"
            if is_adapter(path.parent)
            else "rope_extend did not save it. Extend that model first, with `rope-extend finetune` or in "
            "Python, with rope_extend.extend and rope_extend.save"
        )
        raise RopeExtendError(f"no {RECORD_NAME} in {directory}: {advice}")
    data = read_json(locate(path.parent, RECORD_NAME))
    if data.get("base_revision") is None and is_adapter(path.parent):
        data["base_revision"] = read_json(locate(path.parent, ADAPTER_CONFIG)).get("revision")
    try:
        return Record.from_dict(data)
    except RopeExtendError as error:
        raise RopeExtendError(f"{path}: {error}") from error
