"""The matrix: one row per encoding, one row per family. A new row gets every check.

An oracle is independent of rope_extend. It is stock transformers' own function if there is one, else the
formula of the paper in plain Python floats.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_extend.encodings import Encoding, RopeEncoding, RopeShape, encoding, encoding_class

TRAINED = 32
"""The window of the tiny models, in tokens."""
FACTOR = 8.0
TARGET = int(TRAINED * FACTOR)

Oracle = Callable[[RopeShape, int], tuple[list[float], float]]
"""`(shape, sequence length) -> (inverse frequencies, attention factor)`."""


def stock(rope_type: str, **parameters: Any) -> Oracle:
    """Stock transformers' own function for a `rope_type`, at FACTOR."""

    def oracle(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
        config = LlamaConfig(
            head_dim=shape.dim,
            max_position_embeddings=shape.trained_length,
            rope_parameters={
                "rope_type": rope_type,
                "rope_theta": shape.theta,
                "factor": FACTOR,
                "original_max_position_embeddings": shape.trained_length,
                **parameters,
            },
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

ENCODINGS = [
    EncodingCase("none", base(lambda shape: shape.theta)),
    EncodingCase("linear", stock("linear"), {"factor": FACTOR}, tolerance=FLOAT32),
    EncodingCase("ntk", base(lambda s: s.theta * FACTOR ** (s.dim / (s.dim - 2))), {"factor": FACTOR}),
    EncodingCase("dynamic_ntk", stock("dynamic"), {"factor": FACTOR}, tolerance=FLOAT32),
    EncodingCase("yarn", stock("yarn"), {"factor": FACTOR}, tolerance=FLOAT32),
    EncodingCase(
        "yarn",
        stock("yarn", **YARN_OPTIONS),
        {"factor": FACTOR, **YARN_OPTIONS},
        label="yarn-options",
        tolerance=FLOAT32,
    ),
    EncodingCase(
        "yarn",
        stock("yarn", attention_factor=1.25),
        {"factor": FACTOR, "attention_scale": 1.25},
        label="yarn-attention",
        tolerance=FLOAT32,
    ),
    EncodingCase("yarn", yarn_by_turns, {"factor": FACTOR, "ramp": "turns"}, label="yarn-turns"),
    EncodingCase(
        "llama3",
        stock("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
        {"factor": FACTOR},
        tolerance=FLOAT32,
    ),
    EncodingCase("ntk_by_parts", by_parts, {"factor": FACTOR}),
    EncodingCase("ntk_mixed", mixed, {"factor": FACTOR}),
    EncodingCase(
        "dynamic_linear",
        lambda shape, n: stock("linear", factor=needed(shape, n))(shape, n),
        reloads=False,
        tolerance=FLOAT32,
    ),
    EncodingCase(
        "dynamic_yarn",
        lambda shape, n: stock("yarn", factor=needed(shape, n))(shape, n),
        reloads=False,
        tolerance=FLOAT32,
    ),
    EncodingCase(
        "dynamic_yarn",
        lambda shape, n: yarn_by_turns(shape, n, needed(shape, n)),
        {"ramp": "turns"},
        label="dynamic_yarn-turns",
        reloads=False,
    ),
    EncodingCase("abf", base(lambda shape: 750_000.0), {"theta": 750_000.0}),
    EncodingCase("longrope", stock_longrope, longrope(), tolerance=FLOAT32),
    EncodingCase("longrope", stock_longrope, longrope(per="row"), label="longrope-row", tolerance=FLOAT32),
    EncodingCase(
        "longrope",
        stock_longrope,
        longrope(start_tokens=4),
        label="longrope-start",
        reloads=False,
        tolerance=FLOAT32,
    ),
    EncodingCase(
        "longrope",
        lambda shape, n: (stock_longrope(shape, shape.trained_length)[0], 1.2),
        lambda shape: {
            "factor": FACTOR,
            "long_factor": divisors(shape, 1.5),
            "short_factor": divisors(shape, 1.5),
            "attention_scale": 1.2,
        },
        label="longrope-static",
        tolerance=FLOAT32,
    ),
    EncodingCase("p_rope", fastest(lambda shape: 3 * shape.dim // 8)),
    EncodingCase(
        "p_rope",
        fastest(lambda shape: shape.dim // 4, FACTOR),
        {"inner": LINEAR, "fraction": 0.5},
        label="p_rope(linear)",
    ),
    EncodingCase("resonance", rounded(base(lambda shape: shape.theta))),
    EncodingCase(
        "resonance", rounded(stock("yarn")), {"inner": YARN}, label="resonance(yarn)", tolerance=FLOAT32
    ),
    EncodingCase("clipped", faded(None)),
    EncodingCase("clipped", faded(3), {"channels": 3}, label="clipped-3"),
    EncodingCase(
        "clipped",
        fastest(lambda shape: shape.dim // 2 - 3),
        {"channels": 3, "hard": True},
        label="clipped-hard",
    ),
    EncodingCase("power", power),
    EncodingCase("truncated", truncated),
    EncodingCase(
        "logn",
        base(lambda s: s.theta * FACTOR ** (s.dim / (s.dim - 2))),
        {"inner": NTK},
        label="logn(ntk)",
        reloads=False,
    ),
    EncodingCase("xpos", base(lambda shape: shape.theta), reloads=False),
    EncodingCase("nope", zero_frequencies),
    EncodingCase("drope", zero_frequencies, {"factor": FACTOR}, reloads=False),
    EncodingCase(
        "short_original",
        beyond(stock("yarn")),
        {"inner": YARN},
        label="short_original(yarn)",
        reloads=False,
        tolerance=FLOAT32,
    ),
    *REMAPS,
]


Dense = Callable[[Mapping[str, Tensor], int, Tensor, Tensor, int], Tensor]
"""`(learned, heads, distance [...], query position [...], trained length) -> bias [heads, ...]`, float64."""


Vectors = Callable[[Mapping[str, Tensor], int, list[int]], Tensor]
"""`(learned, hidden size, positions) -> vectors [positions, hidden size]`, float64."""


@dataclass(frozen=True)
class AlternativeCase:
    """One encoding that is not rotary: its parameters, and its formula in float64."""

    name: str
    dense: Dense | None = None
    """The bias, if it depends on positions alone. A bias that depends on the query has its own test."""
    vectors: Vectors | None = None
    """The vectors that are added to embeddings."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def kind(self) -> type[Encoding]:
        """The encoding's class."""
        return encoding_class(self.name)

    def build(self) -> Encoding:
        """The encoding."""
        return encoding(self.name, **self.parameters)

    def __str__(self) -> str:
        return self.label or self.name


def by_head(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None, None]


def alibi(learned: Mapping[str, Tensor], heads: int, r: Tensor, i: Tensor, trained: int) -> Tensor:
    """2108.12409, and the recursion of its code for numbers of heads that are no power of two."""

    def slopes(n: int) -> list[float]:
        if math.log2(n).is_integer():
            return [2 ** (-8 * (h + 1) / n) for h in range(n)]
        near = 2 ** math.floor(math.log2(n))
        return slopes(near) + slopes(2 * near)[0::2][: n - near]

    return -by_head(slopes(heads)) * r


def t5(buckets: int, furthest: int) -> Dense:
    """1910.10683, for keys before the query."""

    def bucket(r: float) -> int:
        half = buckets // 2
        if r < half:
            return int(r)
        return min(buckets - 1, half + int(math.log(r / half) / math.log(furthest / half) * (buckets - half)))

    def dense(learned: Mapping[str, Tensor], heads: int, r: Tensor, i: Tensor, trained: int) -> Tensor:
        which = {value: bucket(value) for value in r.unique().tolist()}
        index = torch.tensor([which[value] for value in r.flatten().tolist()])
        return learned["table"][index].T.view(heads, *r.shape)

    return dense


def kerple_log(learned: Mapping[str, Tensor], heads: int, r: Tensor, i: Tensor, trained: int) -> Tensor:
    """2205.09921, with the exponentials of the learned parameters."""
    one, two = (torch.exp(learned[name]).view(-1, *[1] * r.dim()) for name in ("r1", "r2"))
    return -one * torch.log(1 + two * r)


def kerple_power(learned: Mapping[str, Tensor], heads: int, r: Tensor, i: Tensor, trained: int) -> Tensor:
    """2205.09921, with an exponent between 0 and 2."""
    one, two = (learned[name].view(-1, *[1] * r.dim()) for name in ("r1", "r2"))
    exponent = 2 / (1 + torch.exp(-two))
    # Zero to any power is 0, but torch has no derivative for it.
    return -torch.exp(one) * torch.where(r > 0, torch.exp(exponent * torch.log(r.clamp(min=1))), 0.0)


def fire(learned: Mapping[str, Tensor], heads: int, r: Tensor, i: Tensor, trained: int) -> Tensor:
    """The listing in the appendix of 2310.04418."""
    threshold = torch.abs(learned["share"] * trained)
    normaliser = torch.log(torch.abs(learned["c"] * torch.maximum(i, threshold)) + 1) + 1e-6
    x = torch.log(torch.abs(learned["c"] * r) + 1) / normaliser
    hidden = torch.relu(x[..., None] * learned["weight1"] + learned["bias1"])
    out = torch.einsum("...w,hw->h...", hidden, learned["weight2"])
    return out + learned["bias2"].view(-1, *[1] * r.dim())


def sandwich(dim: int) -> Dense:
    """The listing in 2212.10356: inner products of sinusoidal vectors, over `8h/H`."""

    def dense(learned: Mapping[str, Tensor], heads: int, r: Tensor, i: Tensor, trained: int) -> Tensor:
        k = torch.arange(dim // 2, dtype=torch.float64)

        def vectors(p: Tensor) -> Tensor:
            angles = p[..., None] / 10_000 ** (2 * k / dim)
            return torch.cat([angles.sin(), angles.cos()], dim=-1)

        total = (vectors(i + 0 * r) * vectors(i - r)).sum(dim=-1) - dim / 2
        return total / by_head([8 * (h + 1) / heads for h in range(heads)])

    return dense


def sinusoidal(scale: float, base: float) -> Vectors:
    """1706.03762, section 3.5."""

    def vectors(learned: Mapping[str, Tensor], hidden: int, positions: list[int]) -> Tensor:
        def channel(p: int, c: int) -> float:
            angle = p / base ** ((c - c % 2) / hidden)
            return scale * (math.cos(angle) if c % 2 else math.sin(angle))

        return torch.tensor([[channel(p, c) for c in range(hidden)] for p in positions], dtype=torch.float64)

    return vectors


def table_rows(learned: Mapping[str, Tensor], hidden: int, positions: list[int]) -> Tensor:
    """Row p of the table, continued by the fresh rows."""
    rows = [*learned["table"], *learned.get("fresh", ())]
    return torch.stack([rows[p] for p in positions])


def tiled(learned: Mapping[str, Tensor], hidden: int, positions: list[int]) -> Tensor:
    return torch.stack([learned["table"][p % len(learned["table"])] for p in positions])


def interpolated(length: int) -> Vectors:
    """Rows spread evenly, so that the last row is at the last position."""

    def vectors(learned: Mapping[str, Tensor], hidden: int, positions: list[int]) -> Tensor:
        table, made = learned["table"], []
        for p in positions:
            low, share = divmod(p * (len(table) - 1), length - 1)
            high = min(low + 1, len(table) - 1)
            made.append(table[low] + (table[high] - table[low]) * share / (length - 1))
        return torch.stack(made)

    return vectors


ALTERNATIVES = [
    AlternativeCase("alibi", alibi),
    AlternativeCase("t5_bias", t5(32, 128)),
    AlternativeCase(
        "t5_bias",
        t5(8, 20),
        parameters={"buckets": 8, "max_distance": 20, "start": "zeros"},
        label="t5_bias-narrow",
    ),
    AlternativeCase("kerple", kerple_log),
    AlternativeCase("kerple", kerple_log, parameters={"per_layer": False}, label="kerple-shared"),
    AlternativeCase("kerple", kerple_power, parameters={"kernel": "power"}, label="kerple-power"),
    AlternativeCase("fire", fire),
    AlternativeCase("fire", fire, parameters={"width": 8, "per_layer": False}, label="fire-shared"),
    AlternativeCase("sandwich", sandwich(128)),
    AlternativeCase("sandwich", sandwich(16), parameters={"dim": 16}, label="sandwich-16"),
    AlternativeCase("linear_attention"),
    AlternativeCase("shaw"),
    AlternativeCase("shaw", parameters={"reach": 5, "values": True}, label="shaw-values"),
    AlternativeCase("sinusoidal", vectors=sinusoidal(1.0, 10_000.0)),
    AlternativeCase(
        "sinusoidal",
        vectors=sinusoidal(0.3, 500.0),
        parameters={"scale": 0.3, "base": 500.0},
        label="sinusoidal-scaled",
    ),
    AlternativeCase("learned", vectors=table_rows, parameters={"rows": 300}),
    AlternativeCase("learned", vectors=tiled, parameters={"beyond": "tile"}, label="learned-tile"),
    AlternativeCase(
        "learned",
        vectors=interpolated(300),
        parameters={"beyond": "interpolate", "length": 300},
        label="learned-interpolate",
    ),
    AlternativeCase(
        "learned", vectors=table_rows, parameters={"beyond": "fresh", "length": 300}, label="learned-fresh"
    ),
]
"""The encodings that are not rotary."""


@dataclass(frozen=True)
class FamilyCase:
    """One family: what its tiny config needs in addition to COMMON."""

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    counts_cached: bool = True
    """Whether a stock forward without positions counts from the length of the cache."""
    auto_reloads: bool = True
    """Whether `AutoModelForCausalLM` loads a saved stock model."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Checks that the unpatched model fails too, `cache` or `padding`, each with the reason."""
    reloads: Collection[str] | None = None
    """The rows of ENCODINGS that stock transformers supports in this family; None for the usual ones."""
    seed: int = 0
    """Of its random weights. Some seeds give weights that magnify float32's rounding."""

    def __str__(self) -> str:
        return self.model_type


COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": TRAINED,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Two layers and a window of TRAINED tokens."""

MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}

PARTIAL = {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
PLAIN = {"rope_parameters": {"rope_theta": 10_000.0}}
"""For families whose default config already carries scaling."""

LATENT = {
    **MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
INDEXED = {**LATENT, "index_topk": 512, "index_head_dim": 16, "index_n_heads": 2}
SHARED = {**MOE, "shared_expert_intermediate_size": 24}
SENSE = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 16,
}  # fmt: skip
"""For the vision and audio parts of multimodal models, which the tests do not use."""
SLIDING_AND_FULL = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}
"""For families that rotate only in layers with a sliding window: one layer of each kind."""
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8}

KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}


def tables(kind: str = "full_attention", **parameters: Any) -> Mapping[str, Any]:
    """Rotary parameters for two kinds of layer, each with a base of its own."""
    other = {"full_attention": "sliding_attention", "indexed_attention": "sliding_attention"}.get(
        kind, f"{kind}_sliding"
    )
    return {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0, **parameters},
            other: {"rope_type": "default", "rope_theta": 1_000.0, **parameters},
        }
    }


GEMMA = {**KINDS, "head_dim": 16, "pad_token_id": 0}
GEMMA3 = {**GEMMA, **tables(), "query_pre_attn_scalar": 16}
GEMMA3N = {
    **GEMMA3, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0,
    "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": None,
}  # fmt: skip
GEMMA4 = {**GEMMA, "global_head_dim": 32, "num_kv_shared_layers": 0}
"""Heads of other widths where attention is full; a quarter of their channels is rotated."""
GEMMA4_TEXT = {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
SIGHT = {"num_key_value_heads": 2, "head_dim": 8, "image_size": 16, "patch_size": 8}
ONE_BASE = ("none", "linear", "ntk", "abf")
"""The methods that `proportional` can express. transformers raises on `longrope` if the layers differ in the
width or number of their heads."""
NO_LISTS = (*ONE_BASE, "yarn", "yarn-options", "yarn-attention", "llama3")
"""All but `longrope`."""

LOCAL = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
BLT = {
    "patch_in_forward": False, "local_attention_window_len": 16, "cross_attn_k": 1,
    "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3],
    "encoder_config": {**LOCAL, "hidden_size_global": 32, "num_hidden_layers": 1, "cross_attn_k": 1,
                       "cross_attn_all_layers": False},
    "decoder_config": {**LOCAL, "hidden_size_global": 32, "num_hidden_layers": 2, "cross_attn_k": 1},
    "global_config": {**LOCAL, **PLAIN, "num_hidden_layers": 2, "max_position_embeddings": TRAINED},
    "patcher_config": {**LOCAL, "num_hidden_layers": 1},
}  # fmt: skip
DOTS3 = {
    **INDEXED, **tables("indexed_attention"), "sliding_window": 16,
    "layer_types": ["sliding_attention", "indexed_attention"],
    "head_dim": 16, "qk_rope_head_dim": 8, "pad_token_id": 0,
    "shared_experts_intermediate_size": 24, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 16,
}  # fmt: skip
LINEAR_HEADS = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
SECTIONS = {
    **LINEAR_HEADS, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
                        "mrope_section": [3, 3, 2], "mrope_interleaved": True},
}  # fmt: skip
_AHEAD = "under sdpa it inverts its mask, and attends to later tokens"
DOGE = {} if Version(transformers.__version__) >= Version("5.23") else {"cache": _AHEAD, "padding": _AHEAD}
"""Limits of Doge in transformers 5.17."""

SOFT = {"attention_multiplier": 0.25}
"""Granite's default is 1, which makes attention so sharp that it magnifies float32's rounding."""

ALL_FAMILIES = [
    FamilyCase("afmoe", {**MOE, **SLIDING_AND_FULL, "head_dim": 16, "num_shared_experts": 1}),
    FamilyCase("apertus", PLAIN),
    FamilyCase("arcee"),
    FamilyCase("aria_text"),
    FamilyCase("axk1", LATENT),
    FamilyCase("axk2", INDEXED),
    FamilyCase(
        "bailing_hybrid",
        {**PLAIN, **LATENT, "layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0},
    ),
    FamilyCase("bamba", {"attn_layer_indices": [1], **MAMBA}, counts_cached=False),
    FamilyCase("bitnet", seed=1),
    FamilyCase(
        "blt",
        BLT,
        limits={
            "cache": "its global transformer has no cache",
            "padding": "its global transformer takes no attention mask",
        },
    ),
    FamilyCase("cohere", {**PLAIN, "logit_scale": 1.0}),
    FamilyCase("cohere2", {**SLIDING_AND_FULL, "logit_scale": 1.0}),
    FamilyCase("cohere2_moe", {**MOE, **SLIDING_AND_FULL, "head_dim": 16, "logit_scale": 1.0}),
    FamilyCase("cwm", PLAIN),
    FamilyCase("deepseek_v2", {**LATENT, "head_dim": 16, "first_k_dense_replace": 1}),
    FamilyCase("deepseek_v3", LATENT),
    FamilyCase("deepseek_v32", INDEXED),
    FamilyCase("diffllama", {"num_key_value_heads": 2}),
    FamilyCase("doge", limits=DOGE),
    FamilyCase("dots3_note_text", DOTS3, reloads=NO_LISTS),
    FamilyCase("ernie4_5"),
    FamilyCase("ernie4_5_moe", {"moe_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2}),
    FamilyCase("exaone4", SLIDING_AND_FULL),
    FamilyCase("exaone_moe", {**MOE, **SLIDING_AND_FULL}),
    FamilyCase("falcon"),
    FamilyCase("falcon_h1", {"mamba_d_ssm": 32, **MAMBA}),
    FamilyCase("flex_olmo", {"pad_token_id": 0}),
    FamilyCase("flint", {**SHARED, **SLIDING_AND_FULL, "head_dim": 16}),
    FamilyCase("fuyu", {"text_config": {**COMMON, **PARTIAL, "model_type": "persimmon"}}),
    FamilyCase("gemma", {"head_dim": 16}),
    FamilyCase("gemma2", {"head_dim": 16, "sliding_window": 64}),
    FamilyCase(
        "gemma3",
        {"text_config": {**COMMON, **GEMMA3}, "vision_config": {**SENSE, **SIGHT}, "mm_tokens_per_image": 4},
    ),
    FamilyCase("gemma3_text", GEMMA3),
    FamilyCase("gemma3n_text", GEMMA3N),
    FamilyCase(
        "gemma4",
        {
            "text_config": {**COMMON, **GEMMA4_TEXT},
            "vision_config": {**SENSE, **SIGHT, "position_embedding_size": 16},
            "audio_config": None,
        },
        reloads=ONE_BASE,
    ),
    FamilyCase("gemma4_text", GEMMA4_TEXT, reloads=ONE_BASE),
    FamilyCase(
        "gemma4_unified",
        {
            "text_config": {**COMMON, **GEMMA4},
            "vision_config": {"mm_embed_dim": 16, "output_proj_dims": 16, "mm_posemb_size": 16},
            "audio_config": None,
        },
        reloads=ONE_BASE,
    ),
    FamilyCase("gemma4_unified_text", GEMMA4, reloads=ONE_BASE),
    FamilyCase("glm", {"head_dim": 16, "pad_token_id": 0}),
    FamilyCase("glm4", {"head_dim": 16, "pad_token_id": 0}),
    FamilyCase("glm4_moe", {**MOE, "n_routed_experts": 4}),
    FamilyCase("glm4_moe_lite", LATENT),
    FamilyCase("glm_moe_dsa", INDEXED),
    FamilyCase(
        "got_ocr2",
        {
            "text_config": {**COMMON, "model_type": "qwen2"},
            "vision_config": {
                **SENSE,
                "mlp_dim": 16,
                "output_channels": 8,
                "window_size": 2,
                "global_attn_indexes": [0],
            },
        },
    ),
    FamilyCase("gpt_neox", PARTIAL),
    FamilyCase("gpt_neox_japanese"),
    FamilyCase(
        "gpt_oss", {**KINDS, **PLAIN, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    FamilyCase("granite", SOFT),
    FamilyCase("granite_swa", {**SOFT, "sliding_window": 512, "layer_rope_theta": [0, 10_000.0]}),
    FamilyCase("granitemoe", SOFT),
    FamilyCase(
        "granitemoe_swa",
        {**SOFT, "num_local_experts": 4, "sliding_window": 512, "layer_rope_theta": [0, 10_000.0]},
    ),
    FamilyCase("granitemoeshared", SOFT),
    FamilyCase("helium", {"head_dim": 16, "pad_token_id": 0}),
    FamilyCase("hrm_text", {"head_dim": 16}),
    FamilyCase("hy_v3", {**MOE, "head_dim": 16}),
    FamilyCase("hy_v4", {**INDEXED, "pad_token_id": 0}),
    FamilyCase("hyperclovax"),
    FamilyCase("internlm3"),
    FamilyCase("iquestcoder"),
    FamilyCase("jais2"),
    FamilyCase("jetmoe", {"kv_channels": 16}),
    FamilyCase("kolibri1", {**SHARED, **SLIDING_AND_FULL, "head_dim": 16}),
    FamilyCase(
        "laguna",
        {
            **KINDS,
            **tables(partial_rotary_factor=0.5),
            **MOE,
            "head_dim": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    FamilyCase("lfm2", {**PLAIN, "num_hidden_layers": 3, "layer_types": ["conv", *["full_attention"] * 2]}),
    FamilyCase(
        "lfm3",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "pad_token_id": 0,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
        },
    ),
    FamilyCase("llama"),
    FamilyCase(
        "llama4_text",
        {
            **PLAIN,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "num_hidden_layers": 4,
            "attention_chunk_size": TARGET,
        },
    ),
    FamilyCase(
        "longcat_flash",
        {
            **PLAIN,
            **LATENT,
            "head_dim": 16,
            "moe_topk": 2,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 24,
            "ffn_hidden_size": 48,
            "num_hidden_layers": 4,
        },
    ),
    FamilyCase("mellum", {**KINDS, **tables(), **MOE, "head_dim": 16}),
    FamilyCase(
        "mimo_v2_flash",
        {
            **KINDS,
            **MOE,
            **tables(partial_rotary_factor=0.5),
            "head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
        },
    ),
    FamilyCase("minicpm3", LATENT),
    FamilyCase("minimax", {**PLAIN, "num_local_experts": 4, "head_dim": 16}),
    FamilyCase("minimax_m2", {**PLAIN, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    FamilyCase(
        "minimax_m3_vl_text",
        {
            **PLAIN,
            **MOE,
            "head_dim": 16,
            "num_local_experts": 4,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 24,
            "index_n_heads": 1,
            "index_head_dim": 16,
        },
    ),
    FamilyCase(
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_theta": 10_000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": TRAINED,
            },
        },
    ),
    FamilyCase("mistral", {"sliding_window": 64}),
    FamilyCase("mixtral", {"num_local_experts": 4}),
    FamilyCase(
        "mllama",
        {
            "text_config": {**COMMON, **PLAIN, "cross_attention_layers": [1], "pad_token_id": 0},
            "vision_config": {
                **SENSE,
                "num_global_layers": 1,
                "attention_heads": 2,
                "max_num_tiles": 1,
                "supported_aspect_ratios": [[1, 1]],
                "intermediate_layers_indices": [0],
                "vision_output_dim": 32,
            },
        },
        auto_reloads=False,
    ),
    FamilyCase(
        "modernbert-decoder",
        {**KINDS, **tables(), "local_attention": 32, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    ),
    FamilyCase("moshi", {"head_dim": 16, "num_codebooks": 2, "audio_vocab_size": 32, "ffn_dim": 48}),
    FamilyCase(
        "moss_transcribe_diarize",
        {
            "text_config": {**COMMON, "head_dim": 16, "model_type": "qwen3"},
            "audio_config": {
                "d_model": 16,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 16,
                "num_mel_bins": 8,
                "max_source_positions": 16,
            },
        },
    ),
    FamilyCase("nanochat"),
    FamilyCase("olmo"),
    FamilyCase("olmo2"),
    FamilyCase("olmo3", {**KINDS, **tables(), "pad_token_id": 0}),
    FamilyCase("olmo_hybrid", {"pad_token_id": 0}),
    FamilyCase("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    FamilyCase("persimmon"),
    FamilyCase("phi", PARTIAL),
    FamilyCase("phi3", {"original_max_position_embeddings": TRAINED, "pad_token_id": 0}),
    FamilyCase(
        "phi4_multimodal",
        {
            "original_max_position_embeddings": TRAINED,
            "pad_token_id": 0,
            "vision_config": {**SENSE, "crop_size": 32},
            "audio_config": {
                **SENSE,
                "num_blocks": 1,
                "ext_pw_out_channel": 16,
                "nemo_conv_channels": 16,
                "input_size": 16,
                "nemo_final_size": 16,
            },
        },
    ),
    FamilyCase(
        "phimoe",
        {**PLAIN, "num_local_experts": 4, "router_jitter_noise": 0.0},
        reloads=[str(case) for case in ENCODINGS if str(case) not in ("longrope", "longrope-row")],
    ),
    FamilyCase("qwen2"),
    FamilyCase("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 24}),
    FamilyCase("qwen3", {"head_dim": 16}),
    FamilyCase("qwen3_5_moe_text", {**SECTIONS, **MOE, "shared_expert_intermediate_size": 24}, seed=1),
    FamilyCase("qwen3_5_text", SECTIONS),
    FamilyCase("qwen3_moe", {**MOE, "head_dim": 16}),
    FamilyCase(
        "qwen3_next",
        {
            **PARTIAL,
            **SHARED,
            **LINEAR_HEADS,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", *["full_attention"] * 2],
        },
    ),
    FamilyCase("seed_oss", {"head_dim": 16}),
    FamilyCase("smollm3", {**PLAIN, "no_rope_layers": [1, 0], "pad_token_id": 0}),
    FamilyCase("solar_open", {**MOE, "n_routed_experts": 4, "head_dim": 16}),
    FamilyCase("stablelm", PARTIAL),
    FamilyCase("starcoder2", {"sliding_window": None}),
    FamilyCase("vaultgemma", {"head_dim": 16}),
    FamilyCase("youtu", LATENT),
    FamilyCase(
        "zaya",
        {
            **tables("hybrid", partial_rotary_factor=0.5),
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 24,
            "router_hidden_size": 16,
        },
    ),
]

FAMILIES = [case for case in ALL_FAMILIES if case.model_type in CONFIG_MAPPING]
"""Families of the installed transformers. The oldest supported version lacks some of them."""


def tiny_config(case: FamilyCase) -> Any:
    """A configuration of the family with two layers and a window of TRAINED tokens."""
    return AutoConfig.for_model(case.model_type, **{**COMMON, **case.config})


def tiny_model(case: FamilyCase) -> PreTrainedModel:
    """A random model of the family, in evaluation mode, whose logits depend on positions.

    Weights are larger than the families' own initialisation. With a standard deviation of 0.02 attention is
    so flat that a wrong position hardly changes a logit.
    """
    return copy_of(lambda: _tiny_model(case), ("family", case.model_type, repr(case.config), case.seed))


_BUILT: dict[Hashable, tuple[PreTrainedModel, Tensor]] = {}


def copy_of(build: Callable[[], PreTrainedModel], key: Hashable) -> Any:
    """A copy of a small model: half the work of building it. torch's seed is as building leaves it."""
    key = (key, torch.get_default_dtype(), torch.get_default_device())
    if key in _BUILT:
        torch.set_rng_state(_BUILT[key][1])
    else:
        model = build()
        if model.device != torch.device("cpu") or model.num_parameters() > 1_000_000:
            return model
        _BUILT[key] = model, torch.get_rng_state()
    return copy.deepcopy(_BUILT[key][0])


def _tiny_model(case: FamilyCase) -> PreTrainedModel:
    torch.manual_seed(case.seed)
    model = AutoModelForCausalLM.from_config(tiny_config(case)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                fan_in = weight.shape[-1]
                wide = 2.0 if any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key")) else 1.0
                weight.normal_(0, wide / math.sqrt(fan_in))
            elif name.endswith("qk_norm.temp"):  # ZAYA's keys start at zero
                weight.fill_(1.0)
    return model


def llama(**changes: Any) -> PreTrainedModel:
    """A tiny Llama, the family most tests need."""
    return tiny_model(FamilyCase("llama", changes))


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A tiny Llama with the initialisation of its class and a vocabulary for bytes: for training."""
    values = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": TRAINED,
    }  # fmt: skip
    config = {**values, **changes}

    def build() -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**config))

    return copy_of(build, ("llama", repr(config)))
