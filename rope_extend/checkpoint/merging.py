"""Merging an adapter into its base model: one plain checkpoint, exact.

peft's own layers compute each merged weight in float32, and the result is rounded once. So memory holds the
model in its own dtype, and one layer in float32.
"""

from __future__ import annotations

import logging
import os
import shutil
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from rope_extend.checkpoint.card import add_card
from rope_extend.checkpoint.manifest import check_finite, locate, read_json
from rope_extend.checkpoint.peft_models import changes_base, tuner_layers
from rope_extend.checkpoint.record import Record
from rope_extend.checkpoint.restoring import attach, checked_record, load_base
from rope_extend.checkpoint.saving import complete_checkpoint, write_model, write_tokenizer
from rope_extend.checkpoint.staging import refuse_base_model, staged
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home
from rope_extend.models.checkpoint_directory import ADAPTER_CONFIG, NOTICES, is_adapter, matches
from rope_extend.models.gguf_checkpoint import gguf_file, how_to_convert
from rope_extend.models.loading import one_error, pretrained
from rope_extend.models.locating import GGUF, local_directory
from rope_extend.models.parameters import is_learned

logger = logging.getLogger(__name__)

_SENTENCEPIECE = "tokenizer.model"
"""The file from which llama.cpp's converter takes scores of tokens. transformers reads it, but does not write
it again."""


def merge(
    adapter: str | PathLike[str],
    output: str | PathLike[str],
    *,
    base_model: str | None = None,
    base_revision: str | None = None,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Merge an adapter into its base model; returns the directory of the plain checkpoint.

    A weight that the adapter changes is computed in float32 and rounded once. Every other weight is the base
    model's own, bit for bit. The directory gets the weights, a `config.json` for stock transformers,
    `rope_extend.json`, a model card, the tokenizer of the adapter or else of the base model, and the base
    model's generation config, license and notices.

    Memory holds the model in its own dtype. It is in float32 if `dtype` is given, if the base model is stored
    in float16, or if the adapter changes the base model's weights, as PiSSA does.

    Args:
        adapter: a LoRA adapter's directory or hub id, with its record.
        output: the output directory; created if missing.
        base_model: name or path of the base model; overrides the one in the record.
        base_revision: as in `rope_extend.load`.
        overwrite: replace a checkpoint in the output directory; other files stay.
        dtype: dtype of all floating-point weights; default: that of the base model.
        max_shard_size: maximum size of one weight file, in bytes or like "5GB".

    Raises:
        RopeExtendError: the record or the adapter is missing or damaged; the base model is missing, quantised
            or a different one; the adapter cannot be merged; a weight is not finite; or the output directory
            is in use, or is the adapter or the base model.
    """
    adapter, output = local_directory(adapter), Path(expand_home(output))
    record = checked_record(adapter, check_files=True)
    config = _adapter_config(adapter)
    name, revision = record.base(adapter, base_model, base_revision)
    if output.resolve() == adapter.resolve():
        raise RopeExtendError(f"{output} is the adapter itself; choose another directory")
    refuse_base_model(output, name)
    if (path := gguf_file(name)) is not None:
        raise RopeExtendError(
            "the base model is a GGUF file, and a merge reads and writes checkpoints of transformers; "
            f"{how_to_convert(path)}, and give it as base_model="
        )
    with staged(output, overwrite=overwrite) as directory:
        files = local_directory(name, "base model", "base_model=", revision=revision)
        base = _merged(files, adapter, record, config, dtype)
        write_model(base, directory, max_shard_size)
        _copy_tokenizer(adapter, files, record.target_length, directory)
        _copy_notices(files, directory, output)
        complete_checkpoint(directory, base, Record.of(base, name, revision))
        check_finite(directory)
    if base.get_output_embeddings() is not None:  # the card is one of a language model
        add_card(output, trained_in=adapter)
    return output


def _adapter_config(adapter: Path) -> Any:
    """The config of a LoRA adapter that can be merged."""
    from peft import PeftConfig

    if not is_adapter(adapter):
        raise RopeExtendError(
            f"{adapter} holds no adapter ({ADAPTER_CONFIG}), so there is nothing to merge: a model of "
            "which all weights were trained is used as it is"
        )
    with one_error(f"cannot read {adapter / ADAPTER_CONFIG}"):
        config = PeftConfig.from_pretrained(str(adapter))
    if config.peft_type != "LORA":
        raise RopeExtendError(
            f"{adapter} is a {config.peft_type} adapter and only LoRA is merged; try peft's own merge: "
            "rope_extend.load(...).merge_and_unload()"
        )
    if config.layer_replication:
        raise RopeExtendError(
            f"the adapter in {adapter} repeats layers of its base model (layer_replication), which cannot be "
            "merged; use it with rope_extend.load"
        )
    return config


def _merged(files: Path, adapter: Path, record: Record, config: Any, dtype: torch.dtype | None) -> Any:
    """The base model in `files`, patched, with the adapter merged into its weights."""
    if read_json(files / "config.json").get("quantization_config") is not None:
        raise RopeExtendError(f"the base model {files} is quantised; give the original model as base_model=")
    advice = "; give the former as base_model="
    if record.base_model is not None and record.base_model.lower().endswith(GGUF):
        advice = f". Of the former, {how_to_convert(record.base_model)}, and give it as base_model="
    base = load_base(str(files), adapter, dtype="auto")
    dtypes = {name: weight.dtype for name, weight in base.named_parameters(remove_duplicate=False)}
    # Weights in float16 tell in float32 alone whether they are those that the adapter was trained on.
    if dtype is not None or base.dtype == torch.float16 or changes_base(config):
        base.float()
    model = attach(base, adapter, record, advice=advice)
    with one_error(f"the adapter in {adapter} cannot be merged"):
        model.base_model._check_merge_allowed()
        _untie(base)
        for _, layer in tuner_layers(model):
            _merge_layer(layer)
        model.unload()
        _tie_equal(base)
    for name, weight in base.named_parameters():
        if not is_learned(name):
            weight.data = weight.data.to(dtype or dtypes[name])
    return base


def _merge_layer(layer: Any) -> None:
    """Let peft merge a layer in float32, and round the result to the dtypes that the weights had."""
    inner = layer.get_base_layer()
    dtypes = {name: weight.dtype for name, weight in inner.named_parameters()}
    inner.float()
    layer.merge(safe_merge=True)
    for name, weight in inner.named_parameters():
        weight.data = weight.data.to(dtypes[name])


def _untie(base: nn.Module) -> None:
    """Give each module its own copy of a weight that it shares: peft's merge would change it in all."""
    seen: set[int] = set()
    for module in base.modules():
        for name, weight in module._parameters.items():
            if weight is not None and id(weight) in seen:
                module._parameters[name] = nn.Parameter(weight.data.clone(), requires_grad=False)
            seen.add(id(weight))


def _tie_equal(base: Any) -> None:
    """Tie again the weights that are still equal; an adapter on the head alone leaves it apart."""
    for name, source in list(base.all_tied_weights_keys.items()):
        weight = base.get_parameter(source)
        if torch.equal(base.get_parameter(name), weight):
            path, _, leaf = name.rpartition(".")
            base.get_submodule(path)._parameters[leaf] = weight
        else:
            del base.all_tied_weights_keys[name]


def _copy_tokenizer(adapter: Path, files: Path, target_length: int, directory: Path) -> None:
    """Write the tokenizer of an adapter or else of the base model, if any, for the extended window."""
    source = next((path for path in (adapter, files) if any(path.glob("tokenizer*"))), None)
    if source is None:
        return
    tokenizer = pretrained(AutoTokenizer, str(source))
    write_tokenizer(tokenizer, directory, target_length)
    if not (files / _SENTENCEPIECE).exists() or (directory / _SENTENCEPIECE).exists():
        return
    if source == files or pretrained(AutoTokenizer, str(files)).get_vocab() == tokenizer.get_vocab():
        _copy(files, _SENTENCEPIECE, directory)
    else:
        logger.warning("%s is not copied: the adapter's tokenizer has other tokens", files / _SENTENCEPIECE)


def _copy_notices(files: Path, directory: Path, output: Path) -> None:
    """Copy the license and notices of a base model, unless the output has a file of that name."""
    for path in files.iterdir():
        if matches(path.name, NOTICES) and path.is_file() and not os.path.lexists(output / path.name):
            _copy(files, path.name, directory)


def _copy(source: Path, name: str, directory: Path) -> None:
    """Copy a file, unless it is a link to another place, such as a private file."""
    try:
        shutil.copyfile(locate(source, name), directory / name)
    except RopeExtendError as error:
        logger.warning("not copied: %s", error)
