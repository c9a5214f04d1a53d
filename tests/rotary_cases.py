"""The rotary methods: one row each, with its oracle. A new row gets every check.

An oracle is independent of rope_extend. It is stock transformers' own function if there is one, else the
formula of the paper in plain Python floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_extend.encodings import RopeEncoding, RopeShape, encoding

TRAINED = 32
"""The window of the tiny models, in tokens."""
FACTOR = 8.0
TARGET = int(TRAINED * FACTOR)

Oracle = Callable[[RopeShape, int], tuple[list[float], float]]
"""`(shape, sequence length) -> (inverse frequencies, attention factor)`."""


def scaling(rope_type: str, **parameters: Any) -> dict[str, Any]:
    """Stock transformers' `rope_parameters` of a tiny model, at FACTOR; `parameters` come on top."""
    window = {"original_max_position_embeddings": TRAINED}
    return {"rope_type": rope_type, "rope_theta": 10_000.0, "factor": FACTOR, **window, **parameters}


def stock(rope_type: str, **parameters: Any) -> Oracle:
    """Stock transformers' own function for a `rope_type`, at FACTOR."""

    def oracle(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
        own = {"rope_theta": shape.theta, "original_max_position_embeddings": shape.trained_length}
        config = LlamaConfig(
            head_dim=shape.dim,
            max_position_embeddings=shape.trained_length,
            rope_parameters=scaling(rope_type, **{**own, **parameters}),
        )
        table, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=seq_len)
        return table.tolist(), factor

    return oracle


def base(theta: Callable[[RopeShape], float]) -> Oracle:
    """Plain RoPE at another base, in Python floats."""

    def oracle(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
        return [theta(shape) ** (-2 * i / shape.dim) for i in range(shape.dim // 2)], 1.0

    return oracle


@dataclass(frozen=True)
class EncodingCase:
    """One method: its oracle, and its parameters, which may depend on the model's shape."""

    name: str
    oracle: Oracle
    parameters: Mapping[str, Any] | Callable[[RopeShape], Mapping[str, Any]] = field(default_factory=dict)
    label: str = ""
    reloads: bool = True
    """Whether stock transformers supports it."""
    tolerance: float = 1e-12
    """Relative error of the oracle itself: `FLOAT32` if it is stock transformers."""

    def build(self, shape: RopeShape) -> RopeEncoding:
        """The encoding for a model of this shape."""
        parameters = self.parameters(shape) if callable(self.parameters) else self.parameters
        method = encoding(self.name, **parameters)
        assert isinstance(method, RopeEncoding)
        return method

    def __str__(self) -> str:
        return self.label or self.name


FLOAT32 = 1e-6


def plain(shape: RopeShape) -> list[float]:
    """`theta_i` of 2104.09864."""
    return [shape.theta ** (-2 * i / shape.dim) for i in range(shape.dim // 2)]


def by_parts(shape: RopeShape, seq_len: int, factor: float = FACTOR) -> tuple[list[float], float]:
    """Equations 11 to 13 of 2309.00071, in Python floats."""
    table = []
    for theta in plain(shape):
        turns = shape.trained_length / (2 * math.pi / theta)
        ramp = 0.0 if turns < 1 else 1.0 if turns > 32 else (turns - 1) / 31
        table.append((1 - ramp) * theta / factor + ramp * theta)
    return table, 1.0


def yarn_by_turns(shape: RopeShape, seq_len: int, factor: float = FACTOR) -> tuple[list[float], float]:
    """The same table with the factor of equation 15."""
    return by_parts(shape, seq_len, factor)[0], 0.1 * math.log(factor) + 1


def mixed(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
    """Su's formula in Python floats: `a (d/2)^0.75 = ln s`."""
    a = math.log(FACTOR) / (shape.dim / 2) ** 0.75
    return [theta * math.exp(-a * (i + 1) ** 0.75) for i, theta in enumerate(plain(shape))], 1.0


def needed(shape: RopeShape, seq_len: int) -> float:
    return max(1.0, seq_len / shape.trained_length)


def of_length(rope_type: str) -> Oracle:
    """A stock type with the factor that a length needs."""
    return lambda shape, n: stock(rope_type, factor=needed(shape, n))(shape, n)


def divisors(shape: RopeShape, last: float) -> list[float]:
    """A list like those of LongRoPE's search: from about 1 at the fastest pair up to `last`."""
    pairs = shape.dim // 2
    return [1.01 + (last - 1.01) * i / (pairs - 1) for i in range(pairs)]


def longrope(**parameters: Any) -> Callable[[RopeShape], Mapping[str, Any]]:
    return lambda shape: {
        "factor": FACTOR,
        "long_factor": divisors(shape, 1.25 * FACTOR),
        "short_factor": divisors(shape, 1.5),
        **parameters,
    }


def stock_longrope(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
    lists = {"long_factor": divisors(shape, 1.25 * FACTOR), "short_factor": divisors(shape, 1.5)}
    return stock("longrope", **lists)(shape, seq_len)


def rounded(inner: Oracle) -> Oracle:
    """Algorithm 1 of 2403.00071: wavelengths shorter than the trained window become whole numbers."""

    def oracle(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
        table, factor = inner(shape, seq_len)
        waves = [2 * math.pi / theta for theta in table]
        waves = [round(wave) if wave < shape.trained_length else wave for wave in waves]
        return [2 * math.pi / wave for wave in waves], factor

    return oracle


def fastest(pairs: Callable[[RopeShape], int], factor: float = 1.0) -> Oracle:
    """2410.06205: the first pairs keep their frequency, the others get 0."""

    def oracle(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
        return [theta / factor if i < pairs(shape) else 0.0 for i, theta in enumerate(plain(shape))], 1.0

    return oracle


def faded(count: int | None) -> Oracle:
    """2602.05258: half a cosine over the last pairs; by default over those with less than one turn."""

    def oracle(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
        table = plain(shape)
        slow = sum(theta * shape.trained_length < 2 * math.pi for theta in table) if count is None else count
        for k in range(slow):
            angle = math.pi * k / (slow - 1) if slow > 1 else math.pi
            table[len(table) - slow + k] *= 0.5 * (1 + math.cos(angle))
        return table, 1.0

    return oracle


def truncated(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
    """Giraffe's code: `cutoff = 2 pi / L`, an eighth of it, and `2 pi / (16 L)`."""
    cutoff = 2 * math.pi / shape.trained_length
    low = 2 * math.pi / (16 * shape.trained_length)
    return [f if f >= cutoff else low if f >= cutoff / 8 else 0.0 for f in plain(shape)], 1.0


def power(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
    """2308.10882, with k = 0.5."""
    return [theta * math.sqrt(1 - i / (shape.dim / 2)) for i, theta in enumerate(plain(shape))], 1.0


def zero_frequencies(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
    return [0.0] * (shape.dim // 2), 1.0


def beyond(inner: Oracle) -> Oracle:
    """Plain RoPE up to and including the trained length, `inner` above."""
    return lambda shape, n: (plain(shape), 1.0) if n <= shape.trained_length else inner(shape, n)


LINEAR = {"name": "linear", "factor": FACTOR}
NTK = {"name": "ntk", "factor": FACTOR}
YARN = {"name": "yarn", "factor": FACTOR}
YARN_OPTIONS = {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.3}

REMAPS = [
    EncodingCase(name, base(lambda shape: shape.theta), parameters, label=label, reloads=False)
    for name, parameters, label in (
        ("self_extend", {"group": 4, "window": 8}, ""),
        ("rerope", {"window": 8}, ""),
        ("rerope", {"window": 7, "leak": 16, "log_n": False}, "rerope-leak"),
        ("string", {"shift": 12, "local": 4}, ""),
        ("jet_long", {"near": 5, "window": 16}, ""),
        ("sinks", {"sinks": 3, "window": 7}, ""),
        ("dual_chunk", {"chunk": 10, "local": 2}, ""),
        ("near_far", {"far": {"name": "dynamic_yarn", "step": 0.25}, "window": 6}, ""),
    )
]
"""Methods that change positions. Their frequencies are plain RoPE's; `test_remaps.py` has their maps."""

F = {"factor": FACTOR}
_NTK_BASE = base(lambda s: s.theta * FACTOR ** (s.dim / (s.dim - 2)))
_PLAIN = base(lambda shape: shape.theta)


def _from_stock(
    name: str, oracle: Oracle, parameters: Any, label: str = "", *, reloads: bool = True
) -> EncodingCase:
    """A row whose oracle is stock transformers' own function, in float32."""
    return EncodingCase(name, oracle, parameters, label, reloads, FLOAT32)


def _same_lists(shape: RopeShape) -> Mapping[str, Any]:
    lists = dict.fromkeys(("long_factor", "short_factor"), divisors(shape, 1.5))
    return {**F, **lists, "attention_scale": 1.2}


ENCODINGS = [
    EncodingCase("none", _PLAIN),
    _from_stock("linear", stock("linear"), F),
    EncodingCase("ntk", _NTK_BASE, F),
    _from_stock("dynamic_ntk", stock("dynamic"), F),
    _from_stock("yarn", stock("yarn"), F),
    _from_stock("yarn", stock("yarn", **YARN_OPTIONS), {**F, **YARN_OPTIONS}, "yarn-options"),
    _from_stock(
        "yarn", stock("yarn", attention_factor=1.25), {**F, "attention_scale": 1.25}, "yarn-attention"
    ),
    EncodingCase("yarn", yarn_by_turns, {**F, "ramp": "turns"}, "yarn-turns"),
    _from_stock("llama3", stock("llama3", low_freq_factor=1.0, high_freq_factor=4.0), F),
    EncodingCase("ntk_by_parts", by_parts, F),
    EncodingCase("ntk_mixed", mixed, F),
    _from_stock("dynamic_linear", of_length("linear"), {}, reloads=False),
    _from_stock("dynamic_yarn", of_length("yarn"), {}, reloads=False),
    EncodingCase(
        "dynamic_yarn",
        lambda shape, n: yarn_by_turns(shape, n, needed(shape, n)),
        {"ramp": "turns"},
        "dynamic_yarn-turns",
        reloads=False,
    ),
    EncodingCase("abf", base(lambda shape: 750_000.0), {"theta": 750_000.0}),
    _from_stock("longrope", stock_longrope, longrope()),
    _from_stock("longrope", stock_longrope, longrope(start_tokens=4), "longrope-start", reloads=False),
    _from_stock(
        "longrope",
        lambda shape, n: (stock_longrope(shape, shape.trained_length)[0], 1.2),
        _same_lists,
        "longrope-static",
    ),
    EncodingCase("p_rope", fastest(lambda shape: 3 * shape.dim // 8)),
    EncodingCase(
        "p_rope",
        fastest(lambda shape: shape.dim // 4, FACTOR),
        {"inner": LINEAR, "fraction": 0.5},
        "p_rope(linear)",
    ),
    EncodingCase("resonance", rounded(_PLAIN)),
    _from_stock("resonance", rounded(stock("yarn")), {"inner": YARN}, "resonance(yarn)"),
    EncodingCase("clipped", faded(None)),
    EncodingCase("clipped", faded(3), {"channels": 3}, "clipped-3"),
    EncodingCase("clipped", fastest(lambda s: s.dim // 2 - 3), {"channels": 3, "hard": True}, "clipped-hard"),
    EncodingCase("power", power),
    EncodingCase("truncated", truncated),
    EncodingCase("logn", _NTK_BASE, {"inner": NTK}, "logn(ntk)", reloads=False),
    EncodingCase("xpos", _PLAIN, reloads=False),
    EncodingCase("nope", zero_frequencies),
    EncodingCase("drope", zero_frequencies, F, reloads=False),
    _from_stock(
        "short_original", beyond(stock("yarn")), {"inner": YARN}, "short_original(yarn)", reloads=False
    ),
    *REMAPS,
]
