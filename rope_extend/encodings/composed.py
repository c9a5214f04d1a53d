"""Changes to another schedule, such as `resonance(yarn)`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from rope_extend.checks import FLAG, integer, number
from rope_extend.encodings.core.rope import RopeEncoding, attribute_of, inner_schedule, log_n_scale
from rope_extend.encodings.core.shapes import MAX_DIM, RopeShape
from rope_extend.encodings.static import PlainRope
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class ComposedRope(RopeEncoding):
    """A change to another rotary schedule: `resonance(yarn)`, `logn(ntk)`.

    What a subclass does not change is that of the inner schedule.

    Attributes:
        inner: the schedule that is changed, an encoding or its `to_dict()`; plain RoPE by default.
    """

    inner: RopeEncoding = field(default_factory=PlainRope)

    inner_name: ClassVar[str] = "inner"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "inner", inner_schedule(self))

    depends_on_length = attribute_of("inner", "depends_on_length")
    start_tokens = attribute_of("inner", "start_tokens")
    mscale_all_dim = attribute_of("inner", "mscale_all_dim")
    rotates_in_attention = attribute_of("inner", "rotates_in_attention")
    inv_freq = attribute_of("inner", "inv_freq")
    attention_factor = attribute_of("inner", "attention_factor")
    table_length = attribute_of("inner", "table_length")
    logit_scale = attribute_of("inner", "logit_scale")
    decay = attribute_of("inner", "decay")
    target_length = attribute_of("inner", "target_length")


@dataclass(frozen=True)
class Resonance(ComposedRope):
    """Resonance: wavelengths rounded to whole tokens, so that fast channels repeat trained angles.

    A channel whose wavelength is a whole number of tokens has the same angles in every turn. Only channels
    that complete a turn within the trained window are changed.
    """

    name: ClassVar[str] = "resonance"
    paper: ClassVar[str] = "2403.00071"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`2 pi / round(wavelength)` for wavelengths below L, `[dim/2]` float64, radians per token."""
        table = self.inner.inv_freq(shape, seq_len)
        wavelength = 2 * math.pi / table  # infinite for frequency zero
        whole = 2 * math.pi / wavelength.round().clamp(min=1)
        return torch.where(wavelength < shape.trained_length, whole, table)


@dataclass(frozen=True)
class PRoPE(ComposedRope):
    """p-RoPE: only the fastest fraction p of the channels rotates; the others carry content, not position.

    The kept pairs rotate as before: the denominator of their exponents stays d. `p_rope(linear)` is what
    transformers calls `proportional` with a factor. A pretrained model has to be fine-tuned to it.

    Attributes:
        fraction: p, above 0 and at most 1; `floor(p d/2)` channel pairs keep their frequency.
    """

    fraction: Annotated[float, number(0, 1, above=True)] = 0.75

    name: ClassVar[str] = "p_rope"
    paper: ClassVar[str] = "2410.06205"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """The inner table with zeros from pair `floor(p d/2)` on, `[dim/2]` float64, radians per token."""
        table = self.inner.inv_freq(shape, seq_len)
        kept = torch.arange(shape.dim // 2) < int(self.fraction * shape.dim // 2)
        return torch.where(kept, table, torch.zeros_like(table))


@dataclass(frozen=True)
class Clipped(ComposedRope):
    """Clipped RoPE (CoPE): the slowest channels fade to frequency zero and reach no unseen angle.

    The first of the clipped pairs keeps its frequency and the last has frequency zero, also if it is the only
    one. Between them the factor is half a cosine, because a hard edge makes attention oscillate over long
    distances.

    Attributes:
        channels: n, the number of slowest channel pairs to clip. By default the pairs that do not complete
            a turn within the trained window under plain RoPE, which the paper names as the cause. Its code
            clips 20 of Llama 3's 64.
        hard: set all n to frequency zero, as in the paper's comparison.
    """

    channels: Annotated[int | None, integer(1, MAX_DIM)] = None
    hard: Annotated[bool, FLAG] = False

    name: ClassVar[str] = "clipped"
    paper: ClassVar[str] = "2602.05258"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """The inner table, its last n values times `(1 + cos(0 .. pi)) / 2`, or 0; `[dim/2]` float64.

        Raises:
            RopeExtendError: more channel pairs than the model rotates.
        """
        table = self.inner.inv_freq(shape, seq_len)
        count = self.channels
        if count is None:
            count = int((2 * math.pi / shape.inv_freq() > shape.trained_length).sum())
        if count > len(table):
            raise RopeExtendError(
                f"clipped: channels is {count}, but this model rotates {len(table)} channel pairs; give fewer"
            )
        fade = (1 + torch.linspace(0, math.pi, count, dtype=torch.float64).cos()) / 2
        fade[-1:] = 0
        kept = torch.ones(len(table) - count, dtype=torch.float64)
        return table * torch.cat((kept, torch.zeros_like(fade) if self.hard else fade))


@dataclass(frozen=True)
class Power(ComposedRope):
    """Power basis: channel i is slowed by `(1 - 2i/d)^k`: the fastest not at all, the slowest the most.

    Attributes:
        inner: the schedule that is slowed further; Giraffe's code applies it to interpolation.
        exponent: k; 0 changes nothing, 0.5 is Giraffe's reported value.
    """

    exponent: Annotated[float, number(0, 100)] = 0.5

    name: ClassVar[str] = "power"
    paper: ClassVar[str] = "2308.10882"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta_i * (1 - i/(d/2))^k`, `[dim/2]` float64, radians per token."""
        return self.inner.inv_freq(shape, seq_len) * (1 - shape.exponents) ** self.exponent


@dataclass(frozen=True)
class Truncated(ComposedRope):
    """Truncated basis: fast channels are kept, slow ones get one small frequency, the slowest frequency zero.

    The default limits are those of Giraffe's code, for a trained window of L tokens. Channels that complete
    a turn within L are kept. Channels below an eighth of a turn get frequency zero. Those between rotate
    once in 16 L tokens. All three parameters are in radians per token.

    Attributes:
        keep_above: a: channels at least this fast are kept; `2 pi / L` by default.
        zero_below: b: channels slower than this do not rotate; `a / 8` by default.
        between: rho: the frequency of channels from b up to a; `a / 16` by default.
    """

    keep_above: Annotated[float | None, number(0, 2 * math.pi, above=True)] = None
    zero_below: Annotated[float | None, number(0, 2 * math.pi)] = None
    between: Annotated[float | None, number(0, 2 * math.pi)] = None

    name: ClassVar[str] = "truncated"
    paper: ClassVar[str] = "2308.10882"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_above is not None:
            self._limits(self.keep_above)

    def _limits(self, above: float) -> tuple[float, float, float]:
        """`(a, b, rho)`."""
        below = above / 8 if self.zero_below is None else self.zero_below
        between = above / 16 if self.between is None else self.between
        if max(below, between) > above:
            raise RopeExtendError(
                f"truncated: zero_below and between must not exceed keep_above, got {below:g}, {between:g} "
                f"and {above:g} radians per token"
            )
        return above, below, between

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta_i` from a up, rho from b up to a, else 0; `[dim/2]` float64, radians per token.

        Raises:
            RopeExtendError: a limit exceeds the default `2 pi / L` of this model.
        """
        above, below, between = self._limits(self.keep_above or 2 * math.pi / shape.trained_length)
        table = self.inner.inv_freq(shape, seq_len)
        slow = torch.where(table >= below, torch.full_like(table, between), torch.zeros_like(table))
        return torch.where(table >= above, table, slow)


@dataclass(frozen=True)
class LogN(ComposedRope):
    """Log-n scaling: logits of a query beyond the trained window are multiplied by `ln(p+1) / ln L`.

    Softmax over more keys is flatter; the factor keeps its entropy about as in training. The inner schedule
    sets the frequencies.
    """

    name: ClassVar[str] = "logn"
    paper: ClassVar[str] = "Su 2021 (log-n attention scaling, kexue.fm/archives/8823)"

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """`max(1, ln(p+1) / ln L)` at position p, times the inner schedule's; float64, like `position_ids`.

        Raises:
            RopeExtendError: the trained window is one token, for which the formula has no value.
        """
        scale = log_n_scale(shape, position_ids)
        inner = self.inner.logit_scale(shape, position_ids)
        return scale if inner is None else scale * inner


_GAMMA = 0.4
"""Keeps the fastest channel's decay finite, as in the paper and its code."""


@dataclass(frozen=True)
class XPos(ComposedRope):
    """xPos: the product of a query and a key decays with their distance, fastest in the fast channels.

    Meant for models trained with it. In other models, distant tokens lose weight.

    Attributes:
        scale_base: tokens over which a channel decays by its `zeta_i`; the larger, the weaker the decay.
    """

    scale_base: Annotated[float, number(1, 1e12)] = 512.0

    name: ClassVar[str] = "xpos"
    paper: ClassVar[str] = "2212.10554"

    rotates_in_attention = True

    def decay(self, shape: RopeShape) -> Tensor:
        """`ln(zeta_i) / scale_base` with `zeta_i = (2i + 0.4 d) / (1.4 d)`, plus the inner schedule's.

        `[dim/2]` float64, below 0, per token; d is the number of rotated channels.
        """
        zeta = (shape.exponents + _GAMMA) / (1 + _GAMMA)
        decay, inner = zeta.log() / self.scale_base, self.inner.decay(shape)
        return decay if inner is None else decay + inner


@dataclass(frozen=True)
class ShortOriginal(ComposedRope):
    """Plain RoPE while a text fits the trained window, the inner schedule once it does not.

    A static schedule costs quality within the trained window, where no change is needed. Here every query
    within the trained window uses the pretrained model's table, exactly. Every later query uses the inner
    schedule for its whole text.

    Attributes:
        inner: the static schedule for longer texts, without decay (xpos).
    """

    name: ClassVar[str] = "short_original"
    paper: ClassVar[str] = "the switch of 2402.13753, with plain RoPE as its short side"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.depends_on_length:
            raise RopeExtendError(
                f"short_original: inner must be a static schedule, but {self.inner} already depends on the "
                f"length; give one such as yarn"
            )
        if self.inner.rotates_in_attention:
            raise RopeExtendError(
                f"short_original: {self.inner} makes distant tokens lose weight in texts of any length, so "
                f"short ones would not be processed as pretrained; give a schedule without xpos"
            )

    depends_on_length = True
    rotates_in_attention = True

    @staticmethod
    def _is_short(shape: RopeShape, seq_len: int | None) -> bool:
        return seq_len is None or seq_len <= shape.trained_length

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Plain RoPE's up to and including the trained length, then the inner one's, `[dim/2]` float64."""
        return shape.inv_freq() if self._is_short(shape, seq_len) else self.inner.inv_freq(shape, seq_len)

    def attention_factor(self, shape: RopeShape, seq_len: int | None = None) -> float:
        """1 up to and including the trained length, then the inner schedule's."""
        return 1.0 if self._is_short(shape, seq_len) else self.inner.attention_factor(shape, seq_len)

    table_length = RopeEncoding.table_length

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """The inner schedule's, beyond the trained window only."""
        scale = self.inner.logit_scale(shape, position_ids)
        if scale is None:
            return None
        return torch.where(position_ids < shape.trained_length, torch.ones_like(scale), scale)
