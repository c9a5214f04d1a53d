"""The loss without the logits for any trainer: `model(input_ids, labels=...)` computes it in chunks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from rope_extend.attention.packed import document_inputs
from rope_extend.attention.split_window import current_split
from rope_extend.data.packing import check_packing
from rope_extend.encodings import encoding
from rope_extend.errors import RopeExtendError
from rope_extend.loss import IGNORED, causal_lm, decoder_name, mean_loss, shifted
from rope_extend.models.decoders import CACHE
from rope_extend.models.undo import Removable
from rope_extend.patching import current_patch

_NO_PART_OF_THE_LOSS = ("output_attentions", "output_hidden_states", "logits_to_keep")


def chunked_loss(model: torch.nn.Module, *, chunk_bytes: int | None = None) -> ChunkedLoss:
    """Let `model(input_ids, labels=...)` return its loss without holding the logits of all tokens.

    For transformers' `Trainer`, trainers built on it, and loops of your own: loss and gradients are those of
    the model's own forward to rounding, and `logits` of the output is None. Without labels, as in
    `generate`, the model's own forward runs. Where `position_ids` restart within a row, as those of packed
    documents do, each document sees itself alone, also if a collator adds a mask of ones, or pads rows.
    Families that carry a state from token to token refuse such rows. `remove()`, or the end of a `with`
    block, undoes both.

    Args:
        model: a causal language model of transformers, extended or not, with or without PEFT.
        chunk_bytes: size of the float32 logits of one chunk, in bytes; by default 256 MiB, and 31 MiB on a
            CPU. The peak is about two and a half times as much.

    Raises:
        RopeExtendError: the model is not a causal language model, its loss is not the cross-entropy of the
            next token, or has the router loss of a mixture of experts added, now or in a later call; or it
            has this loss already.
    """
    lm = causal_lm(model)
    if has_chunked_loss(lm):
        raise RopeExtendError("chunked_loss: the model has this loss already; remove() it, or keep it")
    _check_loss(lm)
    return ChunkedLoss(lm, chunk_bytes)


class ChunkedLoss(Removable):
    """The change that `chunked_loss` made; also a context manager that undoes it.

    Attributes:
        model: the causal language model, without PEFT around it.
    """

    def __init__(self, lm: Any, chunk_bytes: int | None) -> None:
        self.model = lm
        self._hook = _decoder(lm).register_forward_pre_hook(
            partial(_keep_apart, lm), with_kwargs=True, prepend=True
        )  # before a split window is cut
        self._before = vars(lm).get("forward")  # of another wrapper
        self._forward = lm.forward = MethodType(_forward(lm, self._before, chunk_bytes), lm)

    def remove(self) -> None:
        """Give the model its own forward back. Removing twice does nothing."""
        self._hook.remove()
        if vars(self.model).get("forward") is not self._forward:
            return  # a later wrapper, such as accelerate's, still calls it; it passes everything on now
        if self._before is None:
            del self.model.forward
        else:
            self.model.forward = self._before


def _forward(lm: Any, before: Any, chunk_bytes: int | None) -> Callable[..., Any]:
    """A forward with the loss in chunks: a function of the model, so that a copy calls the copy."""
    stock = type(lm).forward
    signature = inspect.signature(stock)

    @functools.wraps(stock)  # trainers choose the columns of a dataset by its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        inputs = {**given, **given.pop("kwargs", {})}
        labels, shift_labels = inputs.pop("labels", None), inputs.pop("shift_labels", None)
        unscored = labels is None and shift_labels is None
        of_trl = inputs.get("fused_lm_head")  # its own loss without logits
        if unscored or of_trl or not has_chunked_loss(self):
            return stock(self, *args, **kwargs) if before is None else before(*args, **kwargs)
        del inputs["self"]
        if wanted := [name for name in _NO_PART_OF_THE_LOSS if inputs.pop(name, None)]:
            raise RopeExtendError(
                f"chunked_loss computes the loss alone, but {', '.join(wanted)} was asked for; call the "
                "model without labels for it, or remove() the chunked loss"
            )
        _check_loss(self, inputs.get("output_router_logits"))
        ignored = inputs.pop("ignore_index", IGNORED)
        items, as_dict = inputs.pop("num_items_in_batch", None), inputs.pop("return_dict", None)
        targets = shifted(labels) if shift_labels is None else shift_labels
        targets = targets.masked_fill(targets == ignored, IGNORED)
        decode = partial(_decoder(self), **inputs, return_dict=True)
        if (split := current_split(self)) is None:
            loss = mean_loss(self, decode().last_hidden_state, targets, items, chunk_bytes)
        else:
            items = (targets != IGNORED).sum().clamp(min=1) if items is None else items
            with split.own_share() as processes:
                hidden = decode().last_hidden_state
            own = processes.own(targets, fill=IGNORED)
            loss = split.summed(mean_loss(self, hidden, own, items, chunk_bytes))
        return CausalLMOutputWithPast(loss=loss) if as_dict is not False else (loss,)

    return forward


def _keep_apart(
    lm: Any, decoder: Any, args: Any, inputs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Give a decoder the inputs of packed documents, if positions of tokens restart within a row."""
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if positions is None or positions.ndim != 2 or inputs.get(CACHE) is not None:
        return None
    if isinstance(mask, dict) or (mask is not None and mask.ndim != 2):
        return None
    tokens = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask.bool()
    positions = positions.expand_as(tokens)
    if not bool(((positions == 0) & tokens & (tokens.cumsum(-1) > 1)).any()):
        return None
    patch = current_patch(lm)
    check_packing(encoding("none") if patch is None else patch.encoding, lm.config)
    return args, {**inputs, **document_inputs(lm, positions, tokens)}


def has_chunked_loss(model: torch.nn.Module) -> bool:
    """Whether `chunked_loss` is active, by the hook that keeps documents apart; a copy has its own."""
    hooks = _decoder(causal_lm(model))._forward_pre_hooks.values()
    return any(isinstance(hook, partial) and hook.func is _keep_apart for hook in hooks)


def _decoder(lm: Any) -> Any:
    return lm._modules[decoder_name(lm)]


def _check_loss(lm: Any, routers: bool | None = None) -> None:
    """Refuse a loss that is more than the cross-entropy; `routers` is what a call says of the router loss."""
    if lm.loss_function is not ForCausalLMLoss:
        raise RopeExtendError(
            f"chunked_loss computes the cross-entropy of the next token, but {type(lm).__name__} has a loss "
            f"of its own, {getattr(lm.loss_function, '__name__', lm.loss_function)}; train it with that"
        )
    in_config = getattr(lm.config.get_text_config(), "output_router_logits", False)
    if in_config if routers is None else routers:
        raise RopeExtendError(
            "chunked_loss has no router loss, which output_router_logits adds; set "
            "config.output_router_logits to False, or train with the model's own loss"
        )
