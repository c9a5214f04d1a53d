"""A linear bias as channels of queries and keys, exact enough in any precision.

A bias of `-slope * (query - key)` is `slope * key - slope * query`: a product of a number for the query with
one for the key, plus one more such product. So it fits into extra channels of the two, and whatever computes
plain attention computes the bias with it: any fused kernel, in memory linear in the length, without a mask.

The difficulty is cancellation. Far into a text both terms are thousands, and their difference, near the
query, a fraction. So positions are counted from the middle, slopes and positions are split into pieces whose
products are exact, and terms that cancel stand next to each other, before the channels of the head itself: a
kernel that adds them up in order is off by no more than the rounding of the difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SLOPE_BITS = 8
_MULTIPLE = 8
"""The number of channels is a multiple of this, as fused kernels want the width of a head to be."""
_UNIT = 2.0**8
"""What queries' own terms are divided by, and keys' ones multiplied, so that float16 holds them."""


def position_channels(
    slopes: Tensor, queries: Tensor, keys: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Channels whose inner product is `-slope * (query - key)`.

    `slopes` `[heads]` float64; `queries` `[rows, Q]` and `keys` `[rows, K]` whole positions. Returns
    `[rows, heads, Q, n]` and `[rows, 1, K, n]` in `dtype`, with n a multiple of 8, and 8 wherever positions
    are within 2^31 of each other in float32, or 2^16 in 16 bits.
    """
    low = torch.minimum(keys.amin(dim=-1), queries.amin(dim=-1))
    high = torch.maximum(keys.amax(dim=-1), queries.amax(dim=-1))
    centre = ((low + high) // 2)[:, None]
    reach = int((high - low).max()) // 2 + 1
    q, k = (queries - centre).to(torch.float64), (keys - centre).to(torch.float64)
    wide = torch.finfo(dtype).bits >= 32
    position_bits = 16 if wide else 8
    count = 1  # of digits that a position has
    while 2 ** (position_bits * count - 1) < reach:
        count += 1
    digits = _digits(k, position_bits, count)  # the highest first
    pieces = _pieces(slopes, _SLOPE_BITS, 3 if wide else 2)
    pairs: list[tuple[Tensor, Tensor]] = []
    for slope in pieces:
        for place, digit in zip(reversed(range(count)), digits, strict=True):
            half = 2.0 ** (position_bits * place // 2)  # shared between the two, again for float16
            weight = slope * 2.0 ** (position_bits * place) / half
            pairs.append((weight[None, :, None].expand(len(q), -1, q.shape[1]), (digit * half)[:, None]))
    # Of the slopes as rounded: an error in a slope is one in proportion to the distance, not to the position.
    own = -torch.stack(pieces).sum(dim=0)[None, :, None] * q[:, None] / _UNIT
    unit = torch.full_like(k, _UNIT)[:, None]
    rows = [(piece, unit) for piece in _pieces(own, *((24, 2) if wide else (8, 4)))]
    # In turn, so that no partial sum is much greater than what it ends as.
    ordered = [pair for two in zip(pairs, rows, strict=False) for pair in two]
    shorter = min(len(pairs), len(rows))
    ordered += pairs[shorter:] + rows[shorter:]
    ordered += [(torch.zeros_like(own), torch.zeros_like(unit))] * (-len(ordered) % _MULTIPLE)
    return (
        torch.stack([pair[0] for pair in ordered], dim=-1).to(dtype),
        torch.stack([pair[1] for pair in ordered], dim=-1).to(dtype),
    )


def _pieces(values: Tensor, bits: int, count: int) -> list[Tensor]:
    """Float64 values as a sum of `count` numbers, each of `bits` significant bits."""
    made, rest = [], values
    for _ in range(count):
        mantissa, exponent = torch.frexp(rest)
        made.append(torch.ldexp((mantissa * 2.0**bits).round(), exponent - bits))
        rest = rest - made[-1]
    return made


def _digits(values: Tensor, bits: int, count: int) -> list[Tensor]:
    """Whole float64 values by their digits to base `2^bits`, each of either sign, the highest first."""
    made = []
    for _ in range(count - 1):
        rest = (values / 2.0**bits).round()
        made.append(values - rest * 2.0**bits)
        values = rest
    return [values, *reversed(made)]
