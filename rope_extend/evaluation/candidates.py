"""The models that an evaluation compares: one checkpoint under several methods and with several adapters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import nn
from transformers import GenerationConfig

from rope_extend.checkpoint.info import ModelInfo, info
from rope_extend.checkpoint.manifest import read_json
from rope_extend.checkpoint.peft_models import changes_base, remove_adapter
from rope_extend.checkpoint.record import read_record
from rope_extend.checkpoint.restoring import load_adapter
from rope_extend.encodings import Encoding, RopeShape, encoding, method_named
from rope_extend.errors import PatchError, RopeExtendError
from rope_extend.evaluation.cells import RowSpec
from rope_extend.evaluation.evaluation_config import AS_IS, PLAIN, ModelConfig
from rope_extend.evaluation.labels import adapter_labels, method_labels
from rope_extend.evaluation.results import SAME_WEIGHTS
from rope_extend.memory.meta_device import quiet_patching
from rope_extend.method_names import CURRENT
from rope_extend.models.checkpoint_directory import ADAPTER_CONFIG, is_adapter
from rope_extend.models.decoders import unwrap
from rope_extend.models.gguf_checkpoint import gguf_file
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.rotary_tables import length_groups
from rope_extend.patching import current_patch, patch_model
from rope_extend.units import format_length

DOUBLINGS = 3
"""How many doublings of the trained window are measured by default, without an adapter."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidates:
    """Everything about the models to compare that is known without their weights.

    Attributes:
        name: the checkpoint's directory or hub id.
        load_options: how it is loaded.
        empty: the model on the meta device.
        info: its position encoding.
        lengths: lengths in tokens, ascending; methods extend the model to the longest.
        rows: the rows without controls, those of methods first.
    """

    name: str
    load_options: LoadOptions
    empty: nn.Module
    info: ModelInfo
    lengths: tuple[int, ...]
    rows: Sequence[RowSpec]

    @classmethod
    def of(cls, config: ModelConfig, load_options: LoadOptions | None = None) -> Self:
        """Check the model, the methods and the adapters of a config, and make their encodings.

        An adapter of another model is refused, one that changes the model's own weights, and a method that
        changes nothing.
        """
        load_options = load_options or LoadOptions.of(config)
        empty = load_options.empty(config.model)
        if gguf_file(config.model) is None:
            with suppress(OSError, TypeError):  # as from_pretrained does; it may name another BOS
                empty.generation_config = GenerationConfig.from_pretrained(config.model)
        model_info = info(empty, trained_length=config.trained_length)
        shape = model_info.shape
        records = {adapter: read_record(adapter) for adapter in config.adapters}
        window = shape.trained_length
        reach = max((each.target_length for each in records.values()), default=0)
        reach = reach if reach > window else window << DOUBLINGS
        doublings = range((reach // window).bit_length())
        lengths = config.lengths or tuple(sorted({*(window << n for n in doublings), reach}))
        for adapter, record in records.items():
            if window < record.target_length < lengths[-1]:
                logger.warning(
                    "%s has a window of %s, and is measured up to %s: expect nonsense after it",
                    adapter, *map(format_length, (record.target_length, lengths[-1])),
                )  # fmt: skip
        labels = method_labels(config.methods or ())  # refuses a saved encoding that is given twice
        if PLAIN in labels:
            labels[PLAIN] = plain_label(model_info)
        rows = [
            RowSpec(label, method, method_encoding(method, shape, lengths[-1]))
            for method, label in labels.items()
        ]
        for adapter, record in records.items():
            _check_removable(Path(adapter))
            if record.shape != shape:
                raise RopeExtendError(
                    f"the adapter in {adapter} belongs to another model than {config.model!r}: it was "
                    f"trained on {record.shape}, and the model has {shape}; give the adapter's base model"
                )
        rows += [
            RowSpec(label, adapter, records[adapter].encoding, records[adapter])
            for adapter, label in adapter_labels(records).items()
        ]
        candidates = cls(config.model, load_options, empty, model_info, lengths, rows)
        candidates.length_groups(lengths)  # refuses a method that changes nothing
        return candidates

    @property
    def trained_length(self) -> int:
        """The pretrained window in tokens."""
        return self.info.shape.trained_length

    def is_plain(self, row: RowSpec) -> bool:
        """Whether a row is plain RoPE, not fine-tuned beyond the trained window."""
        if row.record is not None:
            return row.record.encoding.name == PLAIN and row.record.target_length <= self.trained_length
        return row.source == PLAIN or (row.encoding is None and self.info.encoding == PLAIN)

    def length_groups(self, lengths: Sequence[int]) -> dict[str, list[list[int]]]:
        """The groups of lengths with equal tables, by the label of the row.

        One pass over a document measures a group, see `rope_extend.models.rotary_tables.length_groups`.
        """
        groups = {}
        for row in self.rows:
            with quiet_patching(), self._patched(self.empty, row):
                groups[row.label] = length_groups(self.empty, lengths)
        return groups

    @contextmanager
    def prepared(self, lm: Any, row: RowSpec) -> Iterator[nn.Module]:
        """The model under the method of a row, or with its adapter, within the block."""
        if row.record is None:
            with self._patched(lm, row):
                yield lm
            return
        tuned = cast_adapter(load_adapter(lm, row.source))
        try:
            yield tuned.eval()
        finally:
            patch_of_adapter = current_patch(tuned)
            remove_adapter(tuned)
            if patch_of_adapter is not None:
                patch_of_adapter.remove()

    def check_adapters(self, lm: Any, rows: Collection[RowSpec]) -> None:
        """Load adapters once: one of another base model is refused before anything is measured."""
        for row in {row.adapter: row for row in rows if row.record is not None}.values():
            with quiet_patching(), self.prepared(lm, row):
                pass

    @contextmanager
    def _patched(self, lm: Any, row: RowSpec) -> Iterator[None]:
        """The model with the encoding of a row, and without its adapter."""
        if row.encoding is None:
            yield
            return
        target = None if row.source == PLAIN else self.lengths[-1]
        target = target if row.record is None else row.record.target_length
        with (
            quiet_patching(".saving"),
            patch_model(lm, row.encoding, trained_length=self.trained_length, target_length=target) as patch,
        ):
            if row.record is None and row.source != PLAIN and not patch.changed:
                raise PatchError(
                    f"{row.source} leaves the rotary tables of {self.name} unchanged; leave it out of "
                    f"methods, or use {AS_IS}"
                )
            yield

    def subject(self, model: nn.Module, row: RowSpec) -> dict[str, Any]:
        """What a row says of the model that was measured, see `EvaluationRow`."""
        patch = current_patch(model)
        return {
            "label": row.label,
            "encoding": patch.encoding.to_dict() if patch else None,
            "model": self.name,
            "adapter": row.adapter,
            "trained_length": self.trained_length,
            "rope_parameters": None if patch else self.info.rope_parameters,
            "target_length": row.record.target_length if row.record else None,
        }


def plain_label(info: ModelInfo) -> str:
    """The label of plain RoPE, which says if it is not the model before its extension."""
    own = info.encoding != PLAIN and (info.record is not None or info.start == CURRENT)
    return SAME_WEIGHTS if own else PLAIN


def cast_adapter(model: Any) -> Any:
    """Give the LoRA matrices of a PEFT model in float16 or bfloat16 its dtype, in place; returns the model.

    peft loads them as float32, and then computes float32 states as wide as those of the MLPs. Training
    multiplies by autocast in the dtype of the model, and this gives the same numbers bit for bit.
    """
    from peft.tuners.lora import LoraLayer

    dtype = unwrap(model).dtype
    if dtype in (torch.float16, torch.bfloat16):
        for layer in model.modules():
            if isinstance(layer, LoraLayer) and not layer.lora_variant:  # a variant may need its own dtypes
                for name in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
                    getattr(layer, name).to(dtype)
    return model


def _check_removable(adapter: Path) -> None:
    """Refuse an adapter that changes the base model's own weights on loading: later rows would keep them."""
    if not is_adapter(adapter):
        raise RopeExtendError(
            f"{adapter} holds no adapter ({ADAPTER_CONFIG}). If it is a merged checkpoint, or one of which "
            "all weights were trained, give it as the model"
        )
    config = read_json(adapter / ADAPTER_CONFIG)
    bias = config.get("bias", "none")
    reason = changes_base(SimpleNamespace(**config)) or (None if bias == "none" else f'bias="{bias}"')
    if reason is not None:
        raise RopeExtendError(
            f"the adapter in {adapter} changes the base model's own weights on loading ({reason}), also for "
            "the rows that follow. Merge it first (rope-extend merge, or merge_and_unload of peft and "
            "rope_extend.save), and give the merged checkpoint as the model"
        )


def method_encoding(method: str, shape: RopeShape, longest: int) -> Encoding | None:
    """The encoding of a method for the longest length, or for `factor` windows, as in `yarn(factor=2)`.

    None for the checkpoint's own.
    """
    if method == AS_IS:
        return None
    if method == PLAIN:
        return encoding(PLAIN)
    named = method_named(method)
    if longest <= shape.trained_length:
        raise RopeExtendError(
            f"{method} has nothing to extend: the longest length, {longest}, is within the trained window of "
            f"{shape.trained_length} tokens; give a longer one, or use only the methods {AS_IS} and {PLAIN}"
        )
    parameters = dict(named.parameters)
    factor = parameters.pop("factor", None)
    if isinstance(factor, (int, float)) and 1 < factor <= longest:
        named, longest = replace(named, parameters=parameters), round(factor * shape.trained_length)
    return named.for_target(shape, longest)
