"""The numbers of a model that encodings are computed from."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from rope_extend.encodings.core.checks import MAX_DIM, check_length, check_number
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class RopeShape:
    """The numbers of a model that its rotary tables are computed from.

    Attributes:
        dim: rotated channels per head; even. Partial-rotary families rotate fewer channels than a head has.
        theta: the base b of the frequencies `b^(-2i/dim)`, as the model was pretrained.
        trained_length: the window the model was pretrained on, in tokens.
    """

    dim: int
    theta: float
    trained_length: int

    def __post_init__(self) -> None:
        whole = isinstance(self.dim, Integral) and not isinstance(self.dim, bool)
        if not whole or not 2 <= self.dim <= MAX_DIM or self.dim % 2:
            raise RopeExtendError(
                f"RopeShape: dim must be an even whole number of channels up to {MAX_DIM}, got {self.dim!r}"
            )
        object.__setattr__(self, "dim", int(self.dim))
        object.__setattr__(
            self, "theta", check_number("RopeShape", "theta", self.theta, minimum=1, above=True)
        )
        object.__setattr__(
            self, "trained_length", check_length("RopeShape", "trained_length", self.trained_length)
        )

    @property
    def exponents(self) -> Tensor:
        """`2i/dim` for each channel pair i, `[dim/2]` float64."""
        return torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim

    def inv_freq(self, theta: float | None = None) -> Tensor:
        """Plain RoPE's frequencies `theta^(-2i/dim)`, `[dim/2]` float64, radians per token (2104.09864)."""
        return (self.theta if theta is None else theta) ** -self.exponents


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that encodings other than rotary ones are computed from.

    Attributes:
        heads: query heads of a layer.
        hidden_size: channels of a token's embedding.
        trained_length: the window the model was pretrained on, in tokens.
        head_dim: channels of a query and of a key.
        value_dim: channels of a value.
    """

    heads: int
    hidden_size: int
    trained_length: int
    head_dim: int = 64
    value_dim: int = 64

    def __post_init__(self) -> None:
        for field in ("heads", "hidden_size", "head_dim", "value_dim"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise RopeExtendError(f"ModelShape: {field} must be a whole number above 0, got {value!r}")
            object.__setattr__(self, field, int(value))
        object.__setattr__(
            self, "trained_length", check_length("ModelShape", "trained_length", self.trained_length)
        )
