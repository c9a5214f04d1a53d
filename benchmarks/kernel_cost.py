"""The kernels of attention at the 8B shape: which one torch takes, its speed and its rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import measuring
import torch
import torch.nn.functional as F
from measuring import EIGHT_BILLION, Row, in_bfloat16, row, timed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_extend.attention import causal_suffix
from rope_extend.attention.registry import without_cudnn
from rope_extend.evaluation.flops import measured_rates


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which implementations of attention torch takes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if "attention" in name:
            self.names.append(name.removeprefix("_scaled_dot_product_").removesuffix("_attention"))
        return function(*args, **(kwargs or {}))


def states_of(config: LlamaConfig, keys: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value in bfloat16; the queries are the last ones."""
    width = config.hidden_size // config.num_attention_heads
    generator = torch.Generator(measuring.DEVICE).manual_seed(0)
    query, key, value = (
        torch.randn(
            1, heads, length, width, dtype=torch.bfloat16, device=measuring.DEVICE, generator=generator
        )
        for heads, length in (
            (config.num_attention_heads, queries), *[(config.num_key_value_heads, keys)] * 2,
        )
    )  # fmt: skip
    return query, key, value


def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of all tokens, as transformers calls it."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def suffix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of the last tokens, as the evaluator calls it for a chunk."""
    module = SimpleNamespace(
        is_causal=True, num_key_value_groups=query.shape[1] // key.shape[1], training=False
    )
    function = ALL_ATTENTION_FUNCTIONS[causal_suffix._NAME]
    return function(module, query, key, value, None, scaling=query.shape[-1] ** -0.5)[0].transpose(1, 2)


def exact(query: Tensor, key: Tensor, value: Tensor, rows: Tensor) -> Tensor:
    """Causal attention of some queries, by number, in float64."""
    groups, past = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    found = []
    for number in rows.tolist():
        seen = slice(0, past + number + 1)
        q = query[0, :, number].double().unflatten(0, (-1, groups))  # [kv_heads, groups, dim]
        scores = q @ key[0, :, seen].double().mT * query.shape[-1] ** -0.5
        found.append((scores.softmax(-1) @ value[0, :, seen].double()).flatten(0, 1))
    return torch.stack(found, dim=1)[None]


@torch.no_grad()
def attention_kernels(
    repetitions: int, config: LlamaConfig = EIGHT_BILLION, lengths: tuple[int, ...] | None = None
) -> Iterator[Row]:
    """Whole windows, and the last eighth of the longest as the evaluator reads a chunk of a long window.

    By default up to 128k tokens on a GPU, and 4k on a CPU.
    """
    lengths = lengths or ((8192, 32_768, 131_072) if measuring.DEVICE == "cuda" else (1024, 4096))
    chunk, operations = lengths[-1] // 8, 4 * config.hidden_size  # of a pair
    cases: list[tuple[str, Callable[..., Tensor], int, int]] = [
        *((f"attention, {length:,} tokens", whole, length, length) for length in lengths),
        (f"attention, {chunk:,} of {lengths[-1]:,} tokens", suffix, lengths[-1], chunk),
    ]
    planned = measured_rates(in_bfloat16(config, "meta"), torch.device(measuring.DEVICE))
    for name, function, keys, queries in cases:
        states = states_of(config, keys, queries)
        with Kernels() as kernels:
            found = function(*states)
        rows = torch.linspace(0, queries - 1, 32).long()
        expected = exact(*states, rows)
        gap = float((found[:, :, rows.to(found.device)].double() - expected).norm() / expected.norm())
        # Weights and result are rounded to bfloat16, each by at most half a unit in the last place.
        yield row(f"{name}: difference from float64, relative", "its limit", "", gap, 2 * 2**-8, 1.0)

        def without(function: Callable[..., Tensor] = function, states: Any = states) -> None:
            with without_cudnn():
                function(*states)

        ours, theirs = timed(
            lambda function=function, states=states: function(*states), without, repetitions=repetitions
        )
        used = ", ".join(dict.fromkeys(kernels.names)) or "torch's choice"
        yield row(f"{name}, {used}: time", "without cuDNN", "s", ours, theirs)
        pairs = queries * (keys - queries) + queries * (queries + 1) / 2
        rate = pairs * operations / ours
        yield row(f"{name}: rate", "the plan's", "TFLOP/s", rate / 1e12, planned.attention / 1e12)
