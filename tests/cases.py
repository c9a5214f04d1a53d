"""The matrix of methods and families, and tiny models of each family.

The rows are in `rotary_cases.py`, `alternative_cases.py` and `family_cases.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from alternative_cases import ALTERNATIVES, AlternativeCase
from family_cases import ALL_FAMILIES, COMMON, FAMILIES, GEMMA3N, KINDS, PARTIAL, PLAIN, SECTIONS, FamilyCase
from rotary_cases import (
    ENCODINGS,
    FACTOR,
    FLOAT32,
    LINEAR,
    REMAPS,
    TARGET,
    TRAINED,
    YARN,
    EncodingCase,
    divisors,
    plain,
    scaling,
    stock,
)  # fmt: skip
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

__all__ = [
    "ALL_FAMILIES", "ALTERNATIVES", "COMMON", "ENCODINGS", "FACTOR", "FAMILIES", "FLOAT32", "GEMMA3N",
    "KINDS", "LINEAR", "PARTIAL", "PLAIN", "REMAPS", "SECTIONS", "TARGET", "TRAINED", "YARN",
    "AlternativeCase", "EncodingCase", "FamilyCase", "divisors", "plain", "scaling", "stock",
]  # fmt: skip


EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def family(model_type: str) -> FamilyCase:
    """The first case of a family."""
    return next(case for case in FAMILIES if case.model_type == model_type)


def tiny_config(case: FamilyCase) -> Any:
    """A configuration of the family with two layers and a window of TRAINED tokens.

    Each token goes through all experts. A choice of some is not continuous: where two experts tie but for
    rounding, another order of summation takes the other one.
    """
    config = AutoConfig.for_model(case.model_type, **{**COMMON, **case.config})
    experts = next((getattr(config, name) for name in EXPERTS if hasattr(config, name)), 0)
    if case.model_type in ("doge", "jetmoe", "zaya"):  # product keys; also the heads; one alone
        return config
    for name in EXPERTS_PER_TOKEN:
        if hasattr(config, name):
            setattr(config, name, experts + getattr(config, "zero_expert_num", 0))
    return config


def tiny_model(case: FamilyCase | str) -> PreTrainedModel:
    """A random model of a family, or of its first case, in evaluation mode. Its logits depend on positions.

    Weights are larger than the families' own initialisation. With a standard deviation of 0.02 attention is
    so flat that a wrong position hardly changes a logit.
    """
    one = family(case) if isinstance(case, str) else case
    return copy_of(lambda: _tiny_model(one), ("family", one.model_type, repr(one.config), one.seed))


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
