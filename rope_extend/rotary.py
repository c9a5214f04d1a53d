"""The rotary module that stands in for the model's own, exact at any position and in any dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.errors import PatchError

if TYPE_CHECKING:
    from rope_extend.attention.reader import PositionReader

_PIECE = 12
"""Bits per piece in the split-float path: a product of two 12-bit integers is exact in float32."""
_PIECES = 4


def split_turns(inv_freq: Tensor) -> Tensor:
    """Cut frequencies into pieces whose products with a position are exact in float32.

    `inv_freq` `[dim/2]` float64, radians per token, at most 1, becomes `[4, dim/2]` float32: whole numbers
    below 2^12, piece k in units of `2^-(14 + 12k)` turns per token. 50 bits in all, so that a position of
    24 bits leaves an error below 2^-26 turns.
    """
    rest = inv_freq.detach().to("cpu", torch.float64) / (2 * math.pi) * 2.0**14
    pieces = []
    for _ in range(_PIECES):
        pieces.append(rest.floor())
        rest = (rest - rest.floor()) * 2.0**_PIECE
    return torch.stack(pieces).to(torch.float32)


def split_angles(position_ids: Tensor, pieces: Tensor) -> Tensor:
    """Angles modulo a full turn without float64, for devices that have none (MPS).

    `position_ids` `[..., T]` whole numbers below 2^24, `pieces` `[4, dim/2]` of `split_turns`; returns
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
    """The angles by which an encoding turns at `position_ids` `[batch, T]`, `[batch, T, dim/2]` radians.

    `inv_freq` `[dim/2]`, or `[batch, 1, dim/2]` for a table per row, float64. The angles are float64, or
    float32 modulo a turn on devices without it. Positions below `start_tokens` keep plain RoPE's.
    """

    def angles(table: Tensor) -> Tensor:
        if has_float64(position_ids.device):
            return position_ids[..., None].to(torch.float64) * table.to(position_ids.device)
        return split_angles(position_ids, split_turns(table).to(position_ids.device))

    if encoding.start_tokens == 0:
        return angles(inv_freq)
    early = (position_ids < encoding.start_tokens)[..., None]
    return torch.where(early, angles(shape.inv_freq()), angles(inv_freq))


Widening = Literal["halves", "neighbours", "once", "complex"]
"""How a family's rotary module lays out one value per pair for the channels of a head, see `widen`."""


def widen(cos: Tensor, sin: Tensor, form: Widening) -> tuple[Tensor, Tensor] | Tensor:
    """Lay out the cos and sin of each pair, `[batch, T, dim/2]`, as a family's attention takes them.

    `halves`: the whole table twice, `[batch, T, dim]`; `neighbours`: each value twice, `[batch, T, dim]`;
    `once`: as they are, `[batch, T, dim/2]`; `complex`: as one number for each pair, `cos + i sin`, complex64
    `[batch, T, dim/2]`.
    """
    if form == "complex":
        return torch.complex(cos.float(), sin.float())
    if form == "once":
        return cos, sin
    if form == "neighbours":
        return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


class Start(NamedTuple):
    """What a model that is annealed to an encoding rotated by before."""

    module: nn.Module
    """Its own rotary module."""
    table: Tensor
    """Its frequencies `[dim/2]` float64, radians per token."""
    factor: float
    """On cos and sin."""


class ExtendedRotaryEmbedding(nn.Module):
    """Stands in for a model's rotary module and computes cos and sin for any `RopeEncoding`.

    The contract of the stock module is kept: `forward(x, position_ids)` gives `(cos, sin)`, each
    `[batch, T, dim]` in x's dtype, the table of channel pairs laid out as the stock module does, and the
    attributes that transformers' loading code relies on exist. Both buffers are non-persistent, so
    `state_dict()` is the stock one. Where the stock module has a table for each kind of layer, and
    `forward(x, position_ids, layer_type)`, it goes on to serve the kinds that are left alone.

    The table that is computed with is float64 and out of reach of dtype casts: `model.to(torch.bfloat16)`
    rounds every buffer, and a rounded frequency is wrong by whole turns at long positions. Angles are
    computed in float64 (split float32 on devices without it) and only cos and sin are rounded.

    Args:
        encoding: the schedule.
        shape: the numbers it is computed from.
        config: the model's config, kept because transformers' loading code passes it around.
        device: where the tables go.
        widened: how the family's rotary module lays out the value of each pair.
        reader: what acts inside attention for this encoding, and has to be told the positions; None if
            nothing does.
        original: the stock module.
        layer_type: the kind of layer that reads with the encoding; None if all layers do.
        pairs: how many channel pairs the stock module has values for; those beyond `dim/2` do not turn.
        sections: how many pairs turn by each part (time, height, width) of a position, if it has parts.
        dtype: of cos and sin; that of the hidden states if None.
    """

    inv_freq: Tensor
    original_inv_freq: Tensor
    _start: Start | None

    def __init__(
        self,
        encoding: RopeEncoding,
        shape: RopeShape,
        config: Any,
        device: torch.device | None = None,
        widened: Widening = "halves",
        reader: PositionReader | None = None,
        original: nn.Module | None = None,
        layer_type: str | None = None,
        pairs: int | None = None,
        sections: Sequence[int] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self.shape = shape
        self.config = config
        self.widened = widened
        self.reader = reader
        self.layer_type = layer_type
        self.pairs = pairs or shape.dim // 2
        self.sections = tuple(sections)
        self.dtype = dtype
        self._share, self._start = 1.0, None
        if layer_type is not None:
            self.original = original
            self.layer_types = list(getattr(original, "layer_types", ()))  # LFM3 asks for it
        # What stock code reads off a rotary module. "default" makes PreTrainedModel._init_weights refill
        # the buffers from `compute_default_rope_parameters` below, after a meta-device init.
        self.rope_type = "default"
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.attention_scaling = encoding.attention_factor(shape)
        table = encoding.inv_freq(shape)
        self.register_buffer("inv_freq", self._buffer(table, device), persistent=False)
        # As in the stock module, a copy of the table that is in use.
        self.register_buffer("original_inv_freq", self._buffer(table, device), persistent=False)
        # A plain attribute, not a buffer: no cast reaches it.
        self._table = self._for_device(table, self.inv_freq.device)

    def compute_default_rope_parameters(self, config: Any = None, **kwargs: Any) -> tuple[Tensor, float]:
        """`(inv_freq [dim/2] float32, attention factor)` of the encoding, as transformers asks for them."""
        return self._buffer(self.encoding.inv_freq(self.shape), None), self.attention_scaling

    def _buffer(self, table: Tensor, device: torch.device | None) -> Tensor:
        return self.with_resting(table).to(device, torch.float32)

    def with_resting(self, values: Tensor) -> Tensor:
        """Frequencies or angles `[..., dim/2]`, with zeros for the pairs that do not turn, `[..., pairs]`."""
        return nn.functional.pad(values, (0, self.pairs - self.shape.dim // 2))

    @classmethod
    def _for_device(cls, inv_freq: Tensor, device: torch.device) -> Tensor:
        """The float64 table, or its split form, on `device`; on the CPU while the model is on meta."""
        target = torch.device("cpu") if device.type == "meta" else device
        return inv_freq.to(target) if has_float64(target) else split_turns(inv_freq).to(target)

    def mix(self, share: float, start: Start) -> None:
        """Rotate by `share` of the encoding's frequencies and factor, and the rest of the model's own.

        At 0 the model's own module rotates, at 1 the encoding alone does, each bit for bit. What other code
        reads off the module stays the encoding's.
        """
        self._share, self._start = share, None if share == 1 else start
        with torch.device("cpu"):
            table = self._mixed(self.encoding.inv_freq(self.shape))
        self._table = self._for_device(table, self.inv_freq.device)

    def _mixed(self, table: Tensor) -> Tensor:
        return table if self._start is None else torch.lerp(self._start.table, table, self._share)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExtendedRotaryEmbedding:
        """Follow the model to its device, but not to its dtype; refill what `to_empty` leaves undefined."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.inv_freq.device
        with torch.device("cpu"):  # not on a device that the caller made the default, such as meta
            table = self.encoding.inv_freq(self.shape)
        self.inv_freq = self._buffer(table, device)
        self.original_inv_freq = self._buffer(table, device)
        self._table = self._for_device(self._mixed(table), device)
        return self

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

        `x` gives dtype and device only. A schedule that rotates in attention turns nothing here (cos 1,
        sin 0); one that is chosen per row takes the table of that row's largest position. Positions in
        parts are `[3, batch, T]`.
        """
        if layer_type != self.layer_type:
            assert self.original is not None
            given: tuple[Tensor, Tensor] = self.original(x, position_ids, layer_type)
            return given
        parts = None
        if position_ids.dim() == 3:
            parts, position_ids = position_ids, position_ids[0]
        factor: Tensor | float
        if self.reader is not None and self.encoding.rotates_in_attention:
            if parts is not None and not bool((parts == parts[:1]).all()):
                raise PatchError(
                    f"{self.encoding} rotates inside attention, by one position for each token; this input "
                    f"has tokens with several (time, height, width). A static schedule reads it, such as yarn"
                )
            self.reader.begin(position_ids)
            angles, factor = torch.zeros(*position_ids.shape, self.shape.dim // 2, device=x.device), 1.0
        elif self.encoding.depends_on_length:
            angles, factor = self._rowwise(x, position_ids)
        else:
            if self.reader is not None:
                self.reader.begin(position_ids)
            if self._start is not None and self._share == 0:
                return self._rotated_by_start(x, position_ids if parts is None else parts)
            # A model dispatched over several devices by hooks never calls `_apply`.
            table = self._table.to(x.device) if self._table.device != x.device else self._table
            angles, factor = self._angles(position_ids, table), self.attention_scaling
            if self._start is not None:
                factor = self._start.factor + self._share * (factor - self._start.factor)
            if parts is not None:
                angles = self._in_sections(self._angles(parts, table))
        if self.pairs > self.shape.dim // 2:
            angles = self.with_resting(angles)
        dtype = self.dtype or x.dtype
        cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        return widen(cos, sin, self.widened)

    def _rotated_by_start(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """What the model's own module gives."""
        assert self._start is not None
        of_kind = () if self.layer_type is None else (self.layer_type,)
        given: tuple[Tensor, Tensor] | Tensor = self._start.module(x, position_ids, *of_kind)
        return given

    def _in_sections(self, angles: Tensor) -> Tensor:
        """Of the angles by each part of a position, `[3, batch, T, dim/2]`, those that each pair turns by.

        Pairs take turns, time, height, width, time, ..., until a part has had its share; the rest is time's.
        """
        chosen = angles[0].clone()
        for part in (1, 2):
            turns = slice(part, 3 * self.sections[part], 3)
            chosen[..., turns] = angles[part, ..., turns]
        return chosen

    def _rowwise(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Angles `[batch, T, dim/2]` and factors `[batch, 1, 1]`, each row under its own table."""
        if self.reader is not None:
            self.reader.refuse_changed_rows(position_ids)
        if position_ids.is_meta:  # where what a text takes is rehearsed
            lengths = [position_ids.shape[-1]] * len(position_ids)
        else:
            lengths = (position_ids.amax(dim=-1) + 1).tolist()
        tables = torch.stack([self.encoding.inv_freq(self.shape, length) for length in lengths])
        factors = [self.encoding.attention_factor(self.shape, length) for length in lengths]
        angles = angles_of(self.encoding, self.shape, position_ids, tables[:, None])
        return angles, torch.tensor(factors, device=x.device, dtype=torch.float32)[:, None, None]

    def extra_repr(self) -> str:
        """The encoding and the shape, for `print(model)`."""
        return f"{self.encoding}, dim={self.shape.dim}, trained_length={self.shape.trained_length}"
