"""Export of a checkpoint in the form that stock transformers, vLLM, SGLang or llama.cpp reads.

`export/targets.py` says what each target reads, `export/support.py` chooses the form, and this module
writes it.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from rope_extend.checkpoint.card import carry_card
from rope_extend.checkpoint.export.gguf import annotate, check_same_weights
from rope_extend.checkpoint.export.support import Support, support
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.checkpoint.manifest import locate, read_json
from rope_extend.checkpoint.merging import merge
from rope_extend.checkpoint.model_type import plain_config
from rope_extend.checkpoint.record import Record, write_record, write_record_with_digests
from rope_extend.checkpoint.restoring import checked_record
from rope_extend.checkpoint.staging import refuse_base_model, staged
from rope_extend.checkpoint.verifying import verify as verify_checkpoint
from rope_extend.encodings import RopeEncoding
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home, write_json
from rope_extend.models.checkpoint_directory import CONFIG, RECORD_NAME, is_adapter
from rope_extend.models.config_facts import CONFIG_RECORD, ORIGINAL_WINDOW
from rope_extend.models.families import family_for
from rope_extend.models.loading import empty_model, one_error
from rope_extend.models.locating import local_directory
from rope_extend.models.rotary_tables import has_tables_of, rotary_tables
from rope_extend.models.stock_config import latent_attention, with_carried

logger = logging.getLogger(__name__)

_LEFT_BEHIND = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf")
"""Suffixes of files that are not exported: the state of a training run, and models of another format."""
_REWRITTEN = (CONFIG, RECORD_NAME)
_LOAD = "load it with rope_extend.load"


def export(
    directory: str | PathLike[str],
    output: str | PathLike[str],
    to: str = "transformers",
    *,
    overwrite: bool = False,
    verify: bool = True,
    base_model: str | None = None,
    gguf: str | PathLike[str] | None = None,
) -> Path:
    """Write a checkpoint that a target reads without this library; returns its directory.

    Weights are linked, or copied to another disk, byte for byte. The directory appears when it is complete
    and, if asked for, verified.

    Args:
        directory: what `rope_extend.save` or `rope_extend.merge` wrote, or its hub id. An adapter is merged
            first, except for llama.cpp, where it is refused.
        output: the output directory; created if missing.
        to: `transformers`, `vllm`, `sglang` or `llama.cpp`.
        overwrite: replace a checkpoint in the output directory; other files stay.
        verify: compare the logits of stock transformers, in a process of its own, with those of the patched
            model. A GGUF file is not run: only its weights are compared with those of the checkpoint.
        base_model: name or path of an adapter's base model; overrides the one in the record.
        gguf: for llama.cpp, the file that its `convert_hf_to_gguf.py` wrote from these weights. It keeps its
            weights, so merge an adapter before the conversion.

    Raises:
        RopeExtendError: the target does not support the encoding, with the reason; the directory is not a
            checkpoint or is damaged; the output is in use; or the logits differ.
    """
    target, file = Path(expand_home(output)), None if gguf is None else Path(expand_home(gguf))
    source = local_directory(directory)
    record, adapter = checked_record(source, check_files=True), is_adapter(source)
    if target.exists() and source.resolve() == target.resolve():
        raise RopeExtendError(f"{target} is the checkpoint itself; choose another output")
    if adapter:
        refuse_base_model(target, base_model or record.base_model)
    form = _checked_form(record, target, to, file, source if adapter else None)
    # What is merged first lies next to the export, so that its weights can be linked.
    with (
        staged(target, overwrite=overwrite) as staging,
        TemporaryDirectory(dir=staging, ignore_cleanup_errors=True) as work,
    ):
        if file is not None:
            annotate(file, staging / file.name, record)
            check_same_weights(file, source)
            write_record(staging, replace(record.without_local_path(), weights={}, configs={}))
            return target
        if adapter:
            source = merge(source, Path(work) / "merged", base_model=base_model)
        _export_config(source, staging, record, form)
        carry_card(source, staging, target.resolve().name)
        if verify:
            verification = verify_checkpoint(staging, reference=source)
            if verification.verdict != "equal":
                raise RopeExtendError(
                    f"the export computes other logits than the original: {verification.reason}"
                )
    return target


def _checked_form(record: Record, target: Path, to: str, file: Path | None, adapter: Path | None) -> Support:
    """How a target computes the recorded encoding; refused if it does not, or if arguments do not fit."""
    # The architecture of the GGUF file decides whether it can hold a table; the family is only a guess at it.
    form = support(
        record.encoding, record.shape, to, record.model_type,
        target_length=record.target_length, architecture="llama",
    )  # fmt: skip
    if not form.possible:
        raise RopeExtendError(
            f"{record.encoding} of a {record.model_type} model cannot be exported to {to}: {form.reason}; "
            f"{_LOAD}, or see rope-extend export --support"
        )
    if adapter and TARGETS[to].reads == "gguf":
        raise RopeExtendError(
            f"this is an adapter, and {to} reads a GGUF file, which has none of its weights. Merge it first "
            f"(rope-extend merge {str(adapter)!r} --output MERGED), convert MERGED with llama.cpp's "
            "convert_hf_to_gguf.py, and export MERGED with the new file"
        )
    if file is None and TARGETS[to].reads == "gguf":
        raise RopeExtendError(
            f"{to} reads GGUF, and no file was given: convert the weights with its convert_hf_to_gguf.py, "
            "and give the file as gguf="
        )
    if file is not None:
        if TARGETS[to].reads != "gguf":
            raise RopeExtendError(f"gguf= is for llama.cpp; {to} reads safetensors")
        if (existing := target / file.name).exists() and os.path.samefile(existing, file):
            raise RopeExtendError(f"{file} is the source itself; choose another output")
    return form


def _export_config(source: Path, staging: Path, record: Record, form: Support) -> None:
    """Fill a directory with the checkpoint's files and a config in the target's form."""
    assert form.form is not None
    values = plain_config(read_json(source / CONFIG))
    # What `save` wrote for stock transformers also has the family's own settings.
    as_saved = form.target == "transformers" or form.form["rope_parameters"]["rope_type"] == "default"
    with one_error(f"{source / CONFIG} is damaged"):
        model = empty_model(str(source))
        values = values if as_saved else _with_form(values, model.config, form.form)
    write_json(staging / CONFIG, values)
    if not _stock_computes(staging, record, stock_pairs(model), as_saved=as_saved):
        raise RopeExtendError(
            f"{record.encoding} cannot be exported to {form.target}: the config of this {record.model_type} "
            f"model does not hold its table {form.reason}; {_LOAD}"
        )
    for path in sorted(source.iterdir()):
        hidden = path.name.startswith(".") or path.suffix in _LEFT_BEHIND
        if not hidden and path.is_file() and path.name not in _REWRITTEN:
            _link(locate(source, path.name), staging / path.name)
    write_record_with_digests(staging, record.without_local_path())


def _link(path: Path, target: Path) -> None:
    """Link weights, which nothing here changes; copy small files, which users edit."""
    if target.suffix == ".safetensors":
        with suppress(OSError):  # another disk, or a file system without links
            os.link(path, target)
            return
    shutil.copy2(path, target)


def _with_form(data: dict[str, Any], config: Any, form: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config.json` with the target's rotary parameters, at the family's place for them."""
    result: dict[str, Any] = copy.deepcopy(data)
    family = family_for(config.model_type)
    kind, part = family.layer_type(config), result
    for name in filter(None, family.config_path.split(".")):
        part = part[name]
    old = part["rope_parameters"]
    current = old if kind is None else old[kind]
    parameters: Any = with_carried(form["rope_parameters"], current)
    if family.completes is not None:
        parameters = family.completes(parameters)
    part["rope_parameters"] = parameters if kind is None else {**old, kind: parameters}
    part["max_position_embeddings"] = form["max_position_embeddings"]
    if part.get(ORIGINAL_WINDOW) and (original := parameters.get(ORIGINAL_WINDOW)):
        part[ORIGINAL_WINDOW] = original
    for owner in (result, part):
        if CONFIG_RECORD in owner:
            owner[CONFIG_RECORD]["rope_parameters"] = parameters
    return result


def stock_pairs(model: nn.Module) -> list[int]:
    """The number of pairs of each rotary module of a model, including pairs with frequency zero."""
    return [len(table) for table, _ in rotary_tables(model, 1)]


def _stock_computes(directory: Path, record: Record, pairs: list[int], *, as_saved: bool) -> bool:
    """Whether stock transformers computes the recorded schedule from a directory's config.

    In DeepSeek's families, the rotary parameters also scale the attention logits. A saved config has the
    right scale; a config with other parameters would change it.
    """
    encoding, lengths = record.encoding, (record.shape.trained_length, record.target_length)
    assert isinstance(encoding, RopeEncoding)
    try:
        model = empty_model(str(directory))
        if not as_saved and latent_attention(model):
            return False
        return stock_pairs(model) == pairs and has_tables_of(model, encoding, record.shape, lengths)
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        logger.debug("stock transformers does not accept the config in %s: %s", directory, error)
        return False
