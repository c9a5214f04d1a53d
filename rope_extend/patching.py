"""Patching: the one place that changes a model, and changes it back bit for bit.

A patch replaces the decoder's rotary modules by stand-ins and keeps the model's config, generation config
and tokenizer in step, so that `save_pretrained` writes a checkpoint which stock transformers reads. For an
encoding that is not rotary, the stand-ins turn nothing, and what acts instead is installed beside them. Every
change goes through an undo log of plain data, so that a patched model can be copied and pickled, and an
exception half-way leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from rope_extend.attention.biases import BiasReader
from rope_extend.attention.functions import attention_modules, remove_readers
from rope_extend.attention.linear import LinearReader
from rope_extend.attention.reader import PositionReader
from rope_extend.attention.rotation import RotationReader
from rope_extend.encodings import (
    AbsoluteEncoding,
    BiasEncoding,
    Encoding,
    KernelEncoding,
    ModelShape,
    PositionRemap,
    RopeEncoding,
    RopeShape,
    method_named,
    rotary_method,
)
from rope_extend.encodings.base import check_length, check_number
from rope_extend.errors import PatchError, RopeExtendError
from rope_extend.families import FamilyAdapter, adapter_for
from rope_extend.inspection import CONFIG_RECORD, active_table, layer_config, rotary_part, shape_of, unwrap
from rope_extend.learned import LEARNED, LearnedParameters
from rope_extend.rotary import ExtendedRotaryEmbedding, Start
from rope_extend.stock_forms import CARRIED, nested, softmax_scale_of, stock_forms, stock_parameters
from rope_extend.undo import UndoLog
from rope_extend.vectors import VectorReader

logger = logging.getLogger(__name__)

_STACK = "_rope_extend_patches"


def current_patch(model: nn.Module) -> Patch | None:
    """The patch that is active on `model`, or None."""
    stack = getattr(unwrap(model), _STACK, None)
    return stack[-1] if stack else None


def _resting(shape: RopeShape) -> RopeEncoding:
    """The schedule that turns nothing, for an encoding that is not rotary."""
    return rotary_method("nope").for_target(shape, shape.trained_length)


def _reach(decoder: Any, adapter: FamilyAdapter) -> int | None:
    """How many tokens the layers that rotate can see, if the others are without positions and these slide."""
    if adapter.rotates is None or adapter.layer_types:
        return None
    rotating = [module for module in attention_modules(decoder) if adapter.rotates(module)]
    windows = [int(getattr(module, "sliding_window", None) or 0) for module in rotating]
    return max(windows) if windows and all(windows) else None


class Patch:
    """A handle on one change of a model's position encoding; also a context manager that undoes it.

    Attributes:
        model: the model that was handed in.
        encoding: what it reads with now.
        rotary: the schedule of its rotary tables, the encoding itself unless that is not rotary.
        shape: the rotary shape the tables are computed from, as pretrained.
        target_length: the window it is meant to read, in tokens.
        changed: whether the model reads otherwise than before the patch.
        learned: the parameters that the encoding learns, a part of the model until the patch is removed, and
            kept here afterwards; None if there are none.
    """

    def __init__(self, model: nn.Module, encoding: Encoding, shape: RopeShape, target_length: int) -> None:
        self.model = model
        self.encoding = encoding
        self.rotary = encoding if isinstance(encoding, RopeEncoding) else _resting(shape)
        self.shape = shape
        self.target_length = target_length
        self.changed = False
        self.learned: LearnedParameters | None = None
        self._undo = UndoLog()
        self._reader: PositionReader | None = None
        self._starts: dict[str, Start | None] = {}
        self._active = False

    def _apply(self, tokenizer: Any | None) -> None:
        base = unwrap(self.model)
        adapter = adapter_for(base.config.model_type)
        modules = adapter.rotary_modules(base.base_model)
        try:
            self._act_beside_tables(base, adapter)
            for path, module in modules.items():
                before = active_table(module, base.config, self.target_length)
                self._starts[path] = self._start(base, module, *before)
                self._replace(base, path, module, adapter)
                installed = base.base_model.get_submodule(path)
                after = active_table(installed, base.config, self.target_length)
                self.changed |= not torch.allclose(before[0], after[0], rtol=1e-5, atol=0)
                self.changed |= abs(before[1] - after[1]) > 1e-6
            self.changed |= self.rotary.decay(self.shape) is not None
            self.changed |= self.rotary.logit_scale(self.shape, torch.arange(1)) is not None
            self.changed |= self.rotary is not self.encoding
            self._keep_config_in_step(base, adapter)
            if tokenizer is not None:
                self._undo.set(tokenizer, "model_max_length", self.target_length)
            self._undo.set(base, _STACK, [*getattr(base, _STACK, []), self])
        except BaseException:
            self._unwind(base.base_model)
            raise
        self._active = True

    def _act_beside_tables(self, base: Any, adapter: FamilyAdapter) -> None:
        """Install what the encoding needs beside its tables, and put away what an earlier one needed."""
        decoder = base.base_model
        remove_readers(decoder, self._undo)
        if getattr(decoder, LEARNED, None) is not None:
            self._undo.set(decoder, LEARNED, None)
        encoding = self.encoding
        if isinstance(encoding, BiasEncoding):
            self._reader = reader = BiasReader(encoding, adapter)
            reader.install(decoder, self._undo)
            modules = [module for module in attention_modules(decoder) if reader.acts_on(module)]
            reader.shape = self._model_shape(base, modules[0])
            layers = sorted({int(module.layer_idx) for module in modules})
            reader.learned = self._learn(decoder, reader.shape, layers)
            return
        if isinstance(encoding, AbsoluteEncoding):
            shape = self._model_shape(base)
            self._reader = adder = VectorReader(encoding, shape, adapter)
            adder.install(decoder, self._undo)
            adder.learned = self._learn(decoder, shape, [])
            return
        if isinstance(encoding, KernelEncoding):
            self._reader = LinearReader(encoding, self.shape, adapter)
            self._reader.install(decoder, self._undo)
            return
        scales = self.rotary.logit_scale(self.shape, torch.arange(1)) is not None
        inside = scales or self.rotary.rotates_in_attention
        if inside or self.rotary.per_row:
            self._reader = RotationReader(self.rotary, self.shape, adapter)
            if inside:
                self._reader.install(decoder, self._undo)
            else:
                self._reader.watch(decoder, self._undo)

    def _model_shape(self, base: Any, attention: Any = None) -> ModelShape:
        """The numbers of a model, and of an attention module of it, where that says more than its config."""
        config = layer_config(base.config)
        heads, hidden = config.num_attention_heads, config.hidden_size
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        width = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None) or head_dim
        value = getattr(attention, "v_head_dim", None) or width
        return ModelShape(heads, hidden, self.shape.trained_length, width, value)

    def _learn(self, decoder: Any, shape: ModelShape, layers: list[int]) -> LearnedParameters | None:
        """Make what the encoding learns a part of the model."""
        if self.encoding.initial(shape):
            device = next(decoder.parameters()).device
            self.learned = LearnedParameters(self.encoding, shape, layers, device)
            self._undo.set(decoder, LEARNED, self.learned)
        return self.learned

    def _unwind(self, decoder: Any) -> None:
        if self._reader is not None:
            self._reader.leave(decoder)
        self._undo.unwind()

    def _replace(self, base: Any, path: str, module: Any, adapter: FamilyAdapter) -> None:
        parent_path, _, name = path.rpartition(".")
        kind = adapter.layer_type(base.config)
        original: Any = module.original if kind and isinstance(module, ExtendedRotaryEmbedding) else module
        table = original.inv_freq if kind is None else getattr(original, f"{kind}_inv_freq")
        sections = (getattr(module, "sections", None) or module.mrope_section) if adapter.sections else ()
        stand_in = ExtendedRotaryEmbedding(
            self.rotary,
            self.shape,
            adapter.rotary_config(base.config),
            device=table.device,
            widened=adapter.widened,
            reader=self._reader,
            original=original,
            layer_type=kind,
            pairs=table.shape[-1],
            sections=sections,
            dtype=torch.float32 if base.config.model_type in adapter.in_float32 else None,
        )
        stand_in.train(module.training)
        self._undo.set(base.base_model.get_submodule(parent_path), name, stand_in)

    def _keep_config_in_step(self, base: Any, adapter: FamilyAdapter) -> None:
        config = base.config
        part, old = rotary_part(config)
        old_parameters, old_length = dict(old), part.max_position_embeddings
        if not getattr(part, "is_heterogeneous", False) and getattr(part, "head_dim", 0) is None:
            # Mixtral leaves it open, and the stock functions for `yarn` and `dynamic` then fail on reload.
            self._undo.set(part, "head_dim", part.hidden_size // part.num_attention_heads)
        pairs = next(iter(adapter.rotary_modules(base.base_model).values())).pairs
        softmax_scale = softmax_scale_of(base)
        stock = None
        if self.rotary is self.encoding:
            forms = stock_forms(self.rotary, self.shape, pairs, softmax_scale)
            stock = stock_parameters(
                self.rotary, self.shape, adapter, config, forms, pairs, self.target_length
            )
        none = rotary_method("none").for_target(self.shape, self.shape.trained_length)
        parameters = stock or next(stock_forms(none, self.shape, pairs, softmax_scale))
        parameters |= {
            key: old_parameters[key] for key in CARRIED if key in old_parameters and key not in parameters
        }
        if "llama_4_scaling_beta" in parameters:  # Ministral 3 scales queries by the window they stand in
            parameters.setdefault("original_max_position_embeddings", self.shape.trained_length)
        if getattr(part, "layer_rope_theta", None):  # Granite's bases by layer, 0 where nothing is rotated
            bases = [theta and parameters["rope_theta"] for theta in part.layer_rope_theta]
            self._undo.set(part, "layer_rope_theta", bases)
        self._undo.set(part, "rope_parameters", nested(adapter, config, parameters))
        length = self.shape.trained_length  # of a stock form that there is not
        if stock is not None:
            length = self.rotary.max_position_embeddings(self.shape, self.target_length)
        self._undo.set(part, "max_position_embeddings", length)
        if hasattr(part, "original_max_position_embeddings"):  # Phi-3 gives it precedence over the above
            self._undo.set(part, "original_max_position_embeddings", self.shape.trained_length)
        record = {
            "encoding": self.encoding.to_dict(),
            "shape": asdict(self.shape),
            "target_length": self.target_length,
            "rope_parameters": dict(parameters),
        }
        self._undo.set(config, CONFIG_RECORD, record)
        generation = getattr(base, "generation_config", None)
        if generation is not None and getattr(generation, "max_length", None) == old_length:
            self._undo.set(generation, "max_length", self.target_length)
        if base.device.type != "meta":  # on a model without weights, a patch is a rehearsal
            was = f"{old_parameters.get('rope_type', 'default')} (window {old_length})"
            self._tell(config.model_type, was, has_stock_form=stock is not None)

    def _tell(self, model_type: str, was: str, *, has_stock_form: bool) -> None:
        """Log what was replaced, and what a user has to know about it."""
        logger.info(
            "%s: %s replaced by %s (window %d, trained on %d)",
            model_type, was, self.encoding, self.target_length, self.shape.trained_length,
        )  # fmt: skip
        kind = adapter_for(model_type).layer_type(unwrap(self.model).config)
        if kind is not None:
            logger.info(
                "%s: only %s layers are extended; the tables of others are as they were", model_type, kind
            )
        decoder = unwrap(self.model).base_model
        reach = _reach(decoder, adapter_for(model_type))
        if reach is not None and reach <= self.shape.trained_length and self.changed:
            logger.warning(
                "%s rotates only in layers that see %d tokens, in texts of any length; %s cannot help there, "
                "and changes what they learnt", model_type, reach, self.encoding,
            )  # fmt: skip
        if not has_stock_form:
            logger.warning(
                "%s has no form that stock transformers loads for %s; only rope_extend.save keeps it, and "
                "only rope_extend.load restores it; otherwise the checkpoint reads with its old window",
                self.encoding, model_type,
            )  # fmt: skip
        elif self.encoding.depends_on_length:
            logger.warning(
                "%s: stock transformers reads its form by the longest row of a batch, and inexactly with a "
                "cache beyond %d tokens; rope_extend.load reads it as it is read now",
                self.encoding, self.shape.trained_length,
            )  # fmt: skip

    def learn(self, values: Mapping[str, Tensor], source: str, *, partial: bool = False) -> None:
        """Put values into the learned parameters, by name; `partial` lets some of them be.

        Raises:
            RopeExtendError: the encoding learns nothing, or other things; `source` says where they are from.
        """
        if self.learned is not None:
            self.learned.put(values, source, partial=partial)
        elif values:
            raise RopeExtendError(f"{source} has values for {min(values)!r}, and {self.encoding} learns none")

    def mix(self, share: float) -> None:
        """Read by a mix of the model's own rotation and the encoding: on the way from the one to the other.

        Rotary frequencies, and factors on cos, sin and logits, go in a straight line from the model's own to
        the encoding's; where that does not rotate, this is interpolation of positions by a factor that grows
        without end. Biases and added vectors are multiplied by `share`; of linear attention and softmax it
        is the outputs that are mixed. 0 is the model as it was, and 1, which a new patch begins with, is the
        encoding, each bit for bit.

        Config and record are the encoding's all the while, and a cache that was filled under one share is
        wrong under another.

        Raises:
            RopeExtendError: `share` is not from 0 to 1.
            PatchError: the patch is not the one that acts, or there is no such way to its encoding.
        """
        share = check_number("mix", "share", share, minimum=0, maximum=1)
        if current_patch(self.model) is not self:
            raise PatchError(
                f"cannot mix in {self.encoding}: its patch was removed, or another acts on the model"
            )
        base, rotary, why = unwrap(self.model), self.rotary, ""
        if rotary.depends_on_length or rotary.rotates_in_attention or rotary.start_tokens:
            why = "it does not rotate by one table"
        elif not self.changed:
            why = "the model reads by it already"
        elif None in self._starts.values():
            why = "the model's own depends on the length, or is an earlier patch's"
        if why:
            raise PatchError(
                f"there is no way by degrees from the model's rotation to {self.encoding}: {why}; train "
                f"without one (anneal_steps 0)"
            )
        modules = adapter_for(base.config.model_type).rotary_modules(base.base_model)
        for path, module in modules.items():
            start = self._starts[path]
            assert isinstance(module, ExtendedRotaryEmbedding)
            assert start is not None
            if share == 0:
                self._follow(base, start.module, module.inv_freq.device)
            if isinstance(self._reader, LinearReader):
                self._reader.start = start
                module.mix(0.0 if share == 0 else 1.0, start)  # between, queries and keys turn in attention
            else:
                module.mix(share, start)
        if self._reader is not None:
            self._reader.share = share

    def _start(self, base: Any, module: nn.Module, table: Tensor, factor: float) -> Start | None:
        """What a rotary module rotates by before the patch; None if that is not one table, or not stock."""
        if isinstance(module, ExtendedRotaryEmbedding):
            return None
        short, same = active_table(module, base.config, 1)
        if not torch.equal(short, table) or same != factor:
            return None
        return Start(module, table[: self.shape.dim // 2], factor)

    def remove(self) -> None:
        """Undo the patch: modules, config and tokenizer are the objects and values they were before.

        Removing twice does nothing.

        Raises:
            PatchError: a later patch of the same model is still active.
        """
        if not self._active:
            return
        latest = current_patch(self.model)
        if latest is not self:
            raise PatchError(
                f"cannot remove {self.encoding}: {latest.encoding if latest else None} was applied after it "
                f"and is still active; remove that first"
            )
        base = unwrap(self.model)
        modules = adapter_for(base.config.model_type).rotary_modules(base.base_model)
        devices = {path: module.inv_freq.device for path, module in modules.items()}
        self._unwind(base.base_model)
        self._active = False
        for path, device in devices.items():
            self._follow(base, base.base_model.get_submodule(path), device)

    @staticmethod
    def _follow(base: Any, module: Any, device: torch.device) -> None:
        """Bring a module to where the model went while the module was out of it."""
        present = next(module.buffers()).device
        if device.type == "meta" or present == device:
            return
        if present.type == "meta":
            module.to_empty(device=device)
            base._init_weights(module)
        else:
            module.to(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "active" if self._active else "removed"
        return (
            f"Patch({self.encoding}, {self.shape.trained_length} -> {self.target_length} tokens, {state}, "
            f"changed={self.changed})"
        )


def patch_model(
    model: nn.Module,
    encoding: Encoding,
    *,
    trained_length: int | None = None,
    target_length: int | None = None,
    tokenizer: Any | None = None,
    learned: Mapping[str, Tensor] | None = None,
) -> Patch:
    """Put an encoding into a model; the returned `Patch` undoes it, by `remove()` or as a context manager.

    Scaling that the checkpoint already carries is replaced, not added to. Patches nest, and are removed in
    the reverse order.

    Args:
        model: a transformers model of a supported family; PEFT-wrapped, before or after, is fine.
        encoding: what it shall read with.
        trained_length: the window it was pretrained on, in tokens, where the config does not say it right.
        target_length: the window it shall read, in tokens; by default the encoding's own, or else the
            model's present one.
        tokenizer: its `model_max_length` is kept in step.
        learned: values for what the encoding learns, by name, such as another patch's
            `learned.state_dict()`; what is not named starts as the encoding says.

    Raises:
        UnsupportedModelError: no adapter for the family.
        RopeExtendError: the encoding is not of a kind that can be patched in, or a length is invalid.
    """
    if not isinstance(encoding, Encoding):
        raise RopeExtendError(
            f"patch_model takes an encoding, such as encoding('yarn', factor=8.0), got {encoding!r}"
        )
    if isinstance(encoding, PositionRemap):
        raise RopeExtendError(f"{encoding.name} changes positions, which this version does not patch in")
    shape = shape_of(model, trained_length)
    if target_length is None:
        target_length = encoding.target_length(shape)
    if target_length is None:
        target_length = rotary_part(unwrap(model).config)[0].max_position_embeddings
    patch = Patch(model, encoding, shape, check_length("patch_model", "target_length", target_length))
    with torch.device("cpu"):  # tables are made there, also for a model that is made under another device
        patch._apply(tokenizer)
    if learned is not None:
        try:
            patch.learn(learned, "learned=", partial=True)
        except BaseException:
            patch.remove()
            raise
    return patch


def extend(
    model: nn.Module,
    target_length: int,
    method: str = "yarn",
    *,
    trained_length: int | None = None,
    tokenizer: Any | None = None,
    short: str | None = None,
    **parameters: Any,
) -> Patch:
    """Make a model read `target_length` tokens; the one dial is the length, everything else follows.

    Args:
        model: a transformers model of a supported family; PEFT-wrapped, before or after, is fine.
        target_length: the window it shall read, in tokens; longer than the one it was trained on.
        method: a method's name, see `rope_extend.encodings()`; or rotary ones composed, `resonance(yarn)`.
        trained_length: the window it was pretrained on, in tokens, where the config does not say it right.
        tokenizer: its `model_max_length` is kept in step.
        short: `original` reads texts within the trained window as the model was pretrained, exactly, and
            longer ones by the method; the same as the method `short_original(...)`.
        parameters: the method's own, such as `beta_fast=16`; never `factor`, which follows from the length.

    Raises:
        UnsupportedModelError: no adapter for the family.
        PatchError: the rotary tables would not change.
        RopeExtendError: an unknown method or parameter, or a target that is not beyond the trained window.
    """
    if short not in (None, "original"):
        raise RopeExtendError(f"extend: short must be 'original' or None, got {short!r}")
    named = method_named(f"short_original({method})" if short else method)
    target_length = check_length("extend", "target_length", target_length)
    shape = shape_of(model, trained_length)
    if target_length <= shape.trained_length:
        raise RopeExtendError(
            f"extend: target_length must exceed the trained window of {shape.trained_length} tokens, got "
            f"{target_length}; within it the model needs no extension"
        )
    encoding = named.for_target(shape, target_length, **parameters)
    patch = patch_model(
        model, encoding, trained_length=shape.trained_length, target_length=target_length, tokenizer=tokenizer
    )
    if not patch.changed:
        patch.remove()
        raise PatchError(
            f"extend: {encoding} leaves the rotary tables as they were, so the model would not read further; "
            f"choose one of the scaling methods, or use patch_model for a control"
        )
    return patch
