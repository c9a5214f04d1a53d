"""Export of a checkpoint in the form that stock transformers, vLLM, SGLang or llama.cpp reads.

Whether a target supports an encoding follows from what the encoding does, not from its name. The facts about
the targets come from their sources:

- transformers, `modeling_rope_utils.py`: `longrope` takes any list of divisors and an `attention_factor`. It
  chooses the list by the longest row of a batch; `dynamic` chooses its base in the same way.
- vLLM, `vllm/model_executor/layers/rotary_embedding/__init__.py` and its neighbours: `get_rope` knows
`default`,
  `linear`, `llama3`, `yarn` and `longrope`, and raises on unknown types. Its `longrope` has no
  `attention_factor` but `short_mscale` and `long_mscale`. It uses the long list for all texts if
  `--max-model-len` exceeds the trained window, and raises if pairs are neighbours. Which of YaRN's keys for
  attention it reads differs between versions. `_get_and_verify_max_len`: the window is
  `max_position_embeddings` times `factor`; for `yarn` the original one times `factor`; for `longrope` and
  `llama3` `max_position_embeddings`.
- SGLang, `python/sglang/srt/layers/rotary_embedding/factory.py`, `yarn.py` and `rope_variant.py`: the same
types
  and the same keys in `longrope`; `yarn` has no `attention_factor`. Its `longrope` looks up position L as
  position 0 if the batch has no later one, where L is `original_max_position_embeddings`.
  `get_context_length`: `max_position_embeddings` times `factor`, unless there is an original one.
- both, for methods that rotate distant pairs in another way: see `served_remaps.py`.
- llama.cpp: see `rope_extend.checkpoint.export.gguf`.
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

import torch
from torch import nn
from transformers import AutoConfig

from rope_extend.checkpoint.export.gguf import annotate, can_verify, is_float32, verify_gguf
from rope_extend.checkpoint.export.gguf_weights import check_same_weights
from rope_extend.checkpoint.export.support import Support, gguf_refusal, support
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.checkpoint.hub import local_directory
from rope_extend.checkpoint.manifest import RECORD_NAME, locate, read_json
from rope_extend.checkpoint.merging import merge
from rope_extend.checkpoint.model_type import plain_config
from rope_extend.checkpoint.record import Record, seal, write_record
from rope_extend.checkpoint.restoring import checked_record, load
from rope_extend.checkpoint.saving import save
from rope_extend.checkpoint.staging import CHAT_TEMPLATES, refuse_base_model, staged
from rope_extend.checkpoint.verifying import verify as verify_checkpoint
from rope_extend.encodings import DualChunk, RopeEncoding, encoding
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home, write_json
from rope_extend.models.families import adapter_for
from rope_extend.models.loading import empty_model, one_error, pretrained
from rope_extend.models.stock_config import (
    DUAL_CHUNK_KEY,
    softmax_scale_of,
    window_values,
    with_carried,
)
from rope_extend.models.view import CONFIG_RECORD, ORIGINAL_WINDOW, has_tables_of, rotary_tables
from rope_extend.units import format_length

logger = logging.getLogger(__name__)

_LEFT_BEHIND = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf")
"""Suffixes of files that are not exported: the state of a training run, and models of another format."""
_REWRITTEN = ("config.json", RECORD_NAME, "verification.json")
_STOCK_KEYS = ("rope_parameters", "max_position_embeddings")
"""The keys of a form that every family has."""


def export(
    model: nn.Module | str | PathLike[str],
    output: str | PathLike[str],
    to: str = "transformers",
    *,
    overwrite: bool = False,
    verify: bool = True,
    base_model: str | None = None,
    gguf: str | PathLike[str] | None = None,
    target_version: str | None = None,
) -> Path:
    """Write a checkpoint that a target reads without this library; returns its directory.

    Weights are linked, or copied to another disk, byte for byte. The directory appears when it is complete
    and, if asked for, verified.

    Args:
        model: a patched model, or a directory that `rope_extend.save` or `rope_extend.merge` wrote. A model
            is saved to a temporary directory next to the output first; its tokenizer is not exported. An
            adapter is merged first, except for llama.cpp, where it is refused.
        output: the output directory; created if missing.
        to: `transformers`, `vllm`, `sglang` or `llama.cpp`.
        overwrite: replace a checkpoint in the output directory; other files stay.
        verify: compare the logits with those of the patched model. Stock transformers computes them in a
            process of its own; for llama.cpp, llama.cpp does if llama-cpp-python is installed.
        base_model: name or path of an adapter's base model; overrides the one in the record.
        gguf: for llama.cpp, the file that its `convert_hf_to_gguf.py` wrote from these weights. It keeps its
            weights, so merge an adapter before the conversion.
        target_version: the version of vLLM, such as `0.10`: only 0.9 and 0.10 compute `dual_chunk`.

    Raises:
        RopeExtendError: the target does not support the encoding, with the reason; the model is not patched;
            the directory is not a checkpoint or is damaged; the output is in use; or the logits differ.
    """
    target = Path(expand_home(output))
    gguf = None if gguf is None else expand_home(gguf)
    if not isinstance(model, nn.Module):
        source = local_directory(model)
        record = checked_record(source, check_files=True)
        if target.exists() and source.resolve() == target.resolve():
            raise RopeExtendError(f"{target} is the checkpoint itself; choose another output")
        if (source / "adapter_config.json").exists():
            refuse_base_model(target, base_model or record.base_model)
        form = _checked_form(record, target, to, gguf, overwrite, target_version)
        return _export(source, target, record, form, overwrite, verify, base_model, gguf)
    form = _checked_form(Record.of(model, base_model), target, to, gguf, overwrite, target_version)
    existing = next(path for path in (target.parent, *target.parent.parents) if path.exists())
    try:
        # On the disk of the output, so that weights can be linked.
        temporary = TemporaryDirectory(dir=existing, prefix=".export-", ignore_cleanup_errors=True)
    except OSError as error:
        raise RopeExtendError(f"cannot write next to {target}: {error}; choose another output") from error
    with temporary as directory:
        source = save(model, Path(directory) / "model", base_model=base_model)
        record = checked_record(source, check_files=False)
        return _export(source, target, record, form, overwrite, verify, base_model, gguf)


def _checked_form(
    record: Record,
    target: Path,
    to: str,
    gguf: str | PathLike[str] | None,
    overwrite: bool,
    version: str | None,
) -> Support:
    """How a target computes the recorded encoding.

    Raises:
        RopeExtendError: it does not, or the arguments do not fit together.
    """
    form = support(
        record.encoding, record.shape, to, record.model_type,
        target_length=record.target_length, target_version=version,
    )  # fmt: skip
    if version is not None and not (to == "vllm" and isinstance(record.encoding, DualChunk)):
        raise RopeExtendError(
            f"target_version={version} only decides whether vLLM computes dual_chunk; leave it out for "
            f"{record.encoding.name} and {to}"
        )
    if gguf is not None and (file := target / Path(gguf).name).exists():
        if os.path.samefile(file, gguf):
            raise RopeExtendError(f"{file} is the source itself; choose another output")
        if not overwrite:
            raise RopeExtendError(
                f"{target} already holds {file.name}; choose another output, or overwrite=True"
            )
    if to != "llama.cpp":
        if not form.possible:
            raise _refusal(record, form)
        if gguf is not None:
            raise RopeExtendError(f"gguf= is for llama.cpp; {to} reads safetensors")
        return form
    if gguf is None:
        raise RopeExtendError(
            "llama.cpp reads GGUF, and no file was given: convert the weights with its "
            "convert_hf_to_gguf.py, and give the file as gguf="
        )
    # The file's architecture decides whether it can hold a table. The family is only a guess at it.
    if refusal := gguf_refusal(record.encoding, record.shape, record.model_type):
        raise _refusal(record, refusal)
    return form


def _export(
    source: Path,
    target: Path,
    record: Record,
    form: Support,
    overwrite: bool,
    verify: bool,
    base_model: str | None,
    gguf: str | PathLike[str] | None,
) -> Path:
    """Write the export of a checkpoint's directory.

    Raises:
        RopeExtendError: an adapter and a GGUF file are given.
    """
    adapter = (source / "adapter_config.json").exists()
    if gguf is not None and adapter:
        raise RopeExtendError(
            f"this is an adapter, and {Path(gguf).name} keeps its weights, so the adapter's would be "
            "missing. Merge it first (rope-extend merge), convert the merged directory with llama.cpp's "
            "convert_hf_to_gguf.py, and export that directory with the new file"
        )
    with staged(target, overwrite=overwrite) as staging:
        if gguf is not None:
            _export_gguf(source, staging, record, Path(gguf), verify)
            return target
        # Inside the export's directory, so that the merged weights can be linked; removed before it appears.
        with TemporaryDirectory(dir=staging, ignore_cleanup_errors=True) as merged:
            if adapter:
                source = merge(source, merged, base_model=base_model)
            _export_config(source, staging, record, form)
            if verify:
                _verify(staging, source, record)
    return target


def _refusal(record: Record, form: Support) -> RopeExtendError:
    targets = [
        target
        for target in TARGETS
        if support(record.encoding, record.shape, target, record.model_type).possible
    ]
    instead = f"it can be exported to {', '.join(targets)}" if targets else "load it with rope_extend.load"
    static = encoding("yarn", factor=2.0)
    if (
        isinstance(record.encoding, RopeEncoding)
        and support(static, record.shape, form.target, record.model_type).possible
    ):
        instead += f", or extend with a method that has one table, such as {static.name}"
    return RopeExtendError(
        f"{record.encoding} of a {record.model_type} model cannot be exported to {form.target}: "
        f"{form.reason}; {instead}"
    )


def _export_gguf(source: Path, staging: Path, record: Record, gguf: Path, verify: bool) -> None:
    """Fill a directory with the annotated file, and with a record that lists no other files."""
    path = annotate(gguf, staging / gguf.name, record)
    check_same_weights(gguf, source)
    write_record(staging, replace(record.without_local_path(), weights={}, configs={}))
    if not verify:
        return
    missing = "" if can_verify() else "llama-cpp-python is not installed"
    if missing or not is_float32(path):
        reason = missing or "its weights are rounded; convert them with --outtype f32 to compare"
        logger.warning("%s was not compared with the original: %s", gguf.name, reason)
        return
    gap = verify_gguf(path, load(source, dtype=torch.float32), record)
    logger.info("llama.cpp computes the original's logits from %s, within %.1g", gguf.name, gap)


def _export_config(source: Path, staging: Path, record: Record, form: Support) -> None:
    """Fill a directory with the checkpoint's files and a config in the target's form."""
    assert form.form is not None
    data = _without_dual_chunk(plain_config(read_json(source / "config.json")))
    pairs = _stock_pairs(source)
    with one_error(f"{source / 'config.json'} is damaged"):
        config = pretrained(AutoConfig, str(source))
        configs = [_with_form(data, config, form.form)]
    if DUAL_CHUNK_KEY in form.form:
        _check_layers(config, record, form)
    elif form.target == "transformers" or form.form["rope_parameters"]["rope_type"] == "default":
        configs.insert(0, data)  # the saved config also has the family's own settings
    for values in configs:
        write_json(staging / "config.json", values)
        if _stock_computes(staging, record, pairs, as_saved=values is data):
            break
    else:
        raise RopeExtendError(
            f"{record.encoding} cannot be exported to {form.target}: the config of this {record.model_type} "
            f"model does not hold its table {form.reason}; load it with rope_extend.load"
        )
    for path in sorted(source.iterdir()):
        hidden = path.name.startswith(".") or path.suffix in _LEFT_BEHIND
        if hidden or not path.is_file() or path.name in _REWRITTEN:
            continue
        _link(locate(source, path.name), staging / path.name)
    for path in sorted((source / CHAT_TEMPLATES).glob("*.jinja")):
        (staging / CHAT_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(locate(source, f"{CHAT_TEMPLATES}/{path.name}"), staging / CHAT_TEMPLATES / path.name)
    seal(staging, record.without_local_path())


def _link(path: Path, target: Path) -> None:
    """Link weights, which nothing here changes; copy small files, which users edit."""
    if target.suffix == ".safetensors":
        with suppress(OSError):  # another disk, or a file system without links
            os.link(path, target)
            return
    shutil.copy2(path, target)


def _without_dual_chunk(part: dict[str, Any]) -> dict[str, Any]:
    """A copy of `config.json` without the key of dual chunk attention, also in nested configs.

    A pretrained model or an earlier export may have it; engines would apply it to any encoding.
    """
    return {
        key: _without_dual_chunk(value) if isinstance(value, dict) else value
        for key, value in part.items()
        if key != DUAL_CHUNK_KEY
    }


def _with_form(data: dict[str, Any], config: Any, form: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config.json` with the target's rotary parameters, at the family's place for them."""
    result: dict[str, Any] = copy.deepcopy(data)
    adapter = adapter_for(config.model_type)
    kind, part = adapter.layer_type(config), result
    for name in filter(None, adapter.config_path.split(".")):
        part = part[name]
    old = part["rope_parameters"]
    current = old if kind is None else old[kind]
    parameters: Any = with_carried(form["rope_parameters"], current)
    if adapter.completes is not None:
        parameters = adapter.completes(parameters)
    part["rope_parameters"] = parameters if kind is None else {**old, kind: parameters}
    original = parameters.get(ORIGINAL_WINDOW) or None
    part |= window_values(form["max_position_embeddings"], original if part.get(ORIGINAL_WINDOW) else None)
    if CONFIG_RECORD in result:
        result[CONFIG_RECORD]["rope_parameters"] = parameters
    return {**result, **{key: form[key] for key in form if key not in _STOCK_KEYS}}


def _check_layers(config: Any, record: Record, form: Support) -> None:
    """Refuse a model that has layers with a sliding window, which an engine would process otherwise.

    Raises:
        RopeExtendError: the model has such layers.
    """
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise RopeExtendError(
            f"{record.encoding} cannot be exported to {form.target}: this {record.model_type} model has "
            f"layers with a sliding window, where {form.target} would apply {DUAL_CHUNK_KEY} as well; load "
            f"it with rope_extend.load"
        )


def _stock_pairs(directory: Path) -> list[int]:
    """The number of pairs of each rotary module, including pairs with frequency zero."""
    return [len(table) for table, _ in rotary_tables(empty_model(str(directory)), 1)]


def _stock_computes(directory: Path, record: Record, pairs: list[int], *, as_saved: bool) -> bool:
    """Whether stock transformers computes the recorded schedule from a directory's config.

    In DeepSeek's families, the rotary parameters also scale the attention logits. A saved config has the
    right scale; a config with other parameters would change it.
    """
    encoding, lengths = record.encoding, (record.shape.trained_length, record.target_length)
    assert isinstance(encoding, RopeEncoding)
    try:
        model = empty_model(str(directory))
        if not as_saved and softmax_scale_of(model) is not None:
            return False
        return _stock_pairs(directory) == pairs and has_tables_of(model, encoding, record.shape, lengths)
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        logger.debug("stock transformers does not accept the config in %s: %s", directory, error)
        return False


def _verify(directory: Path, original: Path, record: Record) -> None:
    length = None
    if isinstance(record.encoding, DualChunk):
        length = record.encoding.chunk
        logger.warning(
            "compared with the original up to %s, one chunk: stock transformers ignores %s, and processes "
            "longer texts as the model was pretrained",
            format_length(length), DUAL_CHUNK_KEY,
        )  # fmt: skip
    verification = verify_checkpoint(directory, reference=original, length=length)
    if verification.verdict != "equal":
        raise RopeExtendError(f"the export computes other logits than the original: {verification.reason}")
