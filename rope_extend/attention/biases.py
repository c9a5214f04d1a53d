"""Attention with a bias on its logits, for every `BiasEncoding`, by the model's own attention function.

The rotary module does not rotate, and the bias follows from the positions of query and key. A key after its
query, which only some masks show, has the bias of distance 0.

A bias is added by a mask for a few queries at a time (`bias_parts`), and computed again for the backward
pass. So memory grows linearly with the length.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rope_extend.attention.bias_parts import PartialBias, in_blocks, rows_of_part
from rope_extend.attention.functions import HEADS, AttentionCall
from rope_extend.attention.masks import visible
from rope_extend.attention.positions import AttentionHandler
from rope_extend.attention.registry import without_cudnn
from rope_extend.encodings import BiasEncoding, ModelShape
from rope_extend.errors import PatchError
from rope_extend.models.planned_device import device_of


class BiasHandler(AttentionHandler):
    """Adds a bias to the logits inside attention, for one patch of one model."""

    encoding: BiasEncoding
    shape: ModelShape

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention with the bias added to its scaled logits."""
        forward = self.forward_of_call(call)
        keys = self.keys_of_call(call, forward)
        device = call.query.device
        gapless = forward.cached("gapless", of=keys, compute=lambda: bool((keys.diff() == 1).all()))
        scaling = call.kwargs.get("scaling")
        scaling = call.query.shape[-1] ** -0.5 if scaling is None else scaling
        call = replace(call.of_first_keys(keys.shape[1]), kwargs={**call.kwargs, "scaling": scaling})
        _, own_heads, new, head_dim = call.query.shape
        first, heads = call.given.get(HEADS, (0, own_heads))  # of several processes, this one has some heads
        shape = replace(self.shape, heads=heads, head_dim=head_dim)
        learned = {} if self.learned is None else self.learned.of(call.module.layer_idx)
        learned = {name: value.to(device) for name, value in learned.items()}
        if self.learned is not None and shape != self.shape:
            raise PatchError(
                f"the parameters of {self.encoding} were made for {self.shape}, but "
                f"{type(call.module).__name__} has {shape}"
            )
        if heads != own_heads:
            # Learned numbers are cut before they are used, and other biases afterwards.
            for name, one_head in self.encoding.initial(replace(shape, heads=1)).items():
                for dim, size in enumerate(one_head.shape):
                    if learned[name].shape[dim] != size:
                        learned[name] = learned[name].narrow(dim, first, own_heads)
            if learned:
                shape, first = replace(shape, heads=own_heads), 0
        own = range(first, first + own_heads)
        bias = PartialBias(
            self.encoding, shape, own, forward.on(device, forward.queries), forward.on(device, keys), learned,
            gapless=gapless, causal=call.mask is None,
        )  # fmt: skip
        rows = rows_of_part(
            len(keys) * shape.heads, call.key.shape[2], device_of(call.query), from_table=bias.table
        )
        spans = forward.cached(
            "spans", rows, call.key.shape[2], of=call.mask, compute=partial(_spans, call, rows)
        )
        tensors = (call.query, call.key, call.value, *bias.sources)
        if new <= rows:
            return _attend_part(call, bias, (0, new), spans[0], *tensors)
        blocks = (
            ((start, min(start + rows, new)), span)
            for span, start in zip(spans, range(0, new, rows), strict=True)
        )
        dropout = bool(call.kwargs.get("dropout"))
        return in_blocks(partial(_attend_part, call, bias), blocks, tensors, dropout=dropout)


def _spans(call: AttentionCall, rows: int) -> list[tuple[int, int]]:
    """For each part, the first key that any of its queries may see, and the one after the last."""
    new, keys = call.query.shape[2], call.key.shape[2]
    mask = call.readable_mask
    if mask is None:
        return [(0, keys - new + min(start + rows, new)) for start in range(0, new, rows)]
    seen = functional.pad(visible(mask).flatten(0, 1).any(dim=0), (0, 0, 0, -new % rows))
    by_part = seen.view(-1, rows, keys).any(dim=1).to(torch.uint8)
    # A part without any visible key, as in padding, still gets one key.
    ends = keys - by_part.flip(1).argmax(dim=1)
    return [(first, end) for first, end in torch.stack([by_part.argmax(dim=1), ends], dim=1).tolist()]


def _attend_part(
    call: AttentionCall, bias: PartialBias, queries: tuple[int, int], keys: tuple[int, int], query: Tensor,
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
    if weights is None:
        return output.flip(1), None
    return output.flip(1), functional.pad(weights.flip(2), (first, key.shape[2] - end))
