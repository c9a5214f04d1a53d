"""Floating-point operations of a forward, and the operations per second of a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rope_extend.evaluation.loss_computer import LossComputer, RunOptions
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.memory.meta_device import META, dry_run_attention, of_all_layers
from rope_extend.models.config_facts import layer_config
from rope_extend.models.decoders import unwrap


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of a model.

    Attributes:
        linear: operations per token, without attention.
        pairs: operations of attention per query-key pair, in all layers with a window, by the maximum number
            of keys that a query sees; None for all keys before it.
    """

    linear: float
    pairs: Mapping[int | None, float]

    def of(self, tokens: int) -> float:
        """All operations for a window."""
        return self.linear * tokens + self.attention(tokens)

    def attention(self, tokens: int) -> float:
        """Operations of attention for a window, in all layers; counts only the unmasked pairs."""
        return sum(cost * _pairs(tokens, window) for window, cost in self.pairs.items())


def _pairs(tokens: int, window: int | None) -> float:
    """Number of query-key pairs under a causal mask, with at most `window` keys per query."""
    keys = min(tokens, window or tokens)
    return tokens * keys - keys * (keys - 1) / 2


class Rates(NamedTuple):
    """Floating-point operations per second of a device.

    Attributes:
        linear: of matrix products.
        attention: of causal attention over a whole window.
    """

    linear: float
    attention: float


def operations_of(model: nn.Module) -> Operations:
    """Operations of a model on the meta device, counted on three short windows.

    Calls of transformers' attention functions are counted one by one. Some families multiply queries and keys
    themselves (Falcon, the indexers of DeepSeek). Their operations also grow with the square of the window,
    and follow from the second difference.
    """
    costs = {getattr(part, "sliding_window", None): 0 for part in model.modules()}

    def note(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> None:
        costs[getattr(module, "sliding_window", None)] += (
            2 * query.shape[1] * (query.shape[-1] + value.shape[-1])
        )

    def products(tokens: int) -> int:
        costs.update(dict.fromkeys(costs, 0))
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=META)
        computer = LossComputer(model, META, RunOptions(chunk=tokens))
        with LiveBytes(), FlopCounterMode(display=False) as counter:
            computer.losses(ids, ids[:, 1:], 1, tokens)
        return counter.get_total_flops()

    step = 256  # state-space layers pad their chunks, which have 256 tokens at most
    with dry_run_attention(model, maskless=True, note=note), torch.no_grad():
        counts = of_all_layers(model, lambda: [*(products(n * step) for n in (1, 2, 3)), *costs.values()])
    first, second, third, *of_windows = counts
    square = (third - 2 * second + first) / (2 * step**2)
    pairs = dict[int | None, float](zip(costs, of_windows, strict=True))
    pairs[None] = pairs.get(None, 0.0) + max(0.0, square)
    return Operations((second - first) / step - 3 * step * square, pairs)


def measured_rates(model: nn.Module, device: torch.device) -> Rates:
    """Operations per second of a device, with matrices and heads of a model's size and dtype.

    Measured once in a process for each size: a run plans several evaluations.
    """
    config = layer_config(unwrap(model).config)
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return _measured_rates(config.hidden_size, heads, head, unwrap(model).dtype, device)


@cache
def _measured_rates(width: int, heads: int, head: int, dtype: torch.dtype, device: torch.device) -> Rates:
    budget = 5e8 if device.type == "cpu" else 2e12  # operations of one trial
    rows = min(16_384, max(64, int(budget / (8 * width**2))))
    states = torch.randn(rows, width, device=device, dtype=dtype)
    matrix = torch.randn(width, 4 * width, device=device, dtype=dtype)
    tokens = min(16_384, max(256, int(math.sqrt(budget / (2 * heads * head)))))
    query = torch.randn(1, heads, tokens, head, device=device, dtype=dtype)

    def seconds(run: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(4):  # the first is a warm-up
            started = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
        return min(times[1:])

    attend = partial(F.scaled_dot_product_attention, query, query, query, is_causal=True)
    with torch.no_grad():
        products, whole = seconds(lambda: states @ matrix), seconds(attend)
    return Rates(8.0 * rows * width**2 / products, 4.0 * heads * head * _pairs(tokens, None) / whole)
