"""Attention with a bias on its logits, for every `BiasEncoding`, by the model's own attention function.

The rotary module does not rotate, and the bias follows from the positions of query and key. A key after its
query, which only some masks show, has the bias of distance 0.

A bias in proportion to the distance is put into extra channels of queries and keys (`channels`). Any other
bias is added by a mask for a few queries at a time (`bias_parts`), and computed again for the backward pass.
So memory grows linearly with the length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rope_extend.attention.bias_parts import CallPositions, PartialBias, in_blocks, rows_of_part
from rope_extend.attention.causal_suffix import without_mask
from rope_extend.attention.channels import position_channels
from rope_extend.attention.forward import Forward
from rope_extend.attention.functions import AttentionCall
from rope_extend.attention.masks import rows_of_mask, sees_later_keys, visible
from rope_extend.attention.positions import AttentionHandler
from rope_extend.attention.registry import (
    is_dense,
    own_function,
    takes_suffix,
    without_cudnn,
)
from rope_extend.encodings import BiasEncoding, ModelShape
from rope_extend.encodings.core.transfers import to_device
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.models.planned_device import device_of
from rope_extend.models.rotary import float64_device


@dataclass(frozen=True)
class _Call(AttentionCall):
    """A call without the empty slots of a static cache, and with the positions of its queries and keys."""

    mask: Tensor | None
    positions: CallPositions


class BiasHandler(AttentionHandler):
    """Adds a bias to the logits inside attention, for one patch of one model."""

    encoding: BiasEncoding
    shape: ModelShape

    def check_implementation(self, implementation: str) -> None:
        """Refuse attention implementations that take no mask over queries and keys.

        Raises:
            UnsupportedModelError: the bias cannot be added under the implementation.
        """
        super().check_implementation(implementation)
        if not is_dense(implementation):
            raise UnsupportedModelError(
                f"{self.encoding} adds to attention logits, which {implementation} does not allow; use "
                f"attn_implementation='sdpa' or 'eager'"
            )

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention with the bias added to its scaled logits.

        Raises:
            PatchError: the positions in this call are not known, or the layer has other sizes than the bias.
        """
        self.check_implementation(call.implementation)
        forward = self.forward_of_call(call)
        positions = self.keys_of_call(call, forward)
        end, device = positions.shape[1], call.query.device
        scaling = call.kwargs.get("scaling")
        scaling = call.query.shape[-1] ** -0.5 if scaling is None else scaling
        placed = forward.once(
            "positions", device, of=positions,
            compute=lambda: CallPositions.of(forward.queries, positions, device),
        )  # fmt: skip
        filled = replace(call.of_first_keys(end), kwargs={**call.kwargs, "scaling": scaling})
        positioned = _Call(**vars(filled), positions=placed)
        _, heads, new, head_dim = call.query.shape
        shape = replace(self.shape, heads=heads, head_dim=head_dim, value_dim=call.value.shape[-1])
        slopes = self.encoding.slopes(shape)
        # Channels would reward a key after its query.
        alone = new == 1 or call.kwargs.get("softcap") is not None
        if slopes is None or alone or sees_later_keys(call, forward, end):
            return self._by_parts(positioned, shape, forward)
        return self._by_channels(positioned, slopes, forward)

    def _until(self, forward: Forward, module: Any) -> float:
        """The last position at which the bias of a layer depends on the distance alone."""
        if self.learned is None:
            return math.inf
        layers = self.learned.layers
        found = forward.once("until", compute=self._untils)
        return found[layers.index(module.layer_idx) if layers else 0] if found else math.inf

    @torch.no_grad()
    def _untils(self) -> list[float]:
        """The same of each layer, or of all layers at once, read from the device together; empty for inf."""
        assert self.learned is not None
        found: list[Tensor] = []
        layers: Sequence[int | None] = self.learned.layers or [None]
        for layer in layers:
            until = self.encoding.distance_only_until(self.shape, self.learned.of(layer))
            if until is None:
                return []
            found.append(until if not found else until.to(found[0].device))
        values = torch.stack(found)
        # In a dry run, positions are beyond those that need less.
        return [-1.0] * len(found) if values.is_meta else values.tolist()

    def _by_channels(self, call: _Call, slopes: Tensor, forward: Forward) -> tuple[Tensor, Tensor | None]:
        """Attention with the bias `-slope * distance` in extra channels of queries and keys."""
        query, key, value, scale = call.query, call.key, call.value, call.kwargs["scaling"]

        def channels() -> list[Tensor]:
            device = float64_device(query.device)
            positions = (to_device(call.positions.queries, device), to_device(call.positions.keys, device))
            span = call.positions.span
            both = position_channels(to_device(slopes, device) / scale, *positions, query.dtype, span)
            return [each.to(query.device) for each in both]

        depends = (scale, len(slopes), key.shape[2], query.dtype, query.device)
        of_queries, of_keys = forward.once("channels", *depends, compute=channels)
        width, more = value.shape[-1], of_queries.shape[-1]
        # Fused kernels need values as wide as keys; kernels that do not are slow.
        same = width == key.shape[-1] or query.device.type == "cpu"
        wide: AttentionCall = replace(
            call,
            query=torch.cat([of_queries.expand(len(query), -1, -1, -1), query], dim=-1),
            key=torch.cat([of_keys.expand(len(key), key.shape[1], -1, -1), key], dim=-1),
            value=functional.pad(value, (0, key.shape[-1] + more - width)) if same else value,
        )
        mask = call.mask
        if mask is None and key.shape[2] > query.shape[2]:
            wide = without_mask(wide)
            if not takes_suffix(wide.implementation):
                mask = rows_of_mask(call, 0, query.shape[2])
        output, weights = wide.own(wide.query, wide.key, wide.value, mask)
        return output[..., :width].contiguous(), weights

    def _by_parts(self, call: _Call, shape: ModelShape, forward: Forward) -> tuple[Tensor, Tensor | None]:
        """Attention with the bias in a mask, for a few queries at a time."""
        learned = {} if self.learned is None else self.learned.of(call.module.layer_idx)
        if any(value.device != call.query.device for value in learned.values()):
            learned = {name: value.to(call.query.device) for name, value in learned.items()}
        if self.learned is not None and shape != self.shape:
            raise PatchError(
                f"the parameters of {self.encoding} were made for {self.shape}, but "
                f"{type(call.module).__name__} has {shape}"
            )
        bias = PartialBias(
            self.encoding, shape, call.positions, learned,
            until=self._until(forward, call.module), causal=call.mask is None,
        )  # fmt: skip
        if bias.needs_weights:  # only eager attention returns its weights
            call = replace(call, inner=own_function(call.module, "eager"))
        new, keys = call.query.shape[2], call.key.shape[2]
        device = device_of(call.query)
        heads = len(call.positions.keys) * shape.heads
        rows = rows_of_part(heads, keys, device, from_table=bias.table)
        spans = forward.once("spans", rows, keys, of=call.mask, compute=partial(_spans, call, rows))
        tensors = (call.query, call.key, call.value, *bias.sources)
        if new <= rows:
            return _attend_part(call, bias, (0, new), spans[0], *tensors)
        blocks = (
            ((start, min(start + rows, new)), span)
            for span, start in zip(spans, range(0, new, rows), strict=True)
        )
        dropout = bool(call.kwargs.get("dropout"))
        return in_blocks(partial(_attend_part, call, bias), blocks, tensors, dropout=dropout)


def _spans(call: _Call, rows: int) -> list[tuple[int, int]]:
    """For each part, the first key that any of its queries may see, and the one after the last."""
    new, keys = call.query.shape[2], call.key.shape[2]
    if call.mask is None or call.mask.is_meta:  # in a dry run, the mask is causal
        return [(0, call.positions.before + min(start + rows, new)) for start in range(0, new, rows)]
    mask = call.mask
    seen = functional.pad(visible(mask).flatten(0, 1).any(dim=0), (0, 0, 0, -new % rows))
    by_part = seen.view(-1, rows, keys).any(dim=1).to(torch.uint8)
    # A part without any visible key, as in padding, still gets one key.
    ends = keys - by_part.flip(1).argmax(dim=1)
    return [(first, end) for first, end in torch.stack([by_part.argmax(dim=1), ends], dim=1).tolist()]


def _attend_part(
    call: _Call, bias: PartialBias, queries: tuple[int, int], keys: tuple[int, int], query: Tensor,
    key: Tensor, value: Tensor, *sources: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of queries `start` to `stop` to keys `first` to `end`, with bias and mask as one addend."""
    (start, stop), (first, end) = queries, keys
    reversed_query = query[:, :, start:stop].flip(2)
    scaled = reversed_query * call.kwargs["scaling"]
    part = bias.part(start, stop, first, end, sources, scaled).to(query.dtype)
    if call.mask is not None:
        mask = call.mask[:, :, start:stop, first:end].flip(2)
        least = torch.finfo(query.dtype).min
        part = torch.where(mask, part, least) if mask.dtype == torch.bool else (part + mask).clamp(min=least)
    with without_cudnn():  # each part has another number of keys
        output, weights = call.own(reversed_query, key[:, :, first:end], value[:, :, first:end], part)
    if bias.needs_weights:
        assert weights is not None
        output = output + bias.values(start, stop, first, end, sources, weights).transpose(1, 2)
    if weights is None or call.implementation != "eager":
        return output.flip(1), None
    return output.flip(1), functional.pad(weights.flip(2), (first, key.shape[2] - end))
