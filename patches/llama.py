"""Llama's shape: one rotary module in the decoder, every channel of a head rotated in halves.

Gemma 2, Mistral, Qwen 2 and Starcoder 2 have layers or options with a sliding window. The window limits the
keys that a query sees, not their rotation, so the tables are the same. Ministral 3 also scales queries by
their position, which does not change their rotation.
"""

from torch import nn

from rope_extend.models.families import FamilyAdapter


def always(attention: nn.Module) -> bool:
    """NanoChat normalises queries and keys after the rotation in every layer, without weights."""
    return True


_NOTE = "all channels of a head"

ADAPTERS = (
    FamilyAdapter(
        model_types=(
            "apertus",
            "arcee",
            "aria_text",
            "bitnet",
            "cwm",
            "diffllama",
            "doge",
            "flex_olmo",
            "gemma",
            "gemma2",
            "granite",
            "granitemoe",
            "granitemoeshared",
            "hrm_text",
            "hy_v3",
            "hyperclovax",
            "internlm3",
            "iquestcoder",
            "jais2",
            "jetmoe",
            "llama",
            "ministral3",
            "mistral",
            "mixtral",
            "olmo",
            "olmo2",
            "olmoe",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "seed_oss",
            "solar_open",
            "starcoder2",
            "vaultgemma",
        ),
        rotary_paths=("rotary_emb",),
        note=_NOTE,
        in_float32=("flex_olmo", "olmo", "olmo2"),
    ),
    FamilyAdapter(
        model_types=("falcon", "gpt_neox_japanese"),
        rotary_paths=("rotary_emb",),
        note=_NOTE,
        unreachable="it computes attention itself, not by one of transformers' attention functions",
    ),
    FamilyAdapter(
        model_types=("nanochat",),
        rotary_paths=("rotary_emb",),
        note=f"{_NOTE}, rotated backwards",
        backwards=True,
        normalises=always,
    ),
)
