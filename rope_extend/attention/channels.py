"""A linear bias as extra channels of queries and keys, exact to rounding in any precision.

A bias of `-slope * (query - key)` is `slope * key - slope * query`: two products of a number for the query
with a number for the key. So it fits into extra channels of queries and keys. Any fused kernel for plain
attention then computes the bias too, in memory linear in the length and without a mask.

The difficulty is cancellation. Late in a text both terms are in the thousands, and their difference for keys
near the query is less than 1. Three measures keep the error at the rounding of the difference:

- positions are counted from the middle;
- slopes and positions are split into pieces whose products are exact;
- terms that cancel are in adjacent channels, before those of the head, so a kernel adds them up in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SLOPE_BITS = 8
_MULTIPLE = 8
"""The number of channels is a multiple of this, because fused kernels need such head widths."""
_UNIT = 2.0**8
"""Divisor of the queries' terms and factor of the keys' ones, so that float16 can hold them."""


def position_channels(
    slopes: Tensor, queries: Tensor, keys: Tensor, dtype: torch.dtype, span: int | None = None
) -> tuple[Tensor, Tensor]:
    """Channels whose inner product is `-slope * (query - key)`.

    `slopes` `[heads]` float64; `queries` `[rows, Q]` and `keys` `[rows, K]` are integer positions. Returns
    `[rows, heads, Q, n]` and `[rows, 1, K, n]` in `dtype`, with n a multiple of 8. It is 8 if positions are
    within 2^31 of each other in float32, or within 2^16 in 16 bits. `span` is the greatest difference of
    positions in a row; if not given, it is read from the device.
    """
    low = torch.minimum(keys.amin(dim=-1), queries.amin(dim=-1))
    high = torch.maximum(keys.amax(dim=-1), queries.amax(dim=-1))
    centre = ((low + high) // 2)[:, None]
    reach = (int((high - low).max()) if span is None else span) // 2 + 1
    q, k = (queries - centre).to(torch.float64), (keys - centre).to(torch.float64)
    wide = torch.finfo(dtype).bits >= 32
    position_bits = 16 if wide else 8
    count = 1  # digits of a position
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
    # From the rounded slopes, so that their error is in proportion to the distance, not to the position.
    query_terms = -torch.stack(pieces).sum(dim=0)[None, :, None] * q[:, None] / _UNIT
    unit = torch.full_like(k, _UNIT)[:, None]
    rows = [(piece, unit) for piece in _pieces(query_terms, *((24, 2) if wide else (8, 4)))]
    # Alternating, so that no partial sum is much greater than the final one.
    ordered = [pair for two in zip(pairs, rows, strict=False) for pair in two]
    shorter = min(len(pairs), len(rows))
    ordered += pairs[shorter:] + rows[shorter:]
    ordered += [(torch.zeros_like(query_terms), torch.zeros_like(unit))] * (-len(ordered) % _MULTIPLE)
    return (
        torch.stack([pair[0] for pair in ordered], dim=-1).to(dtype),
        torch.stack([pair[1] for pair in ordered], dim=-1).to(dtype),
    )


def _pieces(values: Tensor, bits: int, count: int) -> list[Tensor]:
    """Float64 values as a sum of `count` numbers, each of `bits` significant bits."""
    pieces, rest = [], values
    for _ in range(count):
        mantissa, exponent = torch.frexp(rest)
        pieces.append(torch.ldexp((mantissa * 2.0**bits).round(), exponent - bits))
        rest = rest - pieces[-1]
    return pieces


def _digits(values: Tensor, bits: int, count: int) -> list[Tensor]:
    """The signed digits of integer float64 values to base `2^bits`, the highest first."""
    digits = []
    for _ in range(count - 1):
        rest = (values / 2.0**bits).round()
        digits.append(values - rest * 2.0**bits)
        values = rest
    return [values, *reversed(digits)]
