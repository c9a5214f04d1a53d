"""The kernels of attention: which one torch takes, its speed, the time of its plan, and its rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from measuring import in_bfloat16
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gpu.steps import Figure, Setting, Step, seconds_of
from rope_extend.attention import causal_suffix
from rope_extend.attention.fused_kernels import takes_cudnn
from rope_extend.attention.log_sum_exp import partial_attention
from rope_extend.attention.registry import without_cudnn
from rope_extend.evaluation.flops import measured_rates

SUBJECT = (
    "Attention of the 8B shape in bfloat16: the kernel that torch takes, operations per second, the time of "
    "the first call of a shape, and the difference from float64; and a chunk in parts, merged by log-sum-exp."
)


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which implementations of attention torch takes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if "attention" in name:
            self.names.append(name.removeprefix("_scaled_dot_product_").removesuffix("_attention"))
        return function(*args, **(kwargs or {}))


def heads(setting: Setting, tokens: int, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value of the model's shape; the queries are the last `queries` tokens."""
    config = setting.config
    width = config.hidden_size // config.num_attention_heads
    generator = torch.Generator(setting.device).manual_seed(0)

    def states(count: int, length: int) -> Tensor:
        return torch.randn(
            1, count, length, width, dtype=torch.bfloat16, device=setting.device, generator=generator
        )

    grouped = config.num_key_value_heads
    return (
        states(config.num_attention_heads, queries or tokens),
        states(grouped, tokens),
        states(grouped, tokens),
    )


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
    for row in rows.tolist():
        seen = slice(0, past + row + 1)
        q = query[0, :, row].double().unflatten(0, (-1, groups))  # [kv_heads, groups, dim]
        scores = q @ key[0, :, seen].double().mT * query.shape[-1] ** -0.5
        found.append((scores.softmax(-1) @ value[0, :, seen].double()).flatten(0, 1))
    return torch.stack(found, dim=1)[None]


def _cases(setting: Setting) -> list[tuple[str, Any, int, int]]:
    """Name, function, keys and queries of each case."""
    return [
        *(
            (f"{tokens:,} tokens", whole, tokens, tokens)
            for tokens in (setting.curve // 16, setting.curve // 4, setting.curve)
        ),
        (f"{setting.chunk:,} of {setting.pieces:,} tokens", suffix, setting.pieces, setting.chunk),
    ]


@torch.no_grad()
def speed(setting: Setting) -> Iterator[Figure]:
    """Operations per second, and the time that the first call of a shape takes in addition."""
    config = setting.config
    for name, attention, keys, queries in _cases(setting):
        states = heads(setting, keys, queries)
        first = seconds_of(lambda: attention(*states), setting.device)  # noqa: B023
        with _Kernels() as kernels:
            attention(*states)
        best = seconds_of(lambda: attention(*states), setting.device, repetitions=5)  # noqa: B023
        pairs = queries * (keys - queries) + queries * (queries + 1) / 2
        rate = 4 * config.hidden_size * pairs / best
        note = ", ".join(dict.fromkeys(kernels.names)) or "kernel not known"
        yield Figure(f"{name}: attention", rate / 1e12, "TFLOP/s", note=note)
        yield Figure(f"{name}: first call in addition", max(0.0, first - best), "s")


@torch.no_grad()
def rounding(setting: Setting) -> Iterator[Figure]:
    """Differences from float64, of 32 queries from the first to the last."""
    for name, attention, keys, queries in _cases(setting):
        states = heads(setting, keys, queries)
        rows = torch.linspace(0, queries - 1, 32).long()
        found, expected = attention(*states)[:, :, rows.to(setting.device)].double(), exact(*states, rows)
        gap = float((found - expected).norm() / expected.norm())
        # Weights and result are rounded to bfloat16, each by at most half a unit in the last place.
        yield Figure(f"{name}: difference, relative", gap, at_most=2 * 2**-8)


@torch.no_grad()
def parts(setting: Setting) -> Iterator[Figure]:
    """A chunk in parts that are merged by log-sum-exp, compared with float64 and with one call."""
    query, key, value = heads(setting, setting.pieces, setting.chunk)
    scale, own = query.shape[-1] ** -0.5, slice(setting.pieces - setting.chunk, None)
    square = (query, key[:, :, own], value[:, :, own])
    rows = torch.linspace(0, setting.chunk - 1, 32).long()
    expected, sums = exact(query, key, value, rows), exact_sums(*square[:2], rows)
    faster = takes_cudnn(*square, causal=True)
    for name, context in (("torch's choice", nullcontext), ("flash", without_cudnn)):
        with context():
            with _Kernels() as kernels:
                _, found_sums = partial_attention(*square, causal=True, scale=scale)
            merged = causal_suffix.in_parts(query, key, value, scale)
        note = ", ".join(dict.fromkeys(kernels.names)) or "kernel not known"
        chosen = rows.to(setting.device)
        gap = float((found_sums[:, :, chosen].double() - sums).abs().max())
        # Weights of the parts are then wrong by 0.1 %, less than a rounding to bfloat16.
        yield Figure(f"{name}: difference of the log-sum-exp", gap, at_most=1e-3, note=note)
        found = merged[:, :, chosen].double()
        gap = float((found - expected).norm() / expected.norm())
        # Weights, parts and result are rounded to bfloat16, each by at most half a unit in the last place.
        yield Figure(f"{name}: difference of merged parts, relative", gap, at_most=3 * 2**-8)
    parted = seconds_of(lambda: causal_suffix.in_parts(query, key, value, scale), setting.device, 5)
    with without_cudnn():
        one = seconds_of(lambda: suffix(query, key, value), setting.device, 5)
    note = "" if faster else "torch does not take cuDNN here, so the evaluator makes one call"
    most = setting.target(1.0) if faster else None
    yield Figure("parts: time / one call of flash attention", parted / one, at_most=most, note=note)


def exact_sums(query: Tensor, key: Tensor, rows: Tensor) -> Tensor:
    """The log-sum-exp of the logits of some queries of causal attention, by number, in float64."""
    groups, found = query.shape[1] // key.shape[1], []
    for row in rows.tolist():
        q = query[0, :, row].double().unflatten(0, (-1, groups))
        scores = q @ key[0, :, : row + 1].double().mT * query.shape[-1] ** -0.5
        found.append(scores.logsumexp(-1).flatten())
    return torch.stack(found, dim=1)[None]


def rates(setting: Setting) -> Iterator[Figure]:
    """The rates that plans of time use."""
    measured = measured_rates(in_bfloat16(setting.config, "meta"), torch.device(setting.device))
    for name, rate in vars(measured).items():
        yield Figure(f"rate of the plan: {name}", rate / 1e12, "TFLOP/s")


STEPS = (
    Step("speed", speed, 60),
    Step("rounding", rounding, 60),
    Step("parts", parts, 60),
    Step("rates", rates, 30),
)
