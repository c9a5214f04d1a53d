"""Llama's shape: one rotary module in the decoder, every channel of a head rotated in halves.

Gemma 2, Mistral, Qwen 2 and Starcoder 2 have layers or options with a sliding window. The window limits
which keys a query sees, not how they are rotated, so the same tables serve them.
"""

from rope_extend.families import FamilyAdapter

ADAPTER = FamilyAdapter(
    model_types=(
        "apertus",
        "arcee",
        "aria_text",
        "bitnet",
        "cwm",
        "diffllama",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gpt_neox_japanese",
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
        "minimax_m2",
        "mistral",
        "mixtral",
        "nanochat",
        "olmo",
        "olmo2",
        "olmoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
        "vaultgemma",
    ),
    rotary_paths=("rotary_emb",),
    note="all channels of a head",
)
