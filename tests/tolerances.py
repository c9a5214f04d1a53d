"""How far two results of the same arithmetic may differ, where they round in a different order.

Kernels choose their order of summation by the CPU, the number of threads and the shape of the input. A test
that compares two orders takes its tolerance from here. A test that compares the same kernel on the same input
asks for equal bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TERMS = 400
"""Roundings on the way from an embedding to a logit of a model in `cases`: two layers, each with sums over 32
channels four times, over 48 channels once and over about 80 keys."""
GAIN = 16
"""How much these models magnify an error on the way: their queries and keys are drawn wide on purpose."""


def rounding(dtype: torch.dtype, terms: int, scale: float = 1.0) -> float:
    """Largest difference of two sums of `terms` products that are added in different orders.

    One rounding is at most half an epsilon of the result. Roundings are as good as independent, so `terms` of
    them grow by the square root (Higham and Mary 2019). The bound takes four standard deviations of each sum.
    `scale` is the size of the sum of absolute products, in units of the result.
    """
    return 4 * torch.finfo(dtype).eps * math.sqrt(terms) * scale


def logit_tolerance(expected: Tensor, dtype: torch.dtype = torch.float32) -> float:
    """Largest difference of two logits or losses of a tiny model, computed in `dtype` in two orders."""
    return GAIN * rounding(dtype, TERMS, float(expected.abs().max()))


def assert_same_but_rounding(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Equal but for the rounding of `dtype`: about 1.5e-4 of the largest logit in float32.

    A position that is wrong by one changes a logit of these models by more than 1e-2.
    """
    torch.testing.assert_close(actual, expected, rtol=0, atol=logit_tolerance(expected, dtype))
