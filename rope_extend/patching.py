"""Patching: the one place that changes a model, and changes it back bit for bit.

A patch replaces the decoder's rotary modules by stand-ins and keeps the model's config, generation config
and tokenizer in step, so that `save_pretrained` writes a checkpoint which stock transformers reads. Every
change goes through an undo log of plain data, so that a patched model can be copied and pickled, and an
exception half-way leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_extend.attention import AttentionReader, remove_readers
from rope_extend.encodings import Encoding, RopeEncoding, RopeShape, rotary_method
from rope_extend.encodings.base import check_length
from rope_extend.errors import PatchError, RopeExtendError, UnsupportedModelError
from rope_extend.families import FamilyAdapter, adapter_for
from rope_extend.rotary import ExtendedRotaryEmbedding
from rope_extend.undo import UndoLog

logger = logging.getLogger(__name__)

CONFIG_RECORD = "rope_extend"
"""The attribute of `config` that says what was done; stock loaders carry it along and ignore it."""

_STACK = "_rope_extend_patches"
_CARRIED = ("partial_rotary_factor", "mrope_section")
"""Rotary parameters that describe the model's shape, not its scaling, and survive a change of scaling."""


# ---------------------------------------------------------------------------------------------------------
# Reading a model


def unwrap(model: nn.Module) -> Any:
    """The transformers model inside PEFT, DistributedDataParallel and `torch.compile` wrappers.

    Raises:
        RopeExtendError: there is none.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):  # peft
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):  # torch.compile
            inner = inner._orig_mod
        elif isinstance(getattr(inner, "module", None), nn.Module):  # data parallel wrappers
            inner = inner.module
        else:
            raise UnsupportedModelError(
                f"expected a transformers model, such as AutoModelForCausalLM.from_pretrained returns, "
                f"got {type(model).__name__}"
            )
    return inner


def trained_length_of(config: Any) -> int:
    """The window, in tokens, that a checkpoint was pretrained on, before any scaling it carries.

    Raises:
        RopeExtendError: the config does not say, as with `linear` scaling, where `max_position_embeddings`
            is the trained length in some checkpoints and the scaled one in others.
    """
    record = config_record(config)
    if record is not None:
        return RopeShape(**record["shape"]).trained_length
    parameters = config.rope_parameters or {}
    rope_type = parameters.get("rope_type", "default")
    original = parameters.get("original_max_position_embeddings")
    if rope_type == "default" or rope_type == "dynamic":
        return int(config.max_position_embeddings)
    if original is None:
        original = getattr(config, "original_max_position_embeddings", None)
    if original is None:
        raise RopeExtendError(
            f"this checkpoint already carries {rope_type!r} scaling (factor {parameters.get('factor')}) and "
            f"does not say which window it was pretrained on; max_position_embeddings is "
            f"{config.max_position_embeddings}. Give trained_length= (--trained-length on the command line)"
        )
    return int(original)


def config_record(config: Any) -> dict[str, Any] | None:
    """What rope_extend wrote into a config, or None.

    `{"encoding": ..., "shape": ..., "target_length": ..., "rope_parameters": ...}`. A record whose
    `rope_parameters` are no longer the config's was overtaken by somebody's edit, and is ignored with a
    warning.

    Raises:
        RopeExtendError: the record is damaged.
    """
    record = getattr(config, CONFIG_RECORD, None)
    if record is None:
        return None
    try:
        RopeShape(**record["shape"])
        Encoding.from_dict(record["encoding"])
        written = dict(record["rope_parameters"])
    except (KeyError, TypeError, ValueError) as error:
        raise RopeExtendError(
            f"config.{CONFIG_RECORD} is damaged ({error}): {record!r}; without it the checkpoint can be read"
        ) from error
    current = config.rope_parameters or {}
    if all(current.get(key) == value for key, value in written.items()):
        return dict(record)
    logger.warning(
        "config.%s was written beside other rope_parameters than the present %s; it is ignored",
        CONFIG_RECORD, current,
    )  # fmt: skip
    return None


def shape_of(model: nn.Module, trained_length: int | None = None) -> RopeShape:
    """The rotary shape of a model as it was pretrained: rotated channels, base, trained window.

    Raises:
        UnsupportedModelError: the family has no adapter.
        RopeExtendError: the config does not say which window it was trained on, or `trained_length` is
            invalid.
    """
    base = unwrap(model)
    config = base.config
    modules = adapter_for(config.model_type).rotary_modules(base.base_model)
    widths = {module.inv_freq.shape[-1] * 2 for module in modules.values()}
    if len(widths) != 1:
        raise UnsupportedModelError(f"the rotary modules of this model differ in width: {sorted(widths)}")
    record = config_record(config)
    theta = record["shape"]["theta"] if record else (config.rope_parameters or {}).get("rope_theta")
    if theta is None:
        raise RopeExtendError(
            f"config.rope_parameters of this {config.model_type} model has no rope_theta, only "
            f"{config.rope_parameters}; set it to the base the model was pretrained with"
        )
    if trained_length is None:
        trained_length = trained_length_of(config)
    return RopeShape(widths.pop(), theta, trained_length)


def current_patch(model: nn.Module) -> Patch | None:
    """The patch that is active on `model`, or None."""
    stack = getattr(unwrap(model), _STACK, None)
    return stack[-1] if stack else None


def active_table(module: Any, config: Any, seq_len: int) -> tuple[Tensor, float]:
    """`(inv_freq [dim/2] float64, attention factor)` that a rotary module uses for `seq_len` tokens."""
    if isinstance(module, ExtendedRotaryEmbedding):
        return (
            module.encoding.inv_freq(module.shape, seq_len),
            module.encoding.attention_factor(module.shape, seq_len),
        )
    # From the stock formula, not from the module's buffer, which a cast of the model may have rounded.
    if module.rope_type == "default":
        table, factor = module.compute_default_rope_parameters(config)
    else:
        table, factor = ROPE_INIT_FUNCTIONS[module.rope_type](config, torch.device("cpu"), seq_len=seq_len)
    return table.to("cpu", torch.float64), float(factor)


def length_groups(model: nn.Module, lengths: Sequence[int]) -> list[list[int]]:
    """Group sequence lengths for which the model uses equal rotary tables, each group ascending.

    One forward over the longest of a group gives the losses at all its lengths. Static encodings give one
    group; dynamic NTK gives one for all lengths within the trained window and one for each beyond.

    Raises:
        UnsupportedModelError: the family has no adapter.
    """
    base = unwrap(model)
    modules = adapter_for(base.config.model_type).rotary_modules(base.base_model)
    if all(isinstance(m, ExtendedRotaryEmbedding) and not m.encoding.per_row for m in modules.values()):
        return [sorted(set(lengths))]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for length in sorted(set(lengths)):
        tables = [active_table(module, base.config, length) for module in modules.values()]
        key = tuple((tuple(table.tolist()), factor) for table, factor in tables)
        groups.setdefault(key, []).append(length)
    return list(groups.values())


# ---------------------------------------------------------------------------------------------------------
# Changing a model


def _stock_parameters(
    encoding: RopeEncoding, shape: RopeShape, adapter: FamilyAdapter
) -> dict[str, Any] | None:
    """The `rope_parameters` in which stock transformers can carry an encoding, native if the family's config
    class accepts that; None if there are none.
    """
    for make in (encoding.rope_parameters, encoding.longrope_parameters):
        with contextlib.suppress(RopeExtendError):
            form = make(shape)
            if adapter.accepts(form["rope_type"]):
                return form
    return None


class Patch:
    """A handle on one change of a model's position encoding; also a context manager that undoes it.

    Attributes:
        model: the model that was handed in.
        encoding: what it reads with now.
        shape: the rotary shape the tables are computed from, as pretrained.
        target_length: the window it is meant to read, in tokens.
        changed: whether the tables differ from those before the patch.
    """

    def __init__(
        self, model: nn.Module, encoding: RopeEncoding, shape: RopeShape, target_length: int
    ) -> None:
        self.model = model
        self.encoding = encoding
        self.shape = shape
        self.target_length = target_length
        self.changed = False
        self._undo = UndoLog()
        self._reader: AttentionReader | None = None
        self._active = False

    def _apply(self, tokenizer: Any | None) -> None:
        base = unwrap(self.model)
        adapter = adapter_for(base.config.model_type)
        modules = adapter.rotary_modules(base.base_model)
        try:
            self._act_inside_attention(base.base_model, adapter)
            for path, module in modules.items():
                before = active_table(module, base.config, self.target_length)
                self._replace(base, path, module, adapter)
                installed = base.base_model.get_submodule(path)
                after = active_table(installed, base.config, self.target_length)
                self.changed |= not torch.allclose(before[0], after[0], rtol=1e-5, atol=0)
                self.changed |= abs(before[1] - after[1]) > 1e-6
            encoding = self.encoding
            self.changed |= encoding.decay(self.shape) is not None
            self.changed |= encoding.logit_scale(self.shape, torch.arange(1)) is not None
            self._keep_config_in_step(base, adapter)
            if tokenizer is not None:
                self._undo.set(tokenizer, "model_max_length", self.target_length)
            self._undo.set(base, _STACK, [*getattr(base, _STACK, []), self])
        except BaseException:
            self._unwind(base.base_model)
            raise
        self._active = True

    def _act_inside_attention(self, decoder: Any, adapter: FamilyAdapter) -> None:
        """Install what the encoding needs beside its tables, and put away what an earlier one needed."""
        scales = self.encoding.logit_scale(self.shape, torch.arange(1)) is not None
        inside = scales or self.encoding.rotates_in_attention
        if not inside:
            remove_readers(decoder, self._undo)
        if inside or self.encoding.per_row:
            self._reader = AttentionReader(self.encoding, self.shape, adapter)
            if inside:
                self._reader.install(decoder, self._undo)
            else:
                self._reader.watch(decoder, self._undo)

    def _unwind(self, decoder: Any) -> None:
        if self._reader is not None:
            self._reader.leave(decoder)
        self._undo.unwind()

    def _replace(self, base: Any, path: str, module: Any, adapter: FamilyAdapter) -> None:
        parent_path, _, name = path.rpartition(".")
        stand_in = ExtendedRotaryEmbedding(
            self.encoding,
            self.shape,
            base.config,
            device=module.inv_freq.device,
            widened=adapter.widened,
            reader=self._reader,
        )
        stand_in.train(module.training)
        self._undo.set(base.base_model.get_submodule(parent_path), name, stand_in)

    def _keep_config_in_step(self, base: Any, adapter: FamilyAdapter) -> None:
        config = base.config
        old_parameters, old_length = dict(config.rope_parameters or {}), config.max_position_embeddings
        stock = _stock_parameters(self.encoding, self.shape, adapter)
        parameters = stock or {"rope_type": "default", "rope_theta": self.shape.theta}
        parameters |= {key: old_parameters[key] for key in _CARRIED if key in old_parameters}
        self._undo.set(config, "rope_parameters", parameters)
        length = self.encoding.max_position_embeddings(self.shape, self.target_length)
        self._undo.set(config, "max_position_embeddings", length)
        if hasattr(config, "original_max_position_embeddings"):  # Phi-3 gives it precedence over the above
            self._undo.set(config, "original_max_position_embeddings", self.shape.trained_length)
        if getattr(config, "head_dim", 0) is None:
            # Mixtral leaves it open, and the stock functions for `yarn` and `dynamic` then fail on reload.
            self._undo.set(config, "head_dim", config.hidden_size // config.num_attention_heads)
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
        paths = adapter_for(base.config.model_type).rotary_paths
        devices = {path: base.base_model.get_submodule(path).inv_freq.device for path in paths}
        self._unwind(base.base_model)
        self._active = False
        for path, device in devices.items():
            self._follow(base, base.base_model.get_submodule(path), device)

    @staticmethod
    def _follow(base: Any, module: Any, device: torch.device) -> None:
        """Bring a module to where the model went while the module was out of it."""
        if device.type == "meta" or module.inv_freq.device == device:
            return
        if module.inv_freq.device.type == "meta":
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

    Raises:
        UnsupportedModelError: no adapter for the family.
        RopeExtendError: the encoding is not of a kind that can be patched in, or a length is invalid.
    """
    if not isinstance(encoding, Encoding):
        raise RopeExtendError(
            f"patch_model takes an encoding, such as encoding('yarn', factor=8.0), got {encoding!r}"
        )
    if not isinstance(encoding, RopeEncoding):
        raise RopeExtendError(
            f"{encoding.name} is no rotary schedule, and this version patches in no other kind"
        )
    shape = shape_of(model, trained_length)
    if target_length is None:
        target_length = encoding.target_length(shape)
    if target_length is None:
        target_length = unwrap(model).config.max_position_embeddings
    patch = Patch(model, encoding, shape, check_length("patch_model", "target_length", target_length))
    patch._apply(tokenizer)
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
        method: a rotary method's name, see `rope_extend.encodings()`; or composed, `resonance(yarn)`.
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
    named = rotary_method(f"short_original({method})" if short else method)
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
