"""The rotary module that replaces the model's own, exact at any position and in any dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.encodings.core.transfers import to_device
from rope_extend.errors import PatchError
from rope_extend.models.families import Layout

_PIECE = 12
"""Bits per piece in the split-float path: a product of two 12-bit integers is exact in float32."""
_PIECES = 4


def split_turns(inv_freq: Tensor) -> Tensor:
    """Cut frequencies into pieces whose products with a position are exact in float32.

    `inv_freq` `[dim/2]` float64, radians per token, at most 1, becomes `[4, dim/2]` float32: whole numbers
    below 2^12, piece k in units of `2^-(14 + 12k)` turns per token. That is 50 bits in all, so at a position
    of 24 bits the error is below 2^-26 turns.
    """
    rest = inv_freq.detach().to("cpu", torch.float64) / (2 * math.pi) * 2.0**14
    pieces = []
    for _ in range(_PIECES):
        pieces.append(rest.floor())
        rest = (rest - rest.floor()) * 2.0**_PIECE
    return torch.stack(pieces).to(torch.float32)


def split_angles(position_ids: Tensor, pieces: Tensor) -> Tensor:
    """Angles modulo a full turn without float64, for devices that have none (MPS).

    `position_ids` `[..., T]` whole numbers below 2^24, `pieces` `[4, dim/2]` of `split_turns`. Returns
    `[..., T, dim/2]` float32 radians in [0, 2 pi), within 1e-5 of the float64 angle at any such position.
    """
    positions = position_ids.to(torch.int64)
    high = (positions >> _PIECE).to(torch.float32)[..., None]
    low = (positions & (2**_PIECE - 1)).to(torch.float32)[..., None]
    turns = torch.zeros((), device=position_ids.device)
    for index in range(_PIECES):
        unit = 2.0 ** -(14 + _PIECE * index)
        for part, weight in ((high, unit * 2**_PIECE), (low, unit)):
            product = part * pieces[index] * weight  # exact: 24 bits times a power of two
            turns = turns + (product - product.floor())
    return (turns - turns.floor()) * (2 * math.pi)


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64."""
    return device.type != "mps"


def angles_of(encoding: RopeEncoding, shape: RopeShape, position_ids: Tensor, inv_freq: Tensor) -> Tensor:
    """The rotation angles of an encoding at `position_ids` `[batch, T]`: `[batch, T, dim/2]` radians.

    `inv_freq` is `[dim/2]`, or `[batch, 1, dim/2]` for a table per row, float64. The angles are float64, or
    float32 modulo a turn on devices without float64. Positions below `start_tokens` have plain RoPE's angles.
    """

    def angles(table: Tensor) -> Tensor:
        if has_float64(position_ids.device):
            return position_ids[..., None].to(torch.float64) * to_device(table, position_ids.device)
        return split_angles(position_ids, to_device(split_turns(table), position_ids.device))

    if encoding.start_tokens == 0:
        return angles(inv_freq)
    early = (position_ids < encoding.start_tokens)[..., None]
    return torch.where(early, angles(shape.inv_freq()), angles(inv_freq))


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


def marked_positions(table: Tensor) -> Tensor | None:
    """The positions that cos, or cos and sin as complex numbers, belong to; None without a mark."""
    return getattr(table, POSITIONS, None)


@dataclass(frozen=True)
class RotarySlot:
    """What a model needs of the module that replaces its rotary module.

    Attributes:
        config: the config of the rotary module; transformers' loading code reads it.
        pairs: the number of channel pairs with values; those beyond the encoding's `dim/2` do not rotate.
        device: the device of the tables.
        layout: how cos and sin of each pair are laid out.
        original: the stock module, or the one of an earlier patch.
        plain: the stock module if it computes plain RoPE; it goes on to do so under an encoding that rotates
            inside attention.
        marked: whether cos and sin say which positions they belong to.
        layer_type: the type of the layers that use the encoding; None if all layers do.
        sections: the number of pairs for each part (time, height, width) of a position, if there are parts.
        dtype: the dtype of cos and sin; None for that of the hidden states.
    """

    config: Any
    pairs: int
    device: torch.device | None = None
    layout: Layout = "halves"
    original: Any = None
    plain: Any = None
    marked: bool = False
    layer_type: str | None = None
    sections: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


class ExtendedRotaryEmbedding(nn.Module):
    """Replaces a model's rotary module and computes cos and sin for any `RopeEncoding`.

    It keeps the contract of the stock module. `forward(x, position_ids)` gives `(cos, sin)`, each
    `[batch, T, dim]` in the dtype of `x`, with the pairs laid out as in the stock module. The attributes that
    transformers' loading code uses exist. Both buffers are non-persistent, so `state_dict()` does not change.
    If the stock module has a table for each layer type, and `forward(x, position_ids, layer_type)`, it still
    computes the types that are not extended.

    The table used for computing is float64 and not reached by dtype casts. `model.to(torch.bfloat16)` rounds
    every buffer, and a rounded frequency is wrong by whole turns at long positions. Angles are computed in
    float64 (split float32 on devices without it); only cos and sin are rounded.

    Args:
        encoding: the schedule.
        shape: the rotary shape of the model.
        slot: what the model expects of its rotary module.
    """

    inv_freq: Tensor
    original_inv_freq: Tensor
    plain: Any

    def __init__(self, encoding: RopeEncoding, shape: RopeShape, slot: RotarySlot) -> None:
        super().__init__()
        self.encoding = encoding
        self.shape = shape
        self.config = slot.config
        self.layout = slot.layout
        self.layer_type = slot.layer_type
        self.pairs = slot.pairs
        self.sections = slot.sections
        self.dtype = slot.dtype
        self.marked = slot.marked
        # Not a submodule, so that no cast reaches it.
        self.__dict__["plain"] = slot.plain
        if slot.layer_type is not None:
            self.original = slot.original
            self.layer_types = list(getattr(slot.original, "layer_types", ()))  # stock decoders loop over it
        # Attributes that stock code reads from a rotary module. After a meta-device init, "default" makes
        # PreTrainedModel._init_weights refill the buffers from `compute_default_rope_parameters` below.
        self.rope_type = "default"
        self.max_seq_len_cached = self.original_max_seq_len = slot.config.max_position_embeddings
        self.attention_scaling = encoding.attention_factor(shape)
        table = encoding.inv_freq(shape)
        self.register_buffer("inv_freq", self._buffer(table, slot.device), persistent=False)
        # As in the stock module, a copy of the table that is in use.
        self.register_buffer("original_inv_freq", self._buffer(table, slot.device), persistent=False)
        # A plain attribute, not a buffer: no cast reaches it.
        self._table = self._for_device(self._computed(), self.inv_freq.device)

    def _computed(self) -> Tensor:
        """The frequencies that this module rotates by, `[dim/2]` float64."""
        plain = self.encoding.rotates_in_attention
        return self.shape.inv_freq() if plain else self.encoding.inv_freq(self.shape)

    def compute_default_rope_parameters(self, config: Any = None, **kwargs: Any) -> tuple[Tensor, float]:
        """`(inv_freq [dim/2] float32, attention factor)` of the encoding, as transformers asks for them."""
        return self._buffer(self.encoding.inv_freq(self.shape), None), self.attention_scaling

    def _buffer(self, table: Tensor, device: torch.device | None) -> Tensor:
        return self.pad_unrotated(table).to(device, torch.float32)

    def pad_unrotated(self, values: Tensor) -> Tensor:
        """Frequencies or angles `[..., dim/2]`, padded to `[..., pairs]` by zeros."""
        return nn.functional.pad(values, (0, self.pairs - self.shape.dim // 2))

    @classmethod
    def _for_device(cls, inv_freq: Tensor, device: torch.device) -> Tensor:
        """The float64 table, or its split form, on `device`; on the CPU while the model is on meta."""
        target = torch.device("cpu") if device.type == "meta" else device
        return inv_freq.to(target) if has_float64(target) else split_turns(inv_freq).to(target)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExtendedRotaryEmbedding:
        """Follow the model to its device, but not to its dtype; refill what `to_empty` left undefined."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.inv_freq.device
        with torch.device("cpu"):  # not on a device that the caller made the default, such as meta
            table, computed = self.encoding.inv_freq(self.shape), self._computed()
        self.inv_freq = self._buffer(table, device)
        self.original_inv_freq = self._buffer(table, device)
        self._table = self._for_device(computed, device)
        if self.plain is not None and "meta" not in (device.type, self._table_of_plain().device.type):
            self.plain.to(device)
        return self

    def _table_of_plain(self) -> Tensor:
        name = "inv_freq" if self.layer_type is None else f"{self.layer_type}_inv_freq"
        table: Tensor = getattr(self.plain, name)
        return table

    def _angles(self, position_ids: Tensor, table: Tensor) -> Tensor:
        """`[batch, T, dim/2]` radians: float64, or float32 modulo a turn where the device has no float64."""
        if has_float64(position_ids.device):
            return position_ids[..., None].to(torch.float64) * table
        return split_angles(position_ids, table)

    @torch.no_grad()
    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """`(cos, sin)`, each `[batch, T, dim]` in the dtype of `x`, for `position_ids` `[batch, T]`.

        `x` gives dtype and device only. If the schedule rotates inside attention, this is plain RoPE.
        A schedule with one table per row uses the table of that row's largest position. Positions with parts
        (time, height, width) are `[3, batch, T]`.

        Raises:
            PatchError: positions with different parts, under an encoding that depends on the length; or a
                cache whose keys belong to another table of their row.
        """
        if layer_type != self.layer_type:
            assert self.original is not None
            other: tuple[Tensor, Tensor] = self.original(x, position_ids, layer_type)
            return other
        if self.encoding.rotates_in_attention:
            return self._rotated_plainly(x, position_ids)
        parts, given = None, position_ids
        if position_ids.dim() == 3:
            parts, position_ids = position_ids, position_ids[0]
            if self.encoding.depends_on_length:
                self._check_one_position(parts)
        factor: Tensor | float
        if self.encoding.depends_on_length:
            angles, factor = self._rowwise(x, position_ids)
        else:
            angles, factor = self._static(x, position_ids if parts is None else parts), self.attention_scaling
            if parts is not None:
                angles = self._in_sections(angles)
        return self._laid_out(angles, factor, x, given)

    def _laid_out(
        self, angles: Tensor, factor: Tensor | float, x: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor] | Tensor:
        """cos and sin of angles `[batch, T, dim/2]` as the model takes them, marked with their positions."""
        if self.pairs > self.shape.dim // 2:
            angles = self.pad_unrotated(angles)
        dtype = self.dtype or x.dtype
        cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        return self._mark(expand_cos_sin(cos, sin, self.layout), position_ids)

    def _rotated_plainly(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """cos and sin of plain RoPE, by the model's own module if it computes that."""
        if position_ids.dim() == 3:
            self._check_one_position(position_ids)
        if self._plain_serves(x.device):
            layer_type = () if self.layer_type is None else (self.layer_type,)
            # In transformers 5.17, the stock module takes positions with all parts only.
            parts = self.sections and position_ids.dim() == 2
            at = position_ids.expand(3, -1, -1) if parts else position_ids
            cos_sin: tuple[Tensor, Tensor] | Tensor = self.plain(x, at, *layer_type)
            return self._mark(cos_sin, position_ids)
        positions = position_ids[0] if position_ids.dim() == 3 else position_ids
        return self._laid_out(self._angles_of_table(positions, x.device), 1.0, x, position_ids)

    def _plain_serves(self, device: torch.device) -> bool:
        """Whether plain RoPE comes from the model's own module: not if that is elsewhere, or was cast."""
        if self.plain is None:
            return False
        table = self._table_of_plain()
        return table.device == device and table.dtype.itemsize >= 4

    def plain_angles(self, position_ids: Tensor) -> Tensor:
        """The angles of plain RoPE by which this module rotates, `[..., dim/2]` float64, with their rounding.

        `position_ids` `[...]` are on any device; so is the result.
        """
        if not self._plain_serves(self.inv_freq.device):
            return position_ids[..., None].to(torch.float64) * to_device(
                self.shape.inv_freq(), position_ids.device
            )
        table = self._table_of_plain()[: self.shape.dim // 2].float()
        return (position_ids[..., None].float() * to_device(table, position_ids.device)).to(torch.float64)

    def _mark(
        self, cos_sin: tuple[Tensor, Tensor] | Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor] | Tensor:
        if self.marked and not torch.compiler.is_compiling():
            setattr(cos_sin if isinstance(cos_sin, Tensor) else cos_sin[0], POSITIONS, position_ids)
        return cos_sin

    def _angles_of_table(self, position_ids: Tensor, device: torch.device) -> Tensor:
        """`[..., T, dim/2]` radians by the one table of the module."""
        # A model dispatched over several devices by hooks never calls `_apply`.
        return self._angles(position_ids, to_device(self._table, device))

    def _check_one_position(self, parts: Tensor) -> None:
        """Refuse positions `[3, batch, T]` of which the parts differ.

        Raises:
            PatchError: they differ.
        """
        if not parts.is_meta and not bool((parts == parts[:1]).all()):
            raise PatchError(
                f"{self.encoding} needs one position for each token, but this input has tokens with several "
                f"(time, height, width); use a static schedule, such as yarn"
            )

    def _static(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """`[..., T, dim/2]` radians by the one table of the schedule."""
        if self.encoding.start_tokens:
            return angles_of(self.encoding, self.shape, position_ids, self.encoding.inv_freq(self.shape))
        return self._angles_of_table(position_ids, x.device)

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

    def _rowwise(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Angles `[batch, T, dim/2]` and factors `[batch, 1, 1]`, each row under its own table."""
        if position_ids.is_meta:  # in a dry run
            lengths = [position_ids.shape[-1]] * len(position_ids)
        else:
            lengths = (position_ids.amax(dim=-1) + 1).tolist()
            for cached, length in zip(position_ids.amin(dim=-1).tolist(), lengths, strict=True):
                self._check_cache(cached, length)
        tables = torch.stack([self.encoding.inv_freq(self.shape, length) for length in lengths])
        factors = [self.encoding.attention_factor(self.shape, length) for length in lengths]
        angles = angles_of(self.encoding, self.shape, position_ids, tables[:, None])
        return angles, to_device(torch.tensor(factors, dtype=torch.float32), x.device)[:, None, None]

    def _check_cache(self, cached: int, length: int) -> None:
        """Refuse tokens after `cached` ones that were rotated by another table of their row.

        Raises:
            PatchError: the table for the row's present length is another one.
        """
        if cached == 0:
            return
        before, now = (
            (self.encoding.inv_freq(self.shape, each), self.encoding.attention_factor(self.shape, each))
            for each in (cached, length)
        )
        if before[1] != now[1] or not torch.equal(before[0], now[0]):
            raise PatchError(
                f"{self.encoding} rotates a whole row by the table of its length, so the {cached} cached "
                f"tokens would have to be computed again at {length}; use use_cache=False, or an encoding "
                f"with per='query'"
            )

    def extra_repr(self) -> str:
        """The encoding and the shape, for `print(model)`."""
        return f"{self.encoding}, dim={self.shape.dim}, trained_length={self.shape.trained_length}"
