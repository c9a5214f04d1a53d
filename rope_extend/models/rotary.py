"""The rotary module that replaces the model's own, exact at any position and in any dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rope_extend.encodings import Encoding, RopeEncoding, RopeShape
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


class PositionListener(Protocol):
    """Gets the positions of each forward from the rotary module."""

    @property
    def encoding(self) -> Encoding:
        """The encoding of the patch, which may not be that of the rotary module."""

    def begin(self, position_ids: Tensor) -> Any:
        """Take the positions `[batch, T]` of the tokens of a forward; returns the forward."""

    def begin_whole_rows(self, position_ids: Tensor) -> Any:
        """The same, for an encoding with one table per row."""

    def two_rows(self, forward: Any, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Marked cos and sin that leave a state as it is and rotate it too; None if that is not needed."""

    def mark(self, tables: tuple[Tensor, ...], forward: Any) -> None:
        """Remember which forward cos and sin belong to."""


class InitialRotation(NamedTuple):
    """The rotation of a model before a patch, from which it is annealed to the encoding."""

    module: nn.Module
    """Its own rotary module."""
    table: Tensor
    """Its frequencies `[dim/2]` float64, radians per token."""
    factor: float
    """The factor on cos and sin."""


@dataclass(frozen=True)
class RotarySlot:
    """What a model needs of the module that replaces its rotary module.

    Attributes:
        config: the config of the rotary module; transformers' loading code reads it.
        pairs: the number of channel pairs with values; those beyond the encoding's `dim/2` do not rotate.
        device: the device of the tables.
        layout: how cos and sin of each pair are laid out.
        original: the stock module.
        layer_type: the type of the layers that use the encoding; None if all layers do.
        sections: the number of pairs for each part (time, height, width) of a position, if there are parts.
        dtype: the dtype of cos and sin; None for that of the hidden states.
        listener: gets the positions of each forward; None if nothing acts inside attention.
    """

    config: Any
    pairs: int
    device: torch.device | None = None
    layout: Layout = "halves"
    original: nn.Module | None = None
    layer_type: str | None = None
    sections: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    listener: PositionListener | None = None


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
    _start: InitialRotation | None

    def __init__(self, encoding: RopeEncoding, shape: RopeShape, slot: RotarySlot) -> None:
        super().__init__()
        self.encoding = encoding
        self.shape = shape
        self.config = slot.config
        self.layout = slot.layout
        self.handler = slot.listener
        self.layer_type = slot.layer_type
        self.pairs = slot.pairs
        self.sections = slot.sections
        self.dtype = slot.dtype
        self._share, self._start = 1.0, None
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
        self._table = self._for_device(table, self.inv_freq.device)

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

    def mix(self, share: float, start: InitialRotation) -> None:
        """Blend the model's own rotation into the encoding: `share` of the encoding's frequencies and factor.

        At 0 the model's own module rotates, at 1 the encoding alone does, each bit for bit. The buffers and
        attributes of the module stay the encoding's.
        """
        self._share, self._start = share, None if share == 1 else start
        with torch.device("cpu"):
            table = self._mixed(self.encoding.inv_freq(self.shape))
        self._table = self._for_device(table, self.inv_freq.device)

    def _mixed(self, table: Tensor) -> Tensor:
        return table if self._start is None else torch.lerp(self._start.table, table, self._share)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExtendedRotaryEmbedding:
        """Follow the model to its device, but not to its dtype; refill what `to_empty` left undefined."""
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

        `x` gives dtype and device only. If the schedule rotates inside attention, cos is 1 and sin 0 here.
        A schedule with one table per row uses the table of that row's largest position. Positions with parts
        (time, height, width) are `[3, batch, T]`.

        Raises:
            PatchError: positions with different parts, under an encoding that depends on the length or acts
                inside attention or on embeddings.
        """
        if layer_type != self.layer_type:
            assert self.original is not None
            other: tuple[Tensor, Tensor] = self.original(x, position_ids, layer_type)
            return other
        parts, forward = None, None
        if position_ids.dim() == 3:
            parts, position_ids = position_ids, position_ids[0]
        in_attention = self.handler is not None and self.encoding.rotates_in_attention
        if parts is not None and (self.handler is not None or self.encoding.depends_on_length):
            self._check_one_position(parts)
        if self.handler is not None:
            begin = self.handler.begin_whole_rows if self.encoding.per_row else self.handler.begin
            forward = begin(position_ids)
        if in_attention:
            assert self.handler is not None
            if self.layout == "halves" and self.dtype is None and not torch.compiler.is_compiling():
                both = self.handler.two_rows(forward, x)
                if both is not None:
                    return both
            cos_sin = self._unrotated(position_ids, x)
            self.handler.mark(cos_sin if isinstance(cos_sin, tuple) else (cos_sin,), forward)
            return cos_sin
        factor: Tensor | float
        if self.encoding.depends_on_length:
            angles, factor = self._rowwise(x, position_ids)
        elif self._start is not None and self._share == 0:
            return self._rotated_by_start(x, position_ids if parts is None else parts)
        else:
            angles, factor = self._static(x, position_ids if parts is None else parts), self.attention_scaling
            if self._start is not None:
                factor = self._start.factor + self._share * (factor - self._start.factor)
            if parts is not None:
                angles = self._in_sections(angles)
        if self.pairs > self.shape.dim // 2:
            angles = self.pad_unrotated(angles)
        dtype = self.dtype or x.dtype
        cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        cos_sin = expand_cos_sin(cos, sin, self.layout)
        if self.handler is not None:
            self.handler.mark(cos_sin if isinstance(cos_sin, tuple) else (cos_sin,), forward)
        return cos_sin

    def _unrotated(self, position_ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """cos 1 and sin 0, laid out as the model takes them."""
        width = self.pairs * (1 if self.layout in ("once", "complex") else 2)
        cos = torch.ones(*position_ids.shape, width, dtype=self.dtype or x.dtype, device=x.device)
        sin = torch.zeros_like(cos)
        return torch.complex(cos.float(), sin.float()) if self.layout == "complex" else (cos, sin)

    def _check_one_position(self, parts: Tensor) -> None:
        """Refuse positions `[3, batch, T]` of which the parts differ.

        Raises:
            PatchError: they differ.
        """
        if not parts.is_meta and not bool((parts == parts[:1]).all()):
            encoding = self.encoding if self.handler is None else self.handler.encoding
            raise PatchError(
                f"{encoding} needs one position for each token, but this input has tokens with several "
                f"(time, height, width); use a static schedule, such as yarn"
            )

    def _static(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """`[..., T, dim/2]` radians by the one table of the schedule."""
        if self.encoding.start_tokens:
            return angles_of(self.encoding, self.shape, position_ids, self.encoding.inv_freq(self.shape))
        # A model dispatched over several devices by hooks never calls `_apply`.
        table = to_device(self._table, x.device)
        return self._angles(position_ids, table)

    def _rotated_by_start(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """The cos and sin of the model's own module."""
        assert self._start is not None
        layer_type = () if self.layer_type is None else (self.layer_type,)
        cos_sin: tuple[Tensor, Tensor] | Tensor = self._start.module(x, position_ids, *layer_type)
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

    def _rowwise(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Angles `[batch, T, dim/2]` and factors `[batch, 1, 1]`, each row under its own table."""
        if position_ids.is_meta:  # in a dry run
            lengths = [position_ids.shape[-1]] * len(position_ids)
        else:
            lengths = (position_ids.amax(dim=-1) + 1).tolist()
        tables = torch.stack([self.encoding.inv_freq(self.shape, length) for length in lengths])
        factors = [self.encoding.attention_factor(self.shape, length) for length in lengths]
        angles = angles_of(self.encoding, self.shape, position_ids, tables[:, None])
        return angles, to_device(torch.tensor(factors, dtype=torch.float32), x.device)[:, None, None]

    def extra_repr(self) -> str:
        """The encoding and the shape, for `print(model)`."""
        return f"{self.encoding}, dim={self.shape.dim}, trained_length={self.shape.trained_length}"
