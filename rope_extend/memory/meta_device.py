"""A dry run on the meta device: shapes and bytes without values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import repeat_kv, use_gqa_in_sdpa
from transformers.masking_utils import eager_mask, sdpa_mask

from rope_extend.attention.causal_suffix import calls_by_name, causal_mask
from rope_extend.attention.functions import attention_modules, implementation_of
from rope_extend.attention.registry import PREFIX, SUFFIX, register
from rope_extend.errors import RopeExtendError
from rope_extend.models.decoders import decoder_layers, unwrap
from rope_extend.models.planned_device import device_of, planned_for

logger = logging.getLogger(__name__)
META = torch.device("meta")
DRY_RUN = "dry_run_"
"""Prefix of the names of attention implementations that allocate memory without computing anything."""
DEPTH = 2
"""Number of layers of a dry run, if all layers are equal; one more layer shows what each adds."""


@contextmanager
def quiet_patching(part: str = "") -> Iterator[None]:
    """Log nothing about patches of a dry run: the same is logged for the model itself.

    The part `.saving` is what matters to models that will be saved, and not to those that are measured.
    """
    log = logging.getLogger(f"rope_extend.patching{part}")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def dry_run(model: nn.Module, device: torch.device, *, maskless: bool = False) -> Iterator[None]:
    """A context in which a model without weights allocates what it would allocate on a device.

    Patches belong inside, because they may wrap the attention function that they find.

    Args:
        model: a model on the meta device.
        device: the device on which the model will run.
        maskless: whether the attention kernel needs no mask.
    """
    with planned_for(device), dry_run_attention(model, maskless=maskless), DirectKernelCalls():
        yield


_Estimate = TypeVar("_Estimate")


def try_estimate(dry_run: Callable[[], _Estimate], model: nn.Module, subject: str) -> _Estimate | None:
    """The result of a dry run; None, with a log line, for a family that does not run on the meta device.

    Args:
        dry_run: runs `model` and returns an estimate.
        model: a model on the meta device.
        subject: what is estimated, for the log: "a step".
    """
    try:
        return dry_run()
    except RopeExtendError:
        raise
    except Exception as error:  # any error: a family may need values, which the meta device does not have
        family = unwrap(model).config.model_type
        logger.info("cannot estimate the memory of %s for %s (%r)", subject, family, error)
        return None


def of_all_layers(model: nn.Module, count: Callable[[], Sequence[int]], least: int = DEPTH) -> list[int]:
    """The numbers that `count` finds in dry runs of a model.

    If all layers are equal, each adds the same, so runs of `least` layers and of one more are enough.
    """
    decoder = decoder_layers(model)
    if decoder is None or not decoder.complete:
        return [*count()]
    parent, name, layers, _ = decoder
    # The embeddings, and the inputs of the two latest layers, are still on the device while a layer runs.
    if len(layers) <= 2 * least or not _equal_layers(model, layers):
        return [*count()]
    counts = []
    for depth in (least, least + 1):
        setattr(parent, name, layers[:depth])
        try:
            counts.append(count())
        finally:
            setattr(parent, name, layers)
    return [few + (len(layers) - least) * (more - few) for few, more in zip(*counts, strict=True)]


def _equal_layers(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Whether all layers of a model do the same work."""
    config = unwrap(model).config.get_text_config(decoder=True)
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        return False

    def parts(layer: nn.Module) -> list[tuple[Any, ...]]:
        return [
            (
                name,
                type(part),
                getattr(part, "sliding_window", None),
                *(p.shape for p in part.parameters(False)),
            )
            for name, part in layer.named_modules()
        ]

    return all(parts(layer) == parts(layers[0]) for layer in layers)


class DirectKernelCalls(TorchFunctionMode):
    """Makes families that call torch's attention function directly allocate only what its kernels allocate.

    On the meta device, torch would use the implementation that holds the scores of all pairs.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention and args[0].is_meta:
            return _Kernel.apply(*args[:3], None)  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


@contextmanager
def dry_run_attention(
    model: nn.Module, *, maskless: bool, note: Callable[..., None] | None = None
) -> Iterator[None]:
    """Replace attention in a model on the meta device by a function that allocates what kernels allocate.

    Args:
        model: a model without weights. Eager attention, which is no kernel, is replaced only if `note` is
            given.
        maskless: whether the kernel needs no mask.
        note: called with the module, query, key and value of each call.
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        if note is not None:
            note(module, query, key, value)
        groups = getattr(module, "num_key_value_groups", 1)
        if groups > 1 and not use_gqa_in_sdpa(attention_mask, key, value):
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        if attention_mask is not None:
            attention_mask = attention_mask.to(query.dtype)
        out = _Kernel.apply(query, key, value, attention_mask)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2), None

    def chosen(implementation: str) -> str:
        if implementation.startswith(PREFIX + DRY_RUN) or (implementation == "eager" and note is None):
            return implementation
        mask = _MASKS.get(implementation, lambda *_, **__: None)
        if implementation == "sdpa" and maskless:
            implementation, mask = SUFFIX, causal_mask
        return register(DRY_RUN + implementation, attention, mask)

    decoder = unwrap(model).base_model
    modules = [decoder, *attention_modules(model)] if calls_by_name(decoder) else []
    with implementation_of(modules, chosen):
        yield


class _Kernel(torch.autograd.Function):
    """Allocates what an attention kernel does; keeps inputs, mask, output and sums for the backward pass.

    On a GPU, the backward pass of the flash kernel adds up the gradient of queries in float32, and those of
    grouped keys and values for each head of the queries.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        # The layout of kernels: the heads of a token are contiguous.
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)
        # torch's kernel for CPUs has no gradient of a mask, so all weights of a learned bias are kept.
        learned = ctx.needs_input_grad[3] and device_of(query).type == "cpu"
        weights = query.new_empty(*query.shape[:3], key.shape[2]) if learned else None
        ctx.save_for_backward(query, key, value, out, sums, mask, weights)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _out, _row_sums, mask, _weights = ctx.saved_tensors
        if device_of(query).type == "cuda":
            _sums = query.new_empty(query.shape, dtype=torch.float32)
            if (heads := query.shape[1]) != key.shape[1]:
                _wide = [each.new_empty(len(each), heads, *each.shape[2:]) for each in (key, value)]
        of_mask = torch.empty_like(mask) if ctx.needs_input_grad[3] else None
        return *map(torch.empty_like, (query, key, value)), of_mask


_MASKS: dict[str, Callable[..., Tensor | None]] = {"sdpa": sdpa_mask, "eager": eager_mask}
"""Mask functions of the attention implementations that need a mask; flash and flex attention do not."""
