"""Merging an adapter into its base model: one plain checkpoint, exact, without loading the whole model.

The base model is created without weights, with the adapter on it. Its files are read one tensor at a time. If
the adapter changes a tensor, peft's own layer computes the merged one in float32, and the result is rounded
once. So every LoRA layer that peft can merge is merged, and memory holds one shard instead of the model.
"""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from rope_extend.checkpoint.base_model import (
    base_matrices,
    changes_base,
    check_base_fingerprint,
    token_layers_of,
    warn_unchecked,
)
from rope_extend.checkpoint.card import add_card
from rope_extend.checkpoint.companions import copy_notices, write_tokenizer
from rope_extend.checkpoint.guard import guard as guard_directory
from rope_extend.checkpoint.guard import has_stock_config
from rope_extend.checkpoint.hub import local_directory
from rope_extend.checkpoint.manifest import INDEX_NAME, check_finite, weight_files
from rope_extend.checkpoint.record import Record, seal
from rope_extend.checkpoint.restoring import apply_record, checked_record, load
from rope_extend.checkpoint.saving import stock_state
from rope_extend.checkpoint.staging import refuse_base_model, staged
from rope_extend.checkpoint.stored_tensors import StoredTensor, read_tensor, stored_tensors
from rope_extend.checkpoint.tied_weights import tied_names, untie, untie_changed
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home, write_json
from rope_extend.models.gguf_checkpoint import CONVERT, gguf_file
from rope_extend.models.loading import empty_model, one_error, pretrained
from rope_extend.models.locating import GGUF
from rope_extend.models.parameters import LEARNED_FILE
from rope_extend.units import memory_size

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

_SINGLE = "model.safetensors"
_ADAPTER = "default"
_IN_MEMORY = "If there is enough memory, merge with in_memory=True"


@dataclass(frozen=True)
class _Output:
    """One tensor of the merged checkpoint: its name, its size in bytes, and a function that computes it."""

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
    in_memory: bool = False,
    guard: bool = True,
) -> Path:
    """Merge an adapter into its base model; returns the directory of the plain checkpoint.

    The merge is exact. A weight that the adapter changes is computed in float32 and rounded once. Every other
    weight is the base model's own, bit for bit. The directory gets the weights, a `config.json` for stock
    transformers, `rope_extend.json`, a model card, and the base model's generation config, tokenizer, license
    and notices. It appears when it is complete; after an interruption, an earlier checkpoint is unchanged.

    Args:
        adapter: a LoRA adapter's directory or hub id, with its record.
        output: the output directory; created if missing.
        base_model: name or path of the base model; overrides the one in the record.
        overwrite: replace a checkpoint in the output directory; other files stay.
        dtype: dtype of all floating-point weights; default: each keeps the base model's dtype.
        max_shard_size: maximum size of one weight file, in bytes or like "5GB". Roughly the peak memory, plus
            one layer in float32.
        tokenizer: write the tokenizer: the adapter's own, or else the base model's.
        in_memory: load the whole model in float32 and merge it in memory. Needed for adapters on weights that
            transformers joins or splits on loading.
        guard: if stock transformers does not support the encoding, write a plugin-only checkpoint, which
            stock loaders refuse instead of loading it with the original window; see
            `rope_extend.checkpoint.guard`.

    Raises:
        RopeExtendError: the record or the adapter is missing or damaged; the base model is missing, quantised
            or a different one; the adapter cannot be merged; a weight is not finite; or the output directory
            is in use, or is the adapter or the base model.
    """
    adapter, output = local_directory(adapter), Path(expand_home(output))
    limit = _shard_bytes(max_shard_size)
    record = checked_record(adapter, check_files=True)
    _adapter_config(adapter)
    name = expand_home(base_model) if base_model else record.base_model
    if name is None:
        raise RopeExtendError(f"the record in {adapter} names no base model; give base_model=")
    if output.resolve() == adapter.resolve():
        raise RopeExtendError(f"{output} is the adapter itself; choose another directory")
    refuse_base_model(output, name)
    if (path := gguf_file(name)) is not None:
        raise RopeExtendError(
            "the base model is a GGUF file, and a merge reads and writes checkpoints of transformers. "
            f"{_how_to_convert(str(path))}"
        )
    with staged(output, overwrite=overwrite) as directory:
        files = local_directory(name, "base model", "base_model=")
        if in_memory:
            base = _merge_in_memory(adapter, files, directory, dtype, limit)
        else:
            model = _with_adapter(files, adapter, record)
            _write(_outputs(model, files, adapter, record, dtype), directory, limit)
            base = model.get_base_model()
            base.config.architectures = [type(base).__name__]
            base.config.dtype = dtype or base.config.dtype
            base.config.save_pretrained(directory)
            if (files / "generation_config.json").exists():
                base.generation_config.save_pretrained(directory)
        if guard and not has_stock_config(base.config, record.target_length):
            guard_directory(directory)
        if tokenizer:
            write_tokenizer(adapter, files, record.target_length, directory)
        copy_notices(files, directory, output)
        if (adapter / LEARNED_FILE).exists():  # the encoding's parameters are not part of any base weight
            shutil.copyfile(adapter / LEARNED_FILE, directory / LEARNED_FILE)
        for weights in weight_files(directory):
            check_finite(directory / weights)
        seal(directory, Record.of(base, name))
    add_card(output, trained_in=adapter)
    return output


def _how_to_convert(file: str) -> str:
    """What to do if the base model is a GGUF file."""
    return f"Write one with {CONVERT} {quote(file)} --output DIRECTORY, and give it as base_model="


def _adapter_config(adapter: Path) -> Any:
    """The config of an adapter.

    Raises:
        RopeExtendError: there is none, it is not a LoRA adapter, or it cannot be merged.
    """
    from peft import PeftConfig

    if not (adapter / "adapter_config.json").exists():
        raise RopeExtendError(f"{adapter} holds no adapter (adapter_config.json); there is nothing to merge")
    with one_error(f"cannot read {adapter / 'adapter_config.json'}"):
        config = PeftConfig.from_pretrained(str(adapter))
    if config.peft_type != "LORA":
        raise RopeExtendError(
            f"{adapter} is a {config.peft_type} adapter and only LoRA is merged; try peft's own merge: "
            "rope_extend.load(...).merge_and_unload()"
        )
    if config.layer_replication:
        raise RopeExtendError(
            f"the adapter in {adapter} repeats layers of its base model (layer_replication), and a merge "
            "would need a copy of each; use the adapter without a merge, with rope_extend.load"
        )
    return config


def _with_adapter(files: Path, adapter: Path, record: Record) -> PeftModel:
    """The base model without weights, patched as recorded, with the adapter's weights on it."""
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    # Some families allocate a few weights on any device. On meta, only the adapter's weights are real later.
    base: Any = empty_model(str(files)).to("meta", torch.float32)
    if getattr(base.config, "quantization_config", None) is not None:
        raise RopeExtendError(
            f"the base model {files} is quantised, and a merge needs the original weights; give the original "
            "model as base_model="
        )
    if (files / "generation_config.json").exists():
        base.generation_config = pretrained(GenerationConfig, str(files))
    _untie_as_stored(base, files)
    apply_record(base, record)
    config = _adapter_config(adapter)
    if changed_by := changes_base(config):
        raise RopeExtendError(
            f"the adapter in {adapter} changes the base model's own weights ({changed_by}), so it cannot be "
            f"merged from the files. {_IN_MEMORY}"
        )
    config.base_model_name_or_path = str(files)  # peft warns if it is another
    with one_error(
        f"the adapter in {adapter} does not fit this {record.model_type} model; it was trained on "
        f"{record.base_model!r}"
    ):
        model = get_peft_model(base, config, _ADAPTER, low_cpu_mem_usage=True)
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                # peft would move the adapter's weights to the device of the base layer's, which is meta.
                vars(module)["_move_adapter_to_device_of_base_layer"] = lambda *_, **__: None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*no-op")
            keys = model.load_adapter(str(adapter), _ADAPTER, low_cpu_mem_usage=True, torch_device="cpu")
        for problem, names in (("missing", keys.missing_keys), ("unexpected", keys.unexpected_keys)):
            if names:
                raise ValueError(f"the weight {names[0]} is {problem}")
    return model


def _untie_as_stored(base: Any, files: Path) -> None:
    """Untie what the config ties, but the files store with two values; transformers does so on loading."""
    stored = stored_tensors(files)
    key_of, _ = _stored_keys(base, stored)
    for target, source in list(getattr(base, "all_tied_weights_keys", {}).items()):
        if target in key_of and source in key_of:
            one, other = (read_tensor(stored[key].file, key) for key in (key_of[target], key_of[source]))
            if not torch.equal(one, other):
                untie(base, target)


def _outputs(
    model: PeftModel, files: Path, adapter: Path, record: Record, dtype: torch.dtype | None
) -> list[_Output]:
    """Every tensor of the merged checkpoint, in the order of the base model's files."""
    base = model.get_base_model()
    stored = stored_tensors(files)
    key_of, converted = _stored_keys(base, stored)
    _check_shapes(base, stored, key_of, converted, files)
    _check_base(base, stored, key_of, adapter, record)
    layers, replaced = _changes(model, adapter)
    tied = tied_names(base)

    def source(name: str) -> str | None:
        """The key of the stored tensor that holds a parameter, or a parameter that it is tied to."""
        return next((key_of[each] for each in (name, *tied.get(name, ())) if each in key_of), None)

    changed = {f"{path}.weight": layer for path, layer in layers.items()}
    for path, layer in layers.items():
        if layer.lora_bias.get(_ADAPTER):
            changed[f"{path}.bias"] = layer
    for name in (*changed, *replaced):
        if source(name) is None:
            reason = converted.get(name, "no tensor of the base model's files has this name")
            raise RopeExtendError(f"cannot merge {name} from the files of {files}: {reason}. {_IN_MEMORY}")

    def make(name: str, key: str) -> Callable[[], Tensor]:
        def merged() -> Tensor:
            base_tensor = stored[key]
            if name in changed:
                layer, leaf = changed[name], name.rpartition(".")[2]
                path = name.removesuffix(f".{leaf}")
                parts = {
                    part: replaced[full] if full in replaced else read_tensor(stored[origin].file, origin)
                    for part in ("weight", "bias")
                    if (full := f"{path}.{part}") in changed and (origin := source(full)) is not None
                }
                tensor = _merged(layer, parts, path)[leaf]
            elif name in replaced:
                tensor = replaced[name]
            else:
                tensor = read_tensor(base_tensor.file, key)
            output_dtype = dtype_of(base_tensor)
            if tensor.dtype != output_dtype:
                tensor = tensor.to(output_dtype)
                if not bool(tensor.isfinite().all()):
                    raise RopeExtendError(
                        f"{name} does not fit into {output_dtype}: it would hold inf or NaN; choose another "
                        "dtype"
                    )
            return tensor.contiguous()

        return merged

    def dtype_of(base_tensor: StoredTensor) -> torch.dtype:
        return dtype if dtype is not None and base_tensor.dtype.is_floating_point else base_tensor.dtype

    def output(name: str, key: str, as_name: str) -> _Output:
        size = math.prod(stored[key].shape) * dtype_of(stored[key]).itemsize
        return _Output(as_name, size, make(name, key))

    names = {key: name for name, key in key_of.items()}
    outputs = [output(names.get(key, key), key, key) for key in stored]
    for name in untie_changed(base, tied, changed, replaced):
        if name not in key_of:
            origin = source(name)
            assert origin is not None
            outputs.append(output(name, origin, name))
    return outputs


def _stored_keys(base: Any, stored: Mapping[str, StoredTensor]) -> tuple[dict[str, str], dict[str, str]]:
    """For each parameter that is stored unchanged, its key in the files; for each other, why it is not.

    transformers renames, joins and splits tensors on loading. Renaming is followed. A tensor that is joined
    or split is not the parameter itself, so a LoRA product must not be added to it.
    """
    rules = get_model_conversion_mapping(base)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    parameters = {
        re.sub(r"\.(base_layer|original_module)\.", ".", n): p for n, p in base.state_dict().items()
    }
    key_of, converted = {}, {}
    for key in stored:
        name, pattern = rename_source_key(key, renamings, converters, base.base_model_prefix, parameters)
        if pattern is None:
            key_of[name] = key
        else:
            converted[name] = f"transformers converts {key} on loading"
    return key_of, converted


def _check_shapes(
    base: Any,
    stored: Mapping[str, StoredTensor],
    key_of: Mapping[str, str],
    converted: Mapping[str, str],
    files: Path,
) -> None:
    """Refuse files that do not fit their config: a matrix is missing or has another shape."""
    not_stored = getattr(base, "_keys_to_ignore_on_load_missing", None) or ()
    for name, matrix in base_matrices(base):
        expected = tuple(matrix.shape)
        shape = stored[key_of[name]].shape if name in key_of else None
        if shape is None and (name in converted or any(re.search(key, name) for key in not_stored)):
            continue
        if shape != expected:
            advice = "" if shape else f". If transformers renames it on loading: {_IN_MEMORY}"
            raise RopeExtendError(
                f"the weights of {str(files)!r} do not fit its config: {name} should have shape {expected}, "
                f"but the files have {shape or 'no such tensor'}{advice}"
            )


def _check_base(
    base: Any, stored: Mapping[str, StoredTensor], key_of: Mapping[str, str], adapter: Path, record: Record
) -> None:
    """Refuse files with other weights than those that the adapter was trained on, by their fingerprint."""
    if record.base_fingerprint is None:
        return
    names = [name for name, _ in base_matrices(base)]
    if not all(name in key_of for name in names):
        warn_unchecked("transformers joins or splits tensors of the model on loading")
        return
    tensors = [stored[key_of[name]] for name in names]
    dtypes = {tensor.dtype for tensor in tensors}
    if other := dtypes - {torch.float32, torch.bfloat16, torch.float16}:
        warn_unchecked(f"the model is stored in {other.pop()}")
        return
    rounded = ", or the same rounded to float16" if torch.float16 in dtypes else ""
    advice = "; give the former as base_model="
    if record.base_model is not None and record.base_model.lower().endswith(GGUF):
        advice = f". A merge needs a checkpoint of the former. {_how_to_convert(record.base_model)}"
    check_base_fingerprint(
        ((name, read_tensor(x.file, key_of[name])) for name, x in zip(names, tensors, strict=True)),
        record.base_fingerprint,
        adapter=adapter,
        token_layers=token_layers_of(base, _adapter_config(adapter)),
        trained_on=record.base_model,
        base=str(tensors[0].file.parent),
        advice=rounded + advice,
    )


def _changes(model: PeftModel, adapter: Path) -> tuple[dict[str, LoraLayer], dict[str, Tensor]]:
    """The LoRA layers by their paths, and the parameters that the adapter replaces as a whole, by name."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    with one_error(f"the adapter in {adapter} cannot be merged"):
        model.base_model._check_merge_allowed()
    base = model.get_base_model()
    layers: dict[str, LoraLayer] = {}
    # With bias="all" or saved embeddings, the adapter also has weights of the base model itself. They are the
    # ones that are not on the meta device.
    replaced: dict[str, Tensor] = {
        name.replace(".base_layer.", "."): parameter.data
        for name, parameter in base.named_parameters(remove_duplicate=False)
        if parameter.device.type != "meta" and not re.search(r"\.(lora_\w+|modules_to_save)\.", name)
    }
    for path, module in base.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save[_ADAPTER].state_dict()
            replaced |= {f"{path}.{name}": tensor for name, tensor in saved.items()}
        elif isinstance(module, LoraLayer) and not hasattr(module, "parameter_name"):
            layers[path] = module
        elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            raise RopeExtendError(
                f"cannot merge {path} from files: peft keeps it as {type(module).__name__}. {_IN_MEMORY}"
            )
    return layers, replaced


def _merged(layer: Any, parts: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """The base weights of a layer after peft has merged its adapter into them, float32."""
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


def _write(outputs: list[_Output], directory: Path, limit: int) -> None:
    """Compute and write the tensors, in shards of at most `limit` bytes or one tensor, and their index."""
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
    with tqdm(total=total, unit="B", unit_scale=True, desc="merging", disable=None) as bar:
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
        weight_map = dict(sorted(index.items()))
        write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _merge_in_memory(
    adapter: Path, files: Path, directory: Path, dtype: torch.dtype | None, limit: int
) -> Any:
    """Load the model in float32, merge it and save its weights; returns the merged model."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import TrainableTokensWrapper

    base_dtype = empty_model(str(files)).dtype
    model = load(adapter, base_model=str(files), dtype=torch.float32)
    base = model.get_base_model()
    tied = tied_names(base)
    for path, module in base.named_modules():
        others = tied.get(f"{path}.weight", [])
        if isinstance(module, TrainableTokensWrapper) and not _both_halves(base, module, others):
            raise RopeExtendError(
                f"the adapter trains tokens of {path} alone, which is tied to {', '.join(others)}; peft's "
                "merge would change both. Use the adapter without a merge, with rope_extend.load"
            )
        if isinstance(module, LoraLayer) and others:
            raise RopeExtendError(
                f"{path} is tied to {', '.join(others)} and has an adapter of its own; a merge in memory "
                "would change both. Merge from the files: leave out in_memory=True"
            )
    with one_error(f"peft cannot merge the adapter in {adapter}"):
        merged = model.merge_and_unload(safe_merge=True)
    merged.to(dtype or base_dtype)
    merged.save_pretrained(directory, state_dict=stock_state(merged), max_shard_size=limit)
    return merged


def _both_halves(base: Any, wrapper: Any, tied_to: list[str]) -> bool:
    """Whether an adapter of single tokens is on every layer that a layer is tied to."""
    return all(isinstance(base.get_submodule(name.rpartition(".")[0]), type(wrapper)) for name in tied_to)


def _shard_bytes(size: int | str) -> int:
    """A shard size in bytes, from a number or text such as `5GB` or `500MiB`.

    Raises:
        RopeExtendError: not a size above 0.
    """
    if isinstance(size, int) and size > 0:
        return size
    try:
        return memory_size(size)
    except RopeExtendError as error:
        raise RopeExtendError(f"max_shard_size is a size such as 5GB or 500MB, got {size!r}") from error
