"""THE matrix: one row per encoding, one row per family. A new row gets every check.

An oracle is computed independently of rope_extend: by stock transformers where it has the method, else by
the formula of the source, written out in plain Python floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_extend.encodings import RopeShape

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
    """One method: its parameters beside the factor, its oracle, and the smallest change it must make."""

    name: str
    oracle: Oracle
    parameters: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    reloads: bool = True
    """Whether stock transformers has a form for it."""

    def __str__(self) -> str:
        return self.label or self.name


def by_parts(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
    """Equations 11 to 13 of 2309.00071, in Python floats."""
    table = []
    for i in range(shape.dim // 2):
        plain = shape.theta ** (-2 * i / shape.dim)
        turns = shape.trained_length / (2 * math.pi / plain)
        ramp = 0.0 if turns < 1 else 1.0 if turns > 32 else (turns - 1) / 31
        table.append((1 - ramp) * plain / FACTOR + ramp * plain)
    return table, 1.0


def mixed(shape: RopeShape, seq_len: int) -> tuple[list[float], float]:
    """Su's formula in Python floats: `a (d/2)^0.75 = ln s`."""
    a = math.log(FACTOR) / (shape.dim / 2) ** 0.75
    pairs = range(shape.dim // 2)
    return [shape.theta ** (-2 * i / shape.dim) * math.exp(-a * (i + 1) ** 0.75) for i in pairs], 1.0


def needed(shape: RopeShape, seq_len: int) -> float:
    return max(1.0, seq_len / shape.trained_length)


YARN_OPTIONS = {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.3}

ENCODINGS = [
    EncodingCase("none", base(lambda shape: shape.theta)),
    EncodingCase("linear", stock("linear"), {"factor": FACTOR}),
    EncodingCase("ntk", base(lambda s: s.theta * FACTOR ** (s.dim / (s.dim - 2))), {"factor": FACTOR}),
    EncodingCase("dynamic_ntk", stock("dynamic"), {"factor": FACTOR}),
    EncodingCase("yarn", stock("yarn"), {"factor": FACTOR}),
    EncodingCase(
        "yarn",
        stock("yarn", **YARN_OPTIONS),
        {"factor": FACTOR, **YARN_OPTIONS},
        label="yarn-options",
    ),
    EncodingCase(
        "yarn",
        stock("yarn", attention_factor=1.25),
        {"factor": FACTOR, "attention_scale": 1.25},
        label="yarn-attention",
    ),
    EncodingCase("llama3", stock("llama3", low_freq_factor=1.0, high_freq_factor=4.0), {"factor": FACTOR}),
    EncodingCase("ntk_by_parts", by_parts, {"factor": FACTOR}),
    EncodingCase("ntk_mixed", mixed, {"factor": FACTOR}),
    EncodingCase(
        "dynamic_linear",
        lambda shape, n: stock("linear", factor=needed(shape, n))(shape, n),
        reloads=False,
    ),
    EncodingCase(
        "dynamic_yarn",
        lambda shape, n: stock("yarn", factor=needed(shape, n))(shape, n),
        reloads=False,
    ),
    EncodingCase("abf", base(lambda shape: 750_000.0), {"theta": 750_000.0}),
]


@dataclass(frozen=True)
class FamilyCase:
    """One family: what its tiny config needs beyond the common one."""

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.model_type


MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}

PARTIAL = {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
PLAIN = {"rope_parameters": {"rope_theta": 10_000.0}}
"""For families whose default config already carries scaling."""

ALL_FAMILIES = [
    FamilyCase("apertus", PLAIN),
    FamilyCase("arcee"),
    FamilyCase("aria_text"),
    FamilyCase("bitnet"),
    FamilyCase("cwm", PLAIN),
    FamilyCase("diffllama", {"num_key_value_heads": 2}),
    FamilyCase("ernie4_5"),
    FamilyCase("ernie4_5_moe"),
    FamilyCase("exaone4"),
    FamilyCase("exaone_moe"),
    FamilyCase("flex_olmo", {"pad_token_id": 0}),
    FamilyCase("gemma", {"head_dim": 16}),
    FamilyCase("gemma2", {"head_dim": 16, "sliding_window": 64}),
    FamilyCase("glm", {"head_dim": 16, "pad_token_id": 0}),
    FamilyCase("glm4", {"head_dim": 16, "pad_token_id": 0}),
    FamilyCase("glm4_moe"),
    FamilyCase("gpt_neox", PARTIAL),
    FamilyCase("gpt_neox_japanese"),
    FamilyCase("granite"),
    FamilyCase("granitemoe"),
    FamilyCase("granitemoeshared"),
    FamilyCase("helium", {"head_dim": 16, "pad_token_id": 0}),
    FamilyCase("hrm_text"),
    FamilyCase("hy_v3"),
    FamilyCase("hyperclovax"),
    FamilyCase("internlm3"),
    FamilyCase("iquestcoder"),
    FamilyCase("jais2"),
    FamilyCase("jetmoe"),
    FamilyCase("llama"),
    FamilyCase("minimax_m2"),
    FamilyCase("mistral", {"sliding_window": 64}),
    FamilyCase("mixtral", {"num_local_experts": 4}),
    FamilyCase("nanochat"),
    FamilyCase("olmo"),
    FamilyCase("olmo2"),
    FamilyCase("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    FamilyCase("persimmon"),
    FamilyCase("phi", PARTIAL),
    FamilyCase("phi3", {"original_max_position_embeddings": TRAINED, "pad_token_id": 0}),
    FamilyCase("qwen2"),
    FamilyCase("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 24}),
    FamilyCase("qwen3", {"head_dim": 16}),
    FamilyCase("qwen3_moe", {**MOE, "head_dim": 16}),
    FamilyCase("seed_oss", {"head_dim": 16}),
    FamilyCase("smollm3", {"pad_token_id": 0}),
    FamilyCase("solar_open"),
    FamilyCase("stablelm", PARTIAL),
    FamilyCase("starcoder2", {"sliding_window": None}),
    FamilyCase("vaultgemma", {"head_dim": 16}),
]

FAMILIES = [case for case in ALL_FAMILIES if case.model_type in CONFIG_MAPPING]
"""Those that the installed transformers knows: some are younger than the oldest that is supported."""


def tiny_config(case: FamilyCase) -> Any:
    """A configuration of the family with two layers and a window of TRAINED tokens."""
    common = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": TRAINED,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return AutoConfig.for_model(case.model_type, **{**common, **case.config})


def tiny_model(case: FamilyCase, seed: int = 0) -> PreTrainedModel:
    """A random model of the family, in evaluation mode, whose logits feel its positions.

    Weights are drawn wider than the families' own initialisation: at a standard deviation of 0.02 attention
    is so flat that a wrong position changes no logit visibly.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(case)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                fan_in = weight.shape[-1]
                wide = 2.0 if any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key")) else 1.0
                weight.normal_(0, wide / math.sqrt(fan_in))
    return model


def llama(**changes: Any) -> PreTrainedModel:
    """A tiny Llama, the family most tests need."""
    return tiny_model(FamilyCase("llama", changes))


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A tiny Llama as its class initialises it, with a vocabulary that bytes fit into: for training."""
    torch.manual_seed(0)
    values = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": TRAINED,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**values, **changes}))
