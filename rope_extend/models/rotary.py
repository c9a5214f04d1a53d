"""The rotary module that replaces the model's own, exact at any position and in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rope_extend.encodings import Encoding, RopeEncoding, RopeShape
from rope_extend.encodings.core.transfers import to_device
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.models.families import Family, Layout


def float64_device(device: torch.device) -> torch.device:
    """Where angles for states on a device are computed, in float64: Apple's GPUs have none."""
    return torch.device("cpu") if device.type == "mps" else device


def angles_of(encoding: RopeEncoding, shape: RopeShape, position_ids: Tensor, inv_freq: Tensor) -> Tensor:
    """The rotation angles of an encoding at `position_ids` `[..., T]`: `[..., T, dim/2]` float64 radians.

    `inv_freq` is `[dim/2]` float64. Positions below
    `start_tokens` have plain RoPE's angles. The result is on `float64_device` of the positions.
    """
    device = float64_device(position_ids.device)
    at = to_device(position_ids, device)[..., None].to(torch.float64)
    angles = at * to_device(inv_freq, device)
    if encoding.start_tokens == 0:
        return angles
    return torch.where(at < encoding.start_tokens, at * to_device(shape.inv_freq(), device), angles)


def expand_cos_sin(cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor] | Tensor:
    """Lay out the cos and sin of each channel pair, `[batch, T, dim/2]`, as a family's attention takes them.

    - `halves`: the whole table twice, `[batch, T, dim]`;
    - `neighbours`: each value twice, `[batch, T, dim]`;
    - `once`: unchanged, `[batch, T, dim/2]`;
    - `complex`: one number per pair, `cos + i sin`, complex64 `[batch, T, dim/2]`.
    """
    if layout == "complex":
        return torch.complex(cos.float(), sin.float())
    if layout == "once":
        return cos, sin
    if layout == "neighbours":
        return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


POSITIONS = "_rope_extend_positions"
"""The attribute of cos and sin with the positions that they were computed for."""


def marked_positions(table: Any) -> Tensor | None:
    """The positions that cos, or cos and sin as complex numbers, belong to; None without a mark."""
    return getattr(table, POSITIONS, None)


def check_one_position(encoding: Encoding, parts: Tensor) -> None:
    """Refuse positions `[3, batch, T]` of which the parts differ."""
    if not parts.is_meta and not bool((parts == parts[:1]).all()):
        raise PatchError(
            f"{encoding} needs one position for each token, but this input has tokens with several "
            f"(time, height, width); use a static schedule, such as yarn"
        )


def _table_of(module: Any, layer_type: str | None) -> Tensor:
    """The table of a stock rotary module, `[pairs]`."""
    table: Tensor = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
    return table


def _sections_of(module: Any) -> tuple[int, ...]:
    """The channel pairs for each part (time, height, width) of a position, by a rotary module."""
    sections = getattr(module, "sections", None) or module.mrope_section
    sizes = tuple(sections) if isinstance(sections, list | tuple) else ()
    if len(sizes) != 3 or any(type(size) is not int or size < 0 for size in sizes):
        raise UnsupportedModelError(
            f"mrope_section must be three whole numbers of channel pairs, got {sections!r}; correct it in "
            "config.rope_parameters"
        )
    return sizes


class ExtendedRotaryEmbedding(nn.Module):
    """Replaces a model's rotary module and computes cos and sin for any `RopeEncoding`.

    It keeps the contract of the stock module. `forward(x, position_ids)` gives `(cos, sin)`, each
    `[batch, T, dim]` in the dtype of `x`, with the pairs laid out as in the stock module. The attributes that
    transformers' loading code uses exist. Both buffers are non-persistent, so `state_dict()` does not change.
    If the stock module has a table for each layer type, and `forward(x, position_ids, layer_type)`, it still
    computes the types that are not extended.

    The table used for computing is float64 and not reached by dtype casts. `model.to(torch.bfloat16)` rounds
    every buffer, and a rounded frequency is wrong by whole turns at long positions. Angles are computed in
    float64; only cos and sin are rounded.

    Args:
        module: the module that is replaced: the stock one, or that of an earlier patch.
        marked: whether cos and sin say which positions they belong to.

    Attributes:
        pairs: the number of channel pairs with values; those beyond the encoding's `dim/2` do not rotate.
        plain: the stock module if it computes plain RoPE; it goes on to do so under an encoding that rotates
            inside attention.
        layer_type: the type of the layers that use the encoding; None if all layers do.
        sections: the number of pairs for each part (time, height, width) of a position, if there are parts.
        dtype: the dtype of cos and sin; None for that of the hidden states.
    """

    inv_freq: Tensor
    original_inv_freq: Tensor
    plain: Any

    def __init__(
        self,
        encoding: RopeEncoding,
        shape: RopeShape,
        module: Any,
        family: Family,
        config: Any,
        *,
        marked: bool = False,
    ) -> None:
        super().__init__()
        self.encoding, self.shape, self.marked = encoding, shape, marked
        self.config, self.layout = family.rotary_config(config), family.layout
        self.layer_type = layer_type = family.layer_type(config)
        patched = isinstance(module, ExtendedRotaryEmbedding)
        original: Any = module.original if layer_type and patched else module
        stock_table = _table_of(original, layer_type)
        self.pairs, device = stock_table.shape[-1], stock_table.device
        self.sections = _sections_of(module) if family.sections else ()
        self.dtype = torch.float32 if config.model_type in family.in_float32 else None
        if patched:
            plain = module.plain
        else:
            kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
            plain = module if kind == "default" else None
        self.__dict__["plain"] = plain  # not a submodule, so that no cast reaches it
        if layer_type is not None:
            self.original = original
            self.layer_types = list(getattr(original, "layer_types", ()))  # stock decoders loop over it
        # Attributes that stock code reads from a rotary module. After a meta-device init, "default" makes
        # PreTrainedModel._init_weights refill the buffers from `compute_default_rope_parameters` below.
        self.rope_type = "default"
        self.max_seq_len_cached = self.original_max_seq_len = self.config.max_position_embeddings
        self.attention_scaling = encoding.attention_factor(shape)
        table = encoding.inv_freq(shape)
        self.register_buffer("inv_freq", self._buffer(table, device), persistent=False)
        # As in the stock module, a copy of the table that is in use.
        self.register_buffer("original_inv_freq", self._buffer(table, device), persistent=False)
        # A plain attribute, not a buffer: no cast reaches it.
        self._table = self._computed(self.inv_freq.device)

    def _computed(self, device: torch.device) -> Tensor:
        """The frequencies that this module rotates by, `[dim/2]` float64; on the CPU for a model on meta."""
        plain = self.encoding.rotates_in_attention
        table = self.shape.inv_freq() if plain else self.encoding.inv_freq(self.shape)
        return table.to("cpu" if device.type == "meta" else float64_device(device))

    def compute_default_rope_parameters(self, config: Any = None, **kwargs: Any) -> tuple[Tensor, float]:
        """`(inv_freq [dim/2] float32, attention factor)` of the encoding, as transformers asks for them."""
        return self._buffer(self.encoding.inv_freq(self.shape), None), self.attention_scaling

    def _buffer(self, table: Tensor, device: torch.device | None) -> Tensor:
        return self.pad_unrotated(table).to(device, torch.float32)

    def pad_unrotated(self, values: Tensor) -> Tensor:
        """Frequencies or angles `[..., dim/2]`, padded to `[..., pairs]` by zeros."""
        return nn.functional.pad(values, (0, self.pairs - self.shape.dim // 2))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExtendedRotaryEmbedding:
        """Follow the model to its device, but not to its dtype; refill what `to_empty` left undefined."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.inv_freq.device
        with torch.device("cpu"):  # not on a device that the caller made the default, such as meta
            table, self._table = self.encoding.inv_freq(self.shape), self._computed(device)
        self.inv_freq = self._buffer(table, device)
        self.original_inv_freq = self._buffer(table, device)
        if self.plain is not None and "meta" not in (
            device.type,
            _table_of(self.plain, self.layer_type).device.type,
        ):
            self.plain.to(device)
        return self

    @torch.no_grad()
    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """`(cos, sin)`, each `[batch, T, dim]` in the dtype of `x`, for `position_ids` `[batch, T]`.

        `x` gives dtype and device only. If the schedule rotates inside attention, this is plain RoPE.
        Positions with parts (time, height, width) are `[3, batch, T]`.
        """
        if layer_type != self.layer_type:
            assert self.original is not None
            other: tuple[Tensor, Tensor] = self.original(x, position_ids, layer_type)
            return other
        in_attention = self.encoding.rotates_in_attention
        parts = position_ids.dim() == 3
        if parts and in_attention:
            check_one_position(self.encoding, position_ids)
        if in_attention and self._plain_serves(x.device):
            layer_types = () if layer_type is None else (layer_type,)
            # In transformers 5.17, the stock module takes positions with all parts only.
            every = position_ids.expand(3, -1, -1) if self.sections and not parts else position_ids
            return self._mark(self.plain(x, every, *layer_types), position_ids)
        first = position_ids[0] if parts else position_ids
        factor = 1.0 if in_attention else self.attention_scaling
        if parts and not in_attention:
            angles = self._in_sections(angles_of(self.encoding, self.shape, position_ids, self._table))
        else:
            angles = angles_of(self.encoding, self.shape, first, self._table)
        if self.pairs > self.shape.dim // 2:
            angles = self.pad_unrotated(angles)
        dtype = self.dtype or x.dtype
        cos, sin = ((each * factor).to(x.device, dtype) for each in (angles.cos(), angles.sin()))
        return self._mark(expand_cos_sin(cos, sin, self.layout), position_ids)

    def _plain_serves(self, device: torch.device) -> bool:
        """Whether plain RoPE comes from the model's own module: not if that is elsewhere, or was cast."""
        if self.plain is None:
            return False
        table = _table_of(self.plain, self.layer_type)
        return table.device == device and table.dtype.itemsize >= 4

    def plain_angles(self, position_ids: Tensor) -> Tensor:
        """The angles of plain RoPE by which this module rotates, `[..., dim/2]` float64, with their rounding.

        `position_ids` `[...]` are on any device; so is the result.
        """
        if not self._plain_serves(self.inv_freq.device):
            return position_ids[..., None].to(torch.float64) * to_device(
                self.shape.inv_freq(), position_ids.device
            )
        table = _table_of(self.plain, self.layer_type)[: self.shape.dim // 2].float()
        return (position_ids[..., None].float() * to_device(table, position_ids.device)).to(torch.float64)

    def _mark(
        self, cos_sin: tuple[Tensor, Tensor] | Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor] | Tensor:
        if self.marked and not torch.compiler.is_compiling():
            setattr(cos_sin if isinstance(cos_sin, Tensor) else cos_sin[0], POSITIONS, position_ids)
        return cos_sin

    def _in_sections(self, angles: Tensor) -> Tensor:
        """Choose the angles of each pair, `[batch, T, dim/2]`, from those by part, `[3, batch, T, dim/2]`.

        Pairs are assigned in rotation (time, height, width, time, ...) until a part has as many pairs as
        `sections` says; all others belong to time.
        """
        chosen = angles[0].clone()
        for part in (1, 2):
            pairs = slice(part, 3 * self.sections[part], 3)
            chosen[..., pairs] = angles[part, ..., pairs]
        return chosen

    def extra_repr(self) -> str:
        """The encoding and the shape, for `print(model)`."""
        return f"{self.encoding}, dim={self.shape.dim}, trained_length={self.shape.trained_length}"
