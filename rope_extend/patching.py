"""Patching: the only module that changes a model, and that restores it bit for bit.

A patch replaces the decoder's rotary modules and updates the model's config, generation config and tokenizer,
so that `save_pretrained` writes a checkpoint for stock transformers. For an encoding that is not rotary, the
new rotary modules do not rotate, and a handler inside attention does the rest.

Every change goes through an undo log of plain data. So a patched model can be copied and pickled, and an
exception in the middle leaves the model as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn

from rope_extend.attention.foreign_splits import ENCODING, check_foreign_split
from rope_extend.attention.functions import attention_modules, attention_window, remove_handlers
from rope_extend.attention.handlers import handler_for
from rope_extend.attention.positions import AttentionHandler, count_tokens_only
from rope_extend.encodings import Encoding, RopeEncoding, RopeShape, method_named, rotary_method
from rope_extend.encodings.core.shapes import check_length
from rope_extend.errors import PatchError, RopeExtendError, UnsupportedModelError
from rope_extend.method_names import CURRENT, PRETRAINED, check_start
from rope_extend.models.config_facts import (
    CONFIG_RECORD,
    ORIGINAL_WINDOW,
    STOCK_WINDOW,
    is_soft_capped,
    rotary_part,
)
from rope_extend.models.current_table import current_table, extended_again
from rope_extend.models.decoders import unwrap
from rope_extend.models.families import Family, family_for
from rope_extend.models.parameters import LEARNED, LearnedParameters
from rope_extend.models.rotary import ExtendedRotaryEmbedding
from rope_extend.models.rotary_tables import active_table, shape_of
from rope_extend.models.stock_config import (
    DUAL_CHUNK_KEY,
    dual_chunk_configs,
    latent_attention,
    nested,
    sharpened_as_trained,
    stock_forms,
    stock_parameters,
    with_carried,
)
from rope_extend.models.undo import Removable, UndoLog
from rope_extend.units import parse_length

logger = logging.getLogger(__name__)
_SAVING = logger.getChild("saving")
"""Says what matters to a model that will be saved."""

_STACK = "_rope_extend_patches"
_SAID: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""What was logged of each model: an evaluation patches it again for every document."""


def current_patch(model: nn.Module) -> Patch | None:
    """The patch that is active on `model`, or None."""
    stack = getattr(unwrap(model), _STACK, None)
    return stack[-1] if stack else None


def _own_parameters(base: Any) -> Mapping[str, Any]:
    """The `rope_parameters` that a model has without its patches."""
    stack = getattr(base, _STACK, None)
    return stack[0].replaced if stack else rotary_part(base.config)[1]


def _rotated_window(decoder: Any, family: Family) -> int | None:
    """The largest window or chunk of the layers that rotate; None if a layer that rotates has none.

    Also None if all layers of the family rotate, or if only its layers with full attention are extended.
    """
    if family.rotates is None or family.layer_types:
        return None
    rotating = [module for module in attention_modules(decoder) if family.extends(module)]
    windows = [attention_window(module) or 0 for module in rotating]
    return max(windows) if windows and all(windows) else None


class Patch(Removable):
    """One change of a model's position encoding; also a context manager that undoes it.

    Attributes:
        model: the model that was patched, as it was given.
        encoding: the new encoding.
        rotary: the schedule of the rotary tables: the encoding itself, or no rotation if it is not rotary.
        shape: the rotary shape of the model as pretrained.
        target_length: the context window that the encoding is meant for, in tokens.
        changed: whether the patched model computes anything else than before.
        replaced: the `rope_parameters` that the model had before.
        learned: the parameters that the encoding learns; None if it learns none. They are part of the model
            until the patch is removed, and stay here afterwards.
    """

    def __init__(self, model: nn.Module, encoding: Encoding, shape: RopeShape, target_length: int) -> None:
        self.model = model
        self.encoding = encoding
        none = rotary_method("nope").for_target(shape, shape.trained_length)
        self.rotary = encoding if isinstance(encoding, RopeEncoding) else none
        self.shape = shape
        self.target_length = target_length
        self.changed = False
        self.replaced: Mapping[str, Any] = {}
        self.learned: LearnedParameters | None = None
        self._undo = UndoLog()
        self._configs: list[tuple[Any, Any, dict[str, Any]]] = []
        self._handler: AttentionHandler | None = None
        self._active = False

    def _apply(self, tokenizer: Any | None) -> None:
        base = unwrap(self.model)
        family = family_for(base.config.model_type)
        modules = family.rotary_modules(base.base_model)
        try:
            remove_handlers(base.base_model, self._undo)
            self._give_own_config(base)
            self._install_handler(base, family)
            self._undo.set(base.base_model, ENCODING, self.encoding)
            self._undo.hook(base.base_model, check_foreign_split)
            shape = self.shape
            for path, module in modules.items():
                before = active_table(module, base.config, self.target_length)
                self._replace(base, path, module, family)
                installed = base.base_model.get_submodule(path)
                after = active_table(installed, base.config, self.target_length)
                self.changed |= not torch.allclose(before[0], after[0], rtol=1e-5, atol=0)
                self.changed |= abs(before[1] - after[1]) > 1e-6
            self.changed |= self.rotary is not self.encoding or self.rotary.remaps
            # Also where stock's table follows the length: it is that of the longest row, inexact with caches.
            self.changed |= self.rotary.depends_on_length
            self.changed |= self.rotary.decay(shape) is not None or self.rotary.scales_logits(shape)
            self._update_config(base, family)
            if tokenizer is not None:
                self._undo.set(tokenizer, "model_max_length", self.target_length)
            self._undo.set(base, _STACK, [*getattr(base, _STACK, []), self])
        except BaseException:
            self._undo.unwind()
            raise
        self._active = True

    def _give_own_config(self, base: Any) -> None:
        """Give the model a copy of its config, because another model may have the same one.

        Not a decoder alone: the model that it is part of has the same one, and saves it.
        """
        if base.base_model is base:
            return
        copies: dict[int, Any] = {}
        deepcopy(base.config, copies)
        for module in self.model.modules():
            config = vars(module).get("config")
            own = copies.get(id(config))
            if own is not None:
                self._undo.set(module, "config", own)
                if all(each is not own for _, each, _ in self._configs):
                    self._configs.append((config, own, dict(vars(own))))

    def _install_handler(self, base: Any, family: Family) -> None:
        """Install the handler that the encoding needs."""
        decoder = base.base_model
        if getattr(decoder, LEARNED, None) is not None:
            self._undo.set(decoder, LEARNED, None)
        handler = handler_for(self.encoding, self.shape, base, family)
        if handler is not None or self.rotary.start_tokens:  # more than the distance of two tokens counts
            count_tokens_only(decoder, self._undo)
        if handler is None:
            return
        self._handler, self.learned = handler, handler.learned
        handler.install(decoder, self._undo)
        if self.learned is not None:
            self._undo.set(decoder, LEARNED, self.learned)

    def _replace(self, base: Any, path: str, module: Any, family: Family) -> None:
        """Replace a rotary module by an `ExtendedRotaryEmbedding`."""
        parent_path, _, name = path.rpartition(".")
        extended = ExtendedRotaryEmbedding(
            self.rotary, self.shape, module, family, base.config, marked=self._handler is not None
        )
        extended.train(module.training)
        if self._handler is not None:
            self._handler.rotary = extended
        self._undo.set(base.base_model.get_submodule(parent_path), name, extended)

    def _update_config(self, base: Any, family: Family) -> None:
        """Write the encoding into the model's config, and log what changed."""
        config = base.config
        part, old = rotary_part(config)
        old_parameters, old_length = dict(old), part.max_position_embeddings
        self.replaced = old_parameters
        if not getattr(part, "is_heterogeneous", False) and getattr(part, "head_dim", 0) is None:
            # Stock transformers needs it for `yarn` and `dynamic`.
            self._undo.set(part, "head_dim", part.hidden_size // part.num_attention_heads)
        pairs = next(iter(family.rotary_modules(base.base_model).values())).pairs
        latent = latent_attention(base)
        stock = None
        if self.rotary is self.encoding:
            forms = stock_forms(self.rotary, self.shape, pairs, latent=bool(latent))
            stock = stock_parameters(
                self.rotary, self.shape, family, config, forms, pairs, self.target_length
            )
        none = rotary_method("none").for_target(self.shape, self.shape.trained_length)
        parameters = stock or next(stock_forms(none, self.shape, pairs, latent=bool(latent)))
        parameters = with_carried(parameters, old_parameters, self.shape.trained_length)
        if latent and stock is None and self.rotary.mscale_all_dim is not None:
            raise UnsupportedModelError(
                f"{config.model_type} scales its softmax by mscale_all_dim, once for all texts, and "
                f"{self.encoding} is not one table; leave out mscale and mscale_all_dim"
            )
        for module, scale_of in latent:
            scale = scale_of(parameters, module.qk_head_dim**-0.5)
            self.changed |= scale != module.scaling
            self._undo.set(module, "scaling", scale)
        if bases := family.bases(config):
            new_bases = [base and parameters["rope_theta"] for base in bases]
            self._undo.set(part, family.layer_bases, new_bases)
        self._undo.set(part, "rope_parameters", nested(family, config, parameters))
        length = self.shape.trained_length
        if stock is not None:
            length = self.rotary.max_position_embeddings(self.shape, self.target_length)
        self._undo.set(part, "max_position_embeddings", self.target_length)
        if hasattr(part, ORIGINAL_WINDOW):  # transformers prefers it to that in `rope_parameters`
            self._undo.set(part, ORIGINAL_WINDOW, self.shape.trained_length)
        for owner in dual_chunk_configs(config):  # engines would apply it to the new encoding as well
            self._undo.delete(owner, DUAL_CHUNK_KEY)
        record = {
            "encoding": self.encoding.to_dict(),
            "shape": asdict(self.shape),
            "target_length": self.target_length,
            STOCK_WINDOW: length,
            "rope_parameters": dict(parameters),
        }
        for owner in (config, part):  # the text part may be saved alone
            self._undo.set(owner, CONFIG_RECORD, record)
        generation = getattr(base, "generation_config", None)
        if generation is not None and getattr(generation, "max_length", None) == old_length:
            published = getattr(generation, "_original_object_hash", None) == hash(generation)
            self._undo.set(generation, "max_length", self.target_length)
            if published:  # then transformers saves it again, also if its other values are invalid
                self._undo.set(generation, "_original_object_hash", hash(generation))
        if base.device.type != "meta":  # on a model without weights, a patch is a dry run
            rope_type = old_parameters.get("rope_type", "default")
            self._log_changes(config.model_type, rope_type, old_length, in_stock=stock is not None)

    def _log_changes(self, model_type: str, before: str, old_length: int, *, in_stock: bool) -> None:
        """Log what was replaced, and warn about limits."""
        if self.changed or old_length != self.target_length:  # not where a record says what the config says
            self._say(
                logging.INFO if before == "default" else logging.WARNING,
                "%s: %s (window %d) replaced by %s (window %d, trained on %d)",
                model_type, before, old_length, self.encoding, self.target_length, self.shape.trained_length,
            )  # fmt: skip
        family, base = family_for(model_type), unwrap(self.model)
        layer_type = family.layer_type(base.config)
        if layer_type is not None:
            self._say(
                logging.INFO,
                "%s: only %s layers are extended; the tables of other layers are unchanged",
                model_type, layer_type,
            )  # fmt: skip
        window = _rotated_window(base.base_model, family)
        if window is not None and window <= self.shape.trained_length and self.changed:
            self._say(
                logging.WARNING,
                "%s rotates only in layers that see %d tokens, in texts of any length; %s changes what these "
                "layers learned, and does not extend the context window", model_type, window, self.encoding,
            )  # fmt: skip
        if is_soft_capped(base.config) and base.config.get_text_config()._attn_implementation == "sdpa":
            self._say(
                logging.WARNING,
                "%s caps its attention scores, and under sdpa transformers %s leaves the cap out silently; "
                "load the model with attn_implementation='eager'", model_type, transformers.__version__,
            )  # fmt: skip
        if not in_stock:
            self._say(
                logging.WARNING,
                "stock transformers cannot represent %s for %s; save the model with rope_extend.save and "
                "load it with rope_extend.load, or the checkpoint has its old context window",
                self.encoding, model_type, log=_SAVING,
            )  # fmt: skip
        elif self.encoding.depends_on_length:
            self._say(
                logging.WARNING,
                "%s: stock transformers uses the table of the longest row of a batch, which is inexact with "
                "a cache beyond %d tokens; load the model with rope_extend.load to compute it as now",
                self.encoding, self.shape.trained_length, log=_SAVING,
            )  # fmt: skip

    def _say(self, level: int, text: str, *values: object, log: logging.Logger = logger) -> None:
        """Log what was not said of this model yet. Python shows only warnings, but what is said first."""
        if not _SAID and not logger.hasHandlers():
            level = logging.WARNING
        said, message = _SAID.setdefault(unwrap(self.model), set()), text % values
        if log.isEnabledFor(level) and message not in said:
            said.add(message)
            log.log(level, "%s", message)

    def learn(self, values: Mapping[str, Tensor], source: str, *, partial: bool = False) -> None:
        """Set the learned parameters by name; with `partial`, names may be missing.

        Raises:
            RopeExtendError: the encoding has no such parameters; `source` is named in the message.
        """
        if self.learned is not None:
            self.learned.put(values, source, partial=partial)
        elif values:
            raise RopeExtendError(f"{source} has values for {min(values)!r}, but {self.encoding} learns none")

    def remove(self) -> None:
        """Undo the patch: modules, config and tokenizer are the objects and values they were before.

        What you set in the config while the patch was active stays, such as the attention implementation.
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
        modules = family_for(base.config.model_type).rotary_modules(base.base_model)
        devices = {path: module.inv_freq.device for path, module in modules.items()}
        self._undo.unwind()
        self._active = False
        for config, own, before in self._configs:
            for attribute, value in vars(own).items():
                old = before.get(attribute)
                if old is not value and old != value:  # a config inside it cannot always be compared
                    setattr(config, attribute, value)
        for path, device in devices.items():
            self._move(base, base.base_model.get_submodule(path), device)

    @staticmethod
    def _move(base: Any, module: Any, device: torch.device) -> None:
        """Move a stock module to the device to which the model went while the module was not part of it."""
        present = next(module.buffers()).device
        if device.type == "meta" or present == device:
            return
        if present.type == "meta":
            module.to_empty(device=device)
            base._init_weights(module)
        else:
            module.to(device)

    def __repr__(self) -> str:
        state = "active" if self._active else "removed"
        window = f"{self.shape.trained_length} -> {self.target_length} tokens"
        return f"Patch({self.encoding}, {window}, {state})"


def patch_model(
    model: nn.Module,
    encoding: Encoding,
    *,
    trained_length: int | None = None,
    target_length: int | None = None,
    tokenizer: Any | None = None,
    learned: Mapping[str, Tensor] | None = None,
) -> Patch:
    """Put an encoding into a model. The returned `Patch` undoes it, by `remove()` or as a context manager.

    Scaling that the checkpoint already has is replaced, not multiplied. Patches nest, and are removed in
    reverse order.

    Args:
        model: a transformers model of a supported family, with or without a PEFT adapter.
        encoding: the encoding. `yarn` takes `mscale` and `mscale_all_dim` from the config of a model of
            DeepSeek's kind, unless it has its own.
        trained_length: the window that the model was pretrained on, in tokens; needed if its config is wrong.
        target_length: the new context window in tokens; by default the encoding's own, or else the model's
            present one.
        tokenizer: its `model_max_length` is set to the new window.
        learned: values for the learned parameters, by name, such as another patch's `learned.state_dict()`.
            Parameters without a value here start as the encoding defines.

    Raises:
        UnsupportedModelError: the family is not supported, or the encoding cannot act inside its attention.
        RopeExtendError: this is not an encoding, or a length is invalid.
    """
    if not isinstance(encoding, Encoding):
        raise RopeExtendError(
            f"patch_model takes an encoding, got {encoding!r}; make one with encoding('yarn', factor=8.0)"
        )
    shape = shape_of(model, trained_length)
    encoding = sharpened_as_trained(encoding, unwrap(model), shape, _own_parameters(unwrap(model)))
    if target_length is None:
        target_length = encoding.target_length(shape)
    if target_length is None:
        target_length = rotary_part(unwrap(model).config)[0].max_position_embeddings
    patch = Patch(model, encoding, shape, check_length("patch_model", "target_length", target_length))
    with torch.device("cpu"):  # tables are computed on the CPU, whatever the caller's default device
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
    target_length: int | str,
    method: str = "yarn",
    *,
    trained_length: int | None = None,
    tokenizer: Any | None = None,
    start: str = PRETRAINED,
    current_length: int | None = None,
    **parameters: Any,
) -> Patch:
    """Extend the context window of a model to `target_length` tokens.

    The parameters of the method follow from the length.

    Args:
        model: a transformers model of a supported family, with or without a PEFT adapter.
        target_length: the new context window in tokens, such as 32768 or `"32k"`; beyond the trained one.
        method: a method's name, see `rope_extend.encoding_names()`; or composed, `resonance(yarn)`.
        trained_length: the window that the model was pretrained on, in tokens; needed if its config is wrong.
        tokenizer: its `model_max_length` is set to the new window.
        start: `pretrained` extends plain RoPE from the window of pretraining, and replaces scaling that the
            model already has. `current` extends the table that the model has now, from the window that it was
            trained to read under it: for a model that was trained under a scaled table. The divisors of both
            are multiplied, and so are the attention factors.
        current_length: for `start="current"`, the window that the model was trained to read, in tokens; by
            default that of its config.
        parameters: further parameters of the method, such as `beta_fast=16`; never `factor`, which follows
            from the length.

    Raises:
        UnsupportedModelError: the family is not supported, or the method cannot act inside its attention.
        PatchError: the rotary tables would not change.
        RopeExtendError: an unknown method or parameter, a target that is not beyond the trained window, or
            with `start="current"`, a method or a present encoding that is not one table.
    """
    named = method_named(method)
    check_start("extend", start, current_length)
    if isinstance(target_length, str):
        target_length = parse_length(target_length)
    target_length = check_length("extend", "target_length", target_length)
    encoding: Encoding
    if start == CURRENT:
        current = current_table(model, trained_length, current_length)
        shape, encoding = current.pretrained, extended_again(current, named, target_length, parameters)
    else:
        shape = shape_of(model, trained_length)
        if target_length <= shape.trained_length:
            raise RopeExtendError(
                f"extend: target_length must exceed the trained window of {shape.trained_length} tokens, got "
                f"{target_length}; within it the model needs no extension"
            )
        encoding = named.for_target(shape, target_length, **parameters)
    encoding = sharpened_as_trained(encoding, unwrap(model), shape, _own_parameters(unwrap(model)))
    present = current_patch(model)
    if present is not None and (present.encoding, present.target_length) == (encoding, target_length):
        raise PatchError(
            f"extend: the model is extended already, by {encoding} to {target_length} tokens; to start "
            "again, remove that patch first: rx.current_patch(model).remove()"
        )
    patch = patch_model(
        model, encoding, trained_length=shape.trained_length, target_length=target_length, tokenizer=tokenizer
    )
    if not patch.changed:
        patch.remove()
        raise PatchError(
            f"extend: {encoding} leaves the rotary tables as they were, so the window would not grow; "
            f"choose one of the scaling methods, or use patch_model for a control"
        )
    return patch
