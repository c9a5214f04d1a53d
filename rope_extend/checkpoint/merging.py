"""Merging: an adapter and its base model into one plain checkpoint, exact and without holding the model.

The base is a model without weights, with the adapter on it. Its files are read one tensor at a time; where
the adapter has a say, peft's own layer does the arithmetic on that one weight, in float32, and the result is
rounded once. So whatever peft can merge in a LoRA layer is merged, and memory holds a shard, not the model.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoTokenizer, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from rope_extend.checkpoint import registry
from rope_extend.checkpoint.card import add_card
from rope_extend.checkpoint.manifest import (
    INDEX_NAME,
    base_matrices,
    changes_base,
    check_finite,
    fingerprint,
    warn_unchecked,
    weight_files,
)
from rope_extend.checkpoint.record import Record, seal
from rope_extend.checkpoint.saving import (
    apply_record,
    checked_record,
    load,
    local_directory,
    save_tokenizer,
    stock_state,
)
from rope_extend.checkpoint.staging import staged
from rope_extend.errors import RopeExtendError
from rope_extend.learned import LEARNED_FILE
from rope_extend.pretrained import empty_model, one_error, pretrained

_SINGLE = "model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ADAPTER = "default"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class _Stored:
    """One tensor of the base: the file it lies in, its shape and its type."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Output:
    """One tensor of the merged checkpoint: its name there, its size in bytes, and how to make it."""

    name: str
    size: int
    make: Callable[[], Tensor]


def merge(
    adapter: str | PathLike[str],
    output: str | PathLike[str],
    *,
    base_model: str | None = None,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: bool = True,
    progress: bool | None = None,
    in_memory: bool = False,
    guard: bool = True,
) -> Path:
    """Merge an adapter into its base model; returns the directory of the plain checkpoint.

    Exact: a weight that the adapter changes is computed in float32 and rounded once, every other one is
    the base's own, bit for bit. The directory gets weights, `config.json` with the encoding's stock form,
    `rope_extend.json`, a model card, and the base's generation config and tokenizer. It appears when it is
    complete; an interruption leaves what was there before.

    Args:
        adapter: a LoRA adapter's directory, with its record.
        output: where to; made if missing.
        base_model: name or path of the base model, where it is not where the record says.
        overwrite: replace a checkpoint that is already there; other files stay.
        dtype: of all floating-point weights; by default each keeps the base's own.
        max_shard_size: of one file of weights, in bytes or as in "5GB"; also what memory has to hold, beside
            one layer in float32.
        tokenizer: whether to write the tokenizer, the adapter's own or else the base's.
        progress: show a progress bar; by default where there is a terminal.
        in_memory: load the whole model in float32 and merge it there: for adapters on weights that
            transformers joins or splits when it loads them, which cannot be merged from the files.
        guard: where stock transformers has no form for the encoding, write a config that only rope_extend
            reads, so that nothing else reads it on the old window; see `rope_extend.checkpoint.registry`.

    Raises:
        RopeExtendError: no or a damaged record or adapter, a base that is missing, another one or quantized,
            an adapter that cannot be merged, weights that are not finite, or a directory that is in use.
    """
    adapter, output = local_directory(adapter), Path(output)
    limit = _bytes(max_shard_size)
    record = checked_record(adapter, check_files=True)
    _adapter_config(adapter)
    name = base_model or record.base_model
    if name is None:
        raise RopeExtendError(f"the record in {adapter} names no base model; give base_model=")
    if output.resolve() == adapter.resolve():
        raise RopeExtendError(f"{output} is the adapter itself; choose another directory")
    with staged(output, overwrite=overwrite) as directory:
        files = local_directory(name, "base model", "base_model=")
        if in_memory:
            base = _merge_in_memory(adapter, files, directory, dtype, limit)
        else:
            model = _with_adapter(files, adapter, record)
            outputs = _outputs(model, files, adapter, record, dtype)
            _write(outputs, directory, limit, None if progress is None else not progress)
            base = model.get_base_model()
            base.config.architectures = [type(base).__name__]
            base.config.dtype = dtype or base.config.dtype
            base.config.save_pretrained(directory)
            if (files / "generation_config.json").exists():
                base.generation_config.save_pretrained(directory)
        if guard and not registry.has_stock_form(base.config, record.target_length):
            registry.guard(directory)
        if tokenizer:
            _save_tokenizer(adapter, files, record.target_length, directory)
        if (adapter / LEARNED_FILE).exists():  # what the encoding has learnt is no part of any base weight
            shutil.copyfile(adapter / LEARNED_FILE, directory / LEARNED_FILE)
        for weights in weight_files(directory):
            check_finite(directory / weights)
        seal(directory, Record.of(base, name))
    add_card(output, trained_in=adapter)
    return output


# ---------------------------------------------------------------------------------------------------------
# The base model's files


def _stored(directory: Path) -> dict[str, _Stored]:
    """What the base's safetensors files hold, in their order; only headers are read."""
    names = [name for name in weight_files(directory) if name.startswith("model")]
    if not names:
        raise RopeExtendError(
            f"no safetensors weights in {directory}; pickles are not read. Load the base model where it is "
            "trusted and save it again with save_pretrained"
        )
    found = {}
    for name in names:
        with _opened(directory / name) as file:
            for key in file.keys():  # noqa: SIM118  not a mapping
                part = file.get_slice(key)
                shape = tuple(part.get_shape())
                # The type from an empty slice: the header's names for types are not torch's.
                empty = part[0:0].dtype if shape else file.get_tensor(key).dtype
                found[key] = _Stored(directory / name, shape, empty)
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise RopeExtendError(f"cannot read {path}: {error}; the file is missing or damaged") from error


def _read(path: Path, key: str) -> Tensor:
    """One tensor of a file."""
    with _opened(path) as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor


# ---------------------------------------------------------------------------------------------------------
# What the adapter changes


def _adapter_config(adapter: Path) -> PeftConfig:
    """What kind of adapter it is; only LoRA is merged."""
    if not (adapter / "adapter_config.json").exists():
        raise RopeExtendError(f"{adapter} holds no adapter (adapter_config.json); there is nothing to merge")
    with one_error(f"cannot read {adapter / 'adapter_config.json'}"):
        config = PeftConfig.from_pretrained(str(adapter))
    if config.peft_type != "LORA":
        raise RopeExtendError(
            f"{adapter} is a {config.peft_type} adapter and only LoRA is merged; try peft's own: "
            "rope_extend.load(...).merge_and_unload()"
        )
    return config


def _with_adapter(files: Path, adapter: Path, record: Record) -> PeftModel:
    """The base model without weights, patched as recorded, with the adapter's weights on it."""
    # Some families make a few weights of their own on any device; what is real later is the adapter's.
    base: Any = empty_model(str(files)).to("meta", torch.float32)
    if getattr(base.config, "quantization_config", None) is not None:
        raise RopeExtendError(
            f"{files} is quantized, and a merge needs the weights themselves; give base_model= the original"
        )
    if (files / "generation_config.json").exists():
        base.generation_config = pretrained(GenerationConfig, str(files))
    apply_record(base, record)
    config = _adapter_config(adapter)
    if changed_by := changes_base(config):
        raise RopeExtendError(
            f"the adapter in {adapter} changes the base model's own weights ({changed_by}), so that it "
            "cannot be merged from the files. Where memory allows it, merge with in_memory=True (--in-memory)"
        )
    config.base_model_name_or_path = str(files)  # peft warns where it is another
    with one_error(
        f"the adapter in {adapter} does not fit this {record.model_type} model; it was made for "
        f"{record.base_model!r}"
    ):
        model = get_peft_model(base, config, _ADAPTER, low_cpu_mem_usage=True)
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                # peft would move the adapter's weights to where the base layer's are, which is nowhere.
                vars(module)["_move_adapter_to_device_of_base_layer"] = lambda *_, **__: None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*no-op")
            found = model.load_adapter(str(adapter), _ADAPTER, low_cpu_mem_usage=True, torch_device="cpu")
        strange = [*found.missing_keys, *found.unexpected_keys]
        if strange:
            raise ValueError(f"{strange[0]} is only on one side")
    return model


def _outputs(
    model: PeftModel, files: Path, adapter: Path, record: Record, dtype: torch.dtype | None
) -> list[_Output]:
    """Every tensor of the merged checkpoint, in the order of the base's files."""
    base = model.get_base_model()
    stored = _stored(files)
    where, converted = _located(base, stored)
    _check_whole(base, stored, where, converted, files)
    _check_base(base, stored, where, adapter, record)
    layers, given = _changes(model, adapter)
    tied = _tied(base)

    def source(name: str) -> str | None:
        """The stored tensor that a parameter is read from, by itself or by one that it is tied to."""
        return next((where[each] for each in (name, *tied.get(name, ())) if each in where), None)

    changed = {f"{path}.weight": layer for path, layer in layers.items()}
    for path, layer in layers.items():
        if layer.lora_bias.get(_ADAPTER):
            changed[f"{path}.bias"] = layer
    for name in (*changed, *given):
        if source(name) is None:
            reason = converted.get(name, "no tensor of the base's files has this name")
            raise RopeExtendError(
                f"cannot merge {name} from the files of {files}: {reason}. Where memory allows it, "
                "merge with in_memory=True (--in-memory)"
            )

    def make(name: str, key: str) -> Callable[[], Tensor]:
        def merged() -> Tensor:
            held = stored[key]
            if name in changed:
                layer, leaf = changed[name], name.rpartition(".")[2]
                path = name.removesuffix(f".{leaf}")
                parts = {
                    part: given[full] if full in given else _read(stored[origin].file, origin)
                    for part in ("weight", "bias")
                    if (full := f"{path}.{part}") in changed and (origin := source(full)) is not None
                }
                tensor = _merged(layer, parts, path)[leaf]
            elif name in given:
                tensor = given[name]
            else:
                tensor = _read(held.file, key)
            wanted = dtype if dtype is not None and held.dtype.is_floating_point else held.dtype
            if tensor.dtype != wanted:
                tensor = tensor.to(wanted)
                if not bool(tensor.isfinite().all()):
                    raise RopeExtendError(f"{name} does not fit into {wanted}: it holds inf or NaN")
            return tensor.contiguous()

        return merged

    def output(name: str, key: str, as_name: str) -> _Output:
        held = stored[key]
        size = (dtype if dtype is not None and held.dtype.is_floating_point else held.dtype).itemsize
        return _Output(as_name, math.prod(held.shape) * size, make(name, key))

    names = {key: name for name, key in where.items()}
    outputs = [output(names.get(key, key), key, key) for key in stored]
    for name in _untie(base, tied, changed, given):
        if name not in where:
            origin = source(name)
            assert origin is not None
            outputs.append(output(name, origin, name))
    return outputs


def _located(base: Any, stored: Mapping[str, _Stored]) -> tuple[dict[str, str], dict[str, str]]:
    """Where each of a model's parameters is stored, for those stored as they are; and why not, for others.

    transformers renames, joins and splits tensors when it loads them. A name is followed; a tensor that is
    computed with on loading is not the parameter, and a LoRA product must not be added to it.
    """
    rules = get_model_conversion_mapping(base)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    parameters = {
        re.sub(r"\.(base_layer|original_module)\.", ".", n): p for n, p in base.state_dict().items()
    }
    where, converted = {}, {}
    for key in stored:
        name, pattern = rename_source_key(key, renamings, converters, base.base_model_prefix, parameters)
        if pattern is None:
            where[name] = key
        else:
            converted[name] = f"transformers converts {key} when it loads it"
    return where, converted


def _check_whole(
    base: Any,
    stored: Mapping[str, _Stored],
    where: Mapping[str, str],
    converted: Mapping[str, str],
    files: Path,
) -> None:
    """Refuse files that are not those of their config: a matrix of another shape, or none."""
    made_anew = getattr(base, "_keys_to_ignore_on_load_missing", None) or ()
    for name, matrix in base_matrices(base):
        shape = tuple(matrix.shape)
        found = stored[where[name]].shape if name in where else None
        if found is None and (name in converted or any(re.search(key, name) for key in made_anew)):
            continue
        if found != shape:
            advice = "" if found else ". If it is renamed on loading, merge with in_memory=True (--in-memory)"
            raise RopeExtendError(
                f"the weights of {str(files)!r} are not those of its config: {name} should be {shape}, and "
                f"the files have {found or 'none'}{advice}"
            )


def _check_base(
    base: Any, stored: Mapping[str, _Stored], where: Mapping[str, str], adapter: Path, record: Record
) -> None:
    """Refuse files with other weights than those that the adapter was trained on, by their fingerprint."""
    if record.base_fingerprint is None:
        return
    names = [name for name, _ in base_matrices(base)]
    if not all(name in where for name in names):
        warn_unchecked("transformers joins or splits tensors of the model when it loads them")
        return
    held = [stored[where[name]] for name in names]
    kinds = {each.dtype for each in held}
    if strange := kinds - {torch.float32, torch.bfloat16, torch.float16}:
        warn_unchecked(f"the model is stored in {strange.pop()}")
        return
    found = fingerprint((name, _read(each.file, where[name])) for name, each in zip(names, held, strict=True))
    if found != record.base_fingerprint:
        raise RopeExtendError(
            f"the adapter in {adapter} was trained on {record.base_model!r} (fingerprint "
            f"{record.base_fingerprint[:12]}), and {held[0].file.parent} has other weights ({found[:12]})"
            f"{', or the same rounded to float16' if torch.float16 in kinds else ''}; give base_model= the "
            "former"
        )


def _changes(model: PeftModel, adapter: Path) -> tuple[dict[str, LoraLayer], dict[str, Tensor]]:
    """The LoRA layers by their paths, and the parameters that the adapter's file replaces, by name."""
    with one_error(f"the adapter in {adapter} cannot be merged"):
        model.base_model._check_merge_allowed()
    base = model.get_base_model()
    layers: dict[str, LoraLayer] = {}
    # With bias="all" or saved embeddings, the file also has weights of the base itself: those that are real.
    given: dict[str, Tensor] = {
        name.replace(".base_layer.", "."): parameter.data
        for name, parameter in base.named_parameters(remove_duplicate=False)
        if parameter.device.type != "meta" and not re.search(r"\.(lora_\w+|modules_to_save)\.", name)
    }
    for path, module in base.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save[_ADAPTER].state_dict()
            given |= {f"{path}.{name}": tensor for name, tensor in saved.items()}
        elif isinstance(module, LoraLayer) and not hasattr(module, "parameter_name"):
            layers[path] = module
        elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            raise RopeExtendError(
                f"cannot merge {path} from files: peft keeps it as {type(module).__name__}. Where memory "
                "allows it, merge with in_memory=True (--in-memory)"
            )
    return layers, given


def _merged(layer: Any, parts: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """A layer's own weights after peft has merged its adapter into them, float32."""
    inner = layer.get_base_layer()
    empty = {part: inner._parameters[part] for part in parts}
    try:
        with one_error(f"cannot merge {path}"):
            for part, tensor in parts.items():
                inner._parameters[part] = nn.Parameter(tensor.float(), requires_grad=False)
            layer.merge(safe_merge=True, adapter_names=[_ADAPTER])
            return {part: inner._parameters[part].data for part in parts}
    finally:
        layer.merged_adapters.clear()
        inner._parameters.update(empty)


def _tied(base: Any) -> dict[str, list[str]]:
    """For each parameter that is one with others, the names of those others."""
    keys: Mapping[str, str] = getattr(base, "all_tied_weights_keys", None) or {}
    clean = {a.replace(".base_layer.", "."): b.replace(".base_layer.", ".") for a, b in keys.items()}
    tied: dict[str, list[str]] = {}
    for one, other in clean.items():
        tied.setdefault(one, []).append(other)
        tied.setdefault(other, []).append(one)
    return tied


def _untie(
    base: Any, tied: Mapping[str, list[str]], changed: Mapping[str, Any], given: dict[str, Tensor]
) -> list[str]:
    """Parameters that were one and are no longer, because the adapter changes them differently.

    An adapter on the input embeddings alone leaves the output's as they were, which one matrix cannot do.
    """
    apart: list[str] = []
    for name, others in tied.items():
        for other in others:
            same = given.get(name) is given.get(other) or (
                name in given and other in given and torch.equal(given[name], given[other])
            )
            if name in changed or other in changed or not same:
                apart.append(name)
    if apart:
        for config in (base.config, base.config.get_text_config()):
            config.tie_word_embeddings = False
    return list(dict.fromkeys(apart))


# ---------------------------------------------------------------------------------------------------------
# Writing


def _write(outputs: list[_Output], directory: Path, limit: int, hide: bool | None) -> None:
    """Write the tensors as they are made, in shards of `limit` bytes or one tensor, and their index."""
    shards: list[list[_Output]] = [[]]
    room = limit
    for output in outputs:
        if shards[-1] and output.size > room:
            shards.append([])
            room = limit
        shards[-1].append(output)
        room -= output.size
    total = sum(output.size for output in outputs)
    index: dict[str, str] = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="merging", disable=hide) as bar:
        for number, shard in enumerate(shards, start=1):
            name = _SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = {}
            for output in shard:
                tensors[output.name] = output.make()
                bar.update(output.size)
            save_file(tensors, directory / name, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, name)
            del tensors
    if len(shards) > 1:
        text = json.dumps(
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}, indent=2
        )
        (directory / INDEX_NAME).write_text(text + "\n", encoding="utf-8")


def _merge_in_memory(
    adapter: Path, files: Path, directory: Path, dtype: torch.dtype | None, limit: int
) -> Any:
    """Load the model in float32 and merge it as a whole; returns it, with its weights saved."""
    was = empty_model(str(files)).dtype
    model = load(adapter, base_model=str(files), dtype=torch.float32)
    base = model.get_base_model()
    tied = _tied(base)
    for path, module in base.named_modules():
        if isinstance(module, LoraLayer) and (others := tied.get(f"{path}.weight")):
            raise RopeExtendError(
                f"{path} is tied to {', '.join(others)} and has an adapter of its own; a merge in memory "
                "would change both, so merge from the files"
            )
    with one_error(f"peft cannot merge the adapter in {adapter}"):
        merged = model.merge_and_unload(safe_merge=True)
    merged.to(dtype or was).save_pretrained(directory, state_dict=stock_state(merged), max_shard_size=limit)
    return merged


def _save_tokenizer(adapter: Path, files: Path, target_length: int, directory: Path) -> None:
    """Write the tokenizer of the adapter, or else of the base, if there is one, for the extended window."""
    for source in (adapter, files):
        if any((source / name).exists() for name in _TOKENIZER_FILES):
            tokenizer = pretrained(AutoTokenizer, str(source))
            tokenizer.model_max_length = target_length
            save_tokenizer(tokenizer, directory)
            return


def _bytes(size: int | str) -> int:
    """A size in bytes, from a number or text such as `5GB` or `500MiB`.

    Raises:
        RopeExtendError: not a size above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)?", str(size).strip())
    unit = _UNITS.get((match[2] or "").upper(), 1 if match and match[2] is None else None) if match else None
    count = int(float(match[1]) * unit) if match and unit else 0
    if count < 1:
        raise RopeExtendError(f"max_shard_size is a size such as 5GB or 500MB, got {size!r}")
    return count
