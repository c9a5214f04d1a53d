"""Attention with a bias on its logits, for every `BiasEncoding`, around the model's own attention function.

The rotary module turns nothing, and what is added to the logits follows from where query and key stand. A
bias in proportion to the distance goes into channels of queries and keys (`channels`). Any other is added by
a mask for a few queries at a time (`bias_parts`), and computed again for the backward pass, so that memory
grows with the length and not with its square.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rope_extend.attention.bias_parts import PartialBias, Places, rows_of_part
from rope_extend.attention.channels import position_channels
from rope_extend.attention.functions import (
    AttentionCall,
    attention_modules,
    causal_mask,
    is_dense,
    own_function,
)
from rope_extend.attention.reader import Forward, PositionReader
from rope_extend.encodings import BiasEncoding, ModelShape
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.families import FamilyAdapter
from rope_extend.learned import LearnedParameters
from rope_extend.rotary import has_float64
from rope_extend.undo import UndoLog


@dataclass(frozen=True)
class _Call(AttentionCall):
    """A call without the empty slots of a static cache, and where its queries and keys stand."""

    mask: Tensor | None
    places: Places


class BiasReader(PositionReader):
    """Adds a bias to the logits inside attention, for one patch of one model.

    Args:
        encoding: what the bias is.
        adapter: the model's family.

    Attributes:
        shape: the numbers it follows from; to be set once it is installed.
        learned: what the encoding learns; None if nothing.
    """

    encoding: BiasEncoding
    shape: ModelShape

    def __init__(self, encoding: BiasEncoding, adapter: FamilyAdapter) -> None:
        super().__init__(encoding, adapter)
        self.learned: LearnedParameters | None = None

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Put this reader into a decoder, in place of any other.

        Raises:
            UnsupportedModelError: the family or its attention implementation cannot be acted on exactly.
        """
        super().install(decoder, undo)
        for module in attention_modules(decoder):
            implementation = module.config._attn_implementation
            if self.acts_on(module) and not is_dense(implementation):
                raise UnsupportedModelError(
                    f"{self.encoding} adds to attention logits, which {implementation} does not let it do; "
                    f"load the model with attn_implementation='sdpa' or 'eager'"
                )

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention with the bias added to its scaled logits.

        Raises:
            PatchError: a cache or a layer that the bias cannot be placed in.
        """
        forward = self.placed(call)
        query, key, value = call.query, call.key, call.value
        slots, total = key.shape[2], forward.keys.shape[1]
        low = max(0, total - slots)  # a layer with a sliding window hands over its last keys only
        end = total - low  # and a cache of fixed size empty slots behind them
        kwargs = dict(call.kwargs)
        if kwargs.get("scaling") is None:
            kwargs["scaling"] = query.shape[-1] ** -0.5
        mask = call.mask[..., :end] if isinstance(call.mask, Tensor) else None
        held = replace(call, key=key[:, :, :end], value=value[:, :, :end], mask=mask, kwargs=kwargs)
        placed = _Call(**vars(held), places=self._places(forward, low, query.device))
        shape = replace(self.shape, heads=query.shape[1], head_dim=query.shape[-1], value_dim=value.shape[-1])
        slopes = self.encoding.slopes(shape)
        if slopes is not None and self.share != 1:
            slopes = self.share * slopes
        if slopes is not None and query.shape[2] > 1 and kwargs.get("softcap") is None:
            output, weights = self._by_channels(placed, slopes, forward)
        else:
            output, weights = self._by_parts(placed, shape)
        if weights is not None and weights.shape[-1] < slots:
            weights = functional.pad(weights, (0, slots - weights.shape[-1]))
        return output, weights

    @staticmethod
    def _places(forward: Forward, low: int, device: torch.device) -> Places:
        """Where a layer's queries and keys stand; found once for all layers that see as many keys."""
        found: Places | None = forward.tables.get(("places", low, device))
        if found is None:
            found = Places.of(forward.queries, forward.keys[:, low:], device)
            forward.tables["places", low, device] = found
        return found

    def _by_channels(self, call: _Call, slopes: Tensor, forward: Forward) -> tuple[Tensor, Tensor | None]:
        """The bias `-slope * distance` in channels beside those of the heads."""
        query, key, value, scale = call.query, call.key, call.value, call.kwargs["scaling"]
        wanted = ("channels", scale, len(slopes), key.shape[2], query.dtype, query.device)
        if wanted not in forward.tables:
            device = query.device if has_float64(query.device) else torch.device("cpu")
            places = (call.places.queries.to(device), call.places.keys.to(device))
            made = position_channels(slopes.to(device) / scale, *places, query.dtype)
            forward.tables[wanted] = tuple(channels.to(query.device) for channels in made)
        of_queries, of_keys = forward.tables[wanted]
        width, more = value.shape[-1], of_queries.shape[-1]
        # Kernels want values as wide as keys, and where there is another for those that are not, it is slow.
        same = width == key.shape[-1] or query.device.type == "cpu"
        mask = call.mask
        if mask is None and key.shape[2] > query.shape[2]:
            mask = causal_mask(query.shape[2], key.shape[2], query, call.implementation)
        output, weights = call.own(
            torch.cat([of_queries.expand(len(query), -1, -1, -1), query], dim=-1),
            torch.cat([of_keys.expand(len(key), key.shape[1], -1, -1), key], dim=-1),
            functional.pad(value, (0, key.shape[-1] + more - width)) if same else value,
            mask,
        )
        return output[..., :width].contiguous(), weights

    def _by_parts(self, call: _Call, shape: ModelShape) -> tuple[Tensor, Tensor | None]:
        """The bias in a mask for a few queries at a time."""
        learned = {} if self.learned is None else self.learned.of(call.module.layer_idx)
        if any(value.device != call.query.device for value in learned.values()):
            learned = {name: value.to(call.query.device) for name, value in learned.items()}
        if self.learned is not None and shape != self.shape:
            raise PatchError(
                f"{type(call.module).__name__} attends with {shape}, and {self.encoding} was made for "
                f"{self.shape}"
            )
        bias = PartialBias(
            self.encoding, shape, call.places, learned, causal=call.mask is None, share=self.share
        )
        if bias.weighs:  # of the functions there are, this is the one that gives its weights away
            call = replace(call, inner=own_function(call.module, "eager"))
        new, keys = call.query.shape[2], call.key.shape[2]
        rows = rows_of_part(len(call.places.keys) * shape.heads, keys)
        spans = _spans(call, rows)
        tensors = (call.query, call.key, call.value, *bias.sources)
        if new <= rows:
            return _attend_part(call, bias, (0, new), spans[0], *tensors)
        again = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        random = bool(call.kwargs.get("dropout"))
        outputs, weights = [], []
        for span, start in zip(spans, range(0, new, rows), strict=True):
            attend = partial(_attend_part, call, bias, (start, min(start + rows, new)), span)
            if again:
                output, weight = checkpoint(attend, *tensors, use_reentrant=False, preserve_rng_state=random)
            else:
                output, weight = attend(*tensors)
            outputs.append(output)
            if weight is not None:
                weights.append(weight)
        return torch.cat(outputs, dim=1), torch.cat(weights, dim=2) if weights else None


def _spans(call: _Call, rows: int) -> list[tuple[int, int]]:
    """The first key that any query of each part may see, and the one after the last."""
    new, keys = call.query.shape[2], call.key.shape[2]
    if call.mask is None or call.mask.is_meta:  # in a rehearsal, it is causal as well
        return [(0, call.places.before + min(start + rows, new)) for start in range(0, new, rows)]
    mask = call.mask
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    seen = functional.pad(seen.flatten(0, 1).any(dim=0), (0, 0, 0, -new % rows))
    by_part = seen.view(-1, rows, keys).any(dim=1).to(torch.uint8)
    # A part in which nobody sees anything, as of padding alone, reads one key all the same.
    ends = keys - by_part.flip(1).argmax(dim=1)
    return [(first, end) for first, end in torch.stack([by_part.argmax(dim=1), ends], dim=1).tolist()]


def _attend_part(
    call: _Call, bias: PartialBias, queries: tuple[int, int], keys: tuple[int, int], query: Tensor,
    key: Tensor, value: Tensor, *sources: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of some queries to some keys, the bias and the mask added in one."""
    (start, stop), (first, end) = queries, keys
    asking = query[:, :, start:stop].flip(2)
    part = bias.part(start, stop, first, end, sources, asking * call.kwargs["scaling"]).to(query.dtype)
    if call.mask is not None:
        given = call.mask[:, :, start:stop, first:end].flip(2)
        least = torch.finfo(query.dtype).min
        part = (
            torch.where(given, part, least) if given.dtype == torch.bool else (part + given).clamp(min=least)
        )
    output, weights = call.own(asking, key[:, :, first:end], value[:, :, first:end], part)
    if bias.weighs:
        assert weights is not None
        output = output + bias.values(start, stop, first, end, sources, weights).transpose(1, 2)
    if weights is None or call.implementation != "eager":
        return output.flip(1), None
    return output.flip(1), functional.pad(weights.flip(2), (first, key.shape[2] - end))
