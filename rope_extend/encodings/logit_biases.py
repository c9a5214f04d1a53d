"""Biases on the attention logits by distance, instead of RoPE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from rope_extend.checks import FLAG, choice, integer
from rope_extend.encodings.core.alternatives import BiasEncoding, LearnedValues
from rope_extend.encodings.core.shapes import ModelShape, check_length
from rope_extend.encodings.core.transfers import to_device
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class ALiBi(BiasEncoding):
    """ALiBi: each logit is lowered in proportion to the distance, with a different slope for each head."""

    name: ClassVar[str] = "alibi"
    paper: ClassVar[str] = "2108.12409"

    def slopes(self, shape: ModelShape) -> Tensor:
        """`2^(-8h/H)` for head h of H, from 1; `[heads]` float64.

        If H is not a power of two: the slopes for the next smaller power, then every other slope for twice
        that power, as in the paper's code and in BLOOM.
        """
        power = 2 ** (shape.heads.bit_length() - 1)
        rest = shape.heads - power
        return torch.cat([_geometric(power), _geometric(2 * power)[::2][:rest]])

    def bias(self, shape: ModelShape, distance: Tensor, query: Tensor, learned: LearnedValues) -> Tensor:
        """`-slope * distance`, `[heads, ...]` float32."""
        slopes = to_device(self.slopes(shape), distance.device, torch.float32)
        return -slopes.view(-1, *[1] * distance.dim()) * distance


def _geometric(heads: int) -> Tensor:
    """The slopes for a power of two heads, `[heads]` float64."""
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float64))


@dataclass(frozen=True)
class T5Bias(BiasEncoding):
    """T5's relative bias: one learned number per head for each range of distances, shared by all layers.

    T5 itself does not scale its logits. Here they keep the scale of the pretrained model.

    Attributes:
        buckets: number of ranges; each range of the nearer half holds one distance.
        max_distance: the distance in tokens from which all distances are in the last range.
    """

    buckets: Annotated[int, integer(2, 4096)] = 32
    max_distance: Annotated[int, integer(2, 2**24)] = 128

    name: ClassVar[str] = "t5_bias"
    paper: ClassVar[str] = "1910.10683"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_distance <= self.buckets // 2:
            raise RopeExtendError(
                f"{self.name}: max_distance must exceed half the buckets, {self.buckets // 2}, got "
                f"{self.max_distance}"
            )

    def bucket(self, distance: Tensor) -> Tensor:
        """The range of each distance, int64 `[...]`.

        Computed in float32 as in T5, so that every distance is in the same range as there.
        """
        exact = self.buckets // 2
        far = exact + (
            torch.log(distance.clamp(min=exact).float() / exact)
            / math.log(self.max_distance / exact)
            * (self.buckets - exact)
        ).to(torch.int64)
        return torch.where(distance < exact, distance, far.clamp(max=self.buckets - 1))

    def initial(self, shape: ModelShape) -> dict[str, Tensor]:
        """`table` `[buckets, heads]`: ALiBi's bias at the nearest distance of each range."""
        ranges = self.bucket(torch.arange(self.max_distance + 1))
        nearest = torch.searchsorted(ranges, torch.arange(self.buckets))
        return {"table": -(nearest[:, None] * ALiBi().slopes(shape)).to(torch.float32)}

    def bias(self, shape: ModelShape, distance: Tensor, query: Tensor, learned: LearnedValues) -> Tensor:
        """The table's number for the range of each distance, `[heads, ...]` float32."""
        return learned["table"][self.bucket(distance)].movedim(-1, 0)


@dataclass(frozen=True)
class Kerple(BiasEncoding):
    """KERPLE: each logit is lowered by the logarithm, or a power, of the distance, learned per head.

    Attributes:
        kernel: `log` for `-r1 ln(1 + r2 r)`, or `power` for `-r1 r^r2`, at distance r.
        per_layer: whether each layer has its own r1 and r2, as in the paper's code.
    """

    kernel: Annotated[str, choice("log", "power")] = "log"
    per_layer: Annotated[bool, FLAG] = True

    name: ClassVar[str] = "kerple"
    paper: ClassVar[str] = "2205.09921"

    def initial(self, shape: ModelShape) -> dict[str, Tensor]:
        """`r1` and `r2`, each `[heads]`, which `positive` maps to the kernel's r1 and r2.

        The kernel's r1 and r2 start evenly spread over the heads, in the ranges of the paper's code: 0 to 2
        and 0 to 1 for the log kernel, 0 to 1 and 0 to 2 for the power kernel.
        """
        spread = (torch.arange(shape.heads) + 0.5) / shape.heads
        r1, r2 = (2 * spread, spread) if self.kernel == "log" else (spread, 2 * spread)
        return {"r1": r1.log(), "r2": r2.log() if self.kernel == "log" else torch.logit(r2 / 2)}

    def positive(self, learned: LearnedValues) -> tuple[Tensor, Tensor]:
        """r1 and r2 of each head, `[heads]` float32: above 0, and r2 of the power kernel below 2.

        The learned numbers are the logarithm or the logit of these. No optimizer step can therefore leave
        the range in which the kernel is conditionally positive definite.
        """
        r2 = learned["r2"]
        return learned["r1"].exp(), r2.exp() if self.kernel == "log" else 2 * r2.sigmoid()

    def bias(self, shape: ModelShape, distance: Tensor, query: Tensor, learned: LearnedValues) -> Tensor:
        """`-r1 ln(1 + r2 r)` or `-r1 r^r2`, `[heads, ...]` float32."""
        r1, r2 = (each.view(-1, *[1] * distance.dim()) for each in self.positive(learned))
        far = distance.to(torch.float32)
        return -r1 * (torch.log1p(r2 * far) if self.kernel == "log" else far**r2)


_EPSILON = 1e-6
"""Added to the normaliser to keep it above 0, as in the paper's code."""


@dataclass(frozen=True)
class FIRE(BiasEncoding):
    """FIRE: a bias from a small network of the distance relative to the query's position, on a log scale.

    `f(psi(r) / psi(max(i, L)))` for distance r and query position i, with `psi(x) = ln(c x + 1)`. Distances
    longer than in training are thus mapped to relative distances that were seen.

    Attributes:
        width: units in the hidden layer of f, which uses ReLU.
        per_layer: whether each layer learns its own f, c and L, as in the paper; False is its FIRE-S.
    """

    width: Annotated[int, integer(1, 4096)] = 32
    per_layer: Annotated[bool, FLAG] = True

    name: ClassVar[str] = "fire"
    paper: ClassVar[str] = "2310.04418"
    by_distance = False

    def initial(self, shape: ModelShape) -> dict[str, Tensor]:
        """The two layers of f, c, and L as a share of the trained window.

        As in the paper's code: c starts at 0.1 and L at the trained window. The layers start as torch
        initialises linear layers, from a fixed seed.
        """
        generator = torch.Generator().manual_seed(0)

        def random(*size: int, fan_in: int) -> Tensor:
            return (2 * torch.rand(*size, generator=generator) - 1) / math.sqrt(fan_in)

        return {
            "weight1": random(self.width, fan_in=1),
            "bias1": random(self.width, fan_in=1),
            "weight2": random(shape.heads, self.width, fan_in=self.width),
            "bias2": random(shape.heads, fan_in=self.width),
            "c": torch.tensor(0.1),
            "share": torch.tensor(1.0),
        }

    def bias(self, shape: ModelShape, distance: Tensor, query: Tensor, learned: LearnedValues) -> Tensor:
        """`f(psi(r) / psi(max(i, L)))`, `[heads, ...]` float32.

        f is piecewise linear and is computed that way: one line per head between each two points at which a
        unit of its hidden layer switches on or off, instead of all units at every distance.
        """
        threshold = (learned["share"] * shape.trained_length).abs()  # L in tokens
        c = learned["c"].abs()
        reach = torch.log1p(c * torch.maximum(query.to(torch.float32), threshold)) + _EPSILON
        share = torch.log1p(c * distance.to(torch.float32)) / reach
        switches, slope, height = _lines(learned)
        piece = torch.searchsorted(switches, share.detach().contiguous()).flatten()
        size = (shape.heads, *share.shape)
        return torch.addcmul(
            height.index_select(1, piece).view(size), slope.index_select(1, piece).view(size), share
        )


def _lines(learned: LearnedValues) -> tuple[Tensor, Tensor, Tensor]:
    """Where units switch, `[width]` ascending; and f's slope and height between, each `[heads, width + 1]`.

    A unit with a positive weight is on after its switch, and one with a negative weight before it. A unit
    with weight 0 is always on or always off.
    """
    weight, bias = learned["weight1"], learned["bias1"]
    with torch.no_grad():
        switches, order = torch.where(weight == 0, torch.inf, -bias / weight).sort()
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        passed = torch.arange(len(order) + 1, device=order.device)[:, None] > rank
        on = torch.where(weight == 0, bias > 0, passed == (weight > 0)).to(weight.dtype)
    out = learned["weight2"]
    return switches, (out * weight) @ on.T, (out * bias) @ on.T + learned["bias2"][:, None]


@dataclass(frozen=True)
class Sandwich(BiasEncoding):
    """Sandwich: the inner product of the sinusoidal vectors of query and key as a bias; nothing is learned.

    Attributes:
        dim: number of channels of the sinusoidal vectors, even.
    """

    dim: Annotated[int, integer(2, 65_536)] = 128

    name: ClassVar[str] = "sandwich"
    paper: ClassVar[str] = "2212.10356"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % 2:
            raise RopeExtendError(f"{self.name}: dim must be an even whole number, got {self.dim!r}")

    def bias(self, shape: ModelShape, distance: Tensor, query: Tensor, learned: LearnedValues) -> Tensor:
        """`H / (8h) * (sum_k cos(r / 10000^(2k/dim)) - dim/2)` in head h of H, `[heads, ...]` float32.

        k runs from 0 to `dim/2 - 1`. The paper does not subtract `dim/2`. Softmax ignores the constant, and
        subtracting it keeps the bias small at short distances.
        """
        # Apple's GPUs have no float64; there, the fastest channels are slightly inexact at long distances.
        dtype = torch.float32 if distance.device.type == "mps" else torch.float64
        far = distance.to(dtype)
        total = torch.zeros_like(far)
        for k in range(self.dim // 2):
            total += torch.cos(far * 10_000.0 ** (-2 * k / self.dim)) - 1
        heads = torch.arange(1, shape.heads + 1, dtype=dtype, device=distance.device)
        scale = (shape.heads / (8 * heads)).view(-1, *[1] * distance.dim())
        return (scale * total).to(torch.float32)


@dataclass(frozen=True)
class Shaw(BiasEncoding):
    """Shaw's relative embeddings: a learned vector for each distance is added to keys.

    The logits are `scale * query . (key + vector)`, so the bias depends on the content of the query.

    Attributes:
        reach: the distance in tokens from which all distances share one vector.
        per_layer: whether each layer has its own vectors, as in the paper.
    """

    reach: Annotated[int, check_length] = 16
    per_layer: Annotated[bool, FLAG] = True

    name: ClassVar[str] = "shaw"
    paper: ClassVar[str] = "1803.02155"
    by_distance = False

    def initial(self, shape: ModelShape) -> dict[str, Tensor]:
        """`key_vectors` `[reach + 1, head_dim]`, by distance.

        They start random, from a fixed seed, with a standard deviation of `head_dim^(-1/2)`.
        """
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(self.reach + 1, shape.head_dim, generator=generator) * shape.head_dim**-0.5
        return {"key_vectors": keys}

    def bias(self, shape: ModelShape, distance: Tensor, query: Tensor, learned: LearnedValues) -> Tensor:
        """Not available: it depends on more than positions."""
        raise NotImplementedError

    def bias_of(self, query: Tensor, distance: Tensor, learned: LearnedValues) -> Tensor:
        """`query . vector`, `[batch, heads, Q, K]` float32, for distances `[rows, Q, K]`.

        `query` `[batch, heads, Q, head_dim]` is scaled already.
        """
        products = query.float() @ learned["key_vectors"].T
        index = distance.clamp(max=self.reach)[:, None]
        return products.gather(-1, index.expand(*query.shape[:3], -1))
