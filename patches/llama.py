"""Llama's shape: one rotary module in the decoder, every channel of a head rotated in halves.

Gemma 2, Mistral, Qwen 2 and Starcoder 2 have layers or options with a sliding window. The window limits
which keys a query sees, not how they are rotated, so the same tables serve them.
"""

from rope_extend.families import FamilyAdapter

ADAPTER = FamilyAdapter(
    model_types=(
        "arcee",
        "gemma",
        "gemma2",
        "granite",
        "llama",
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
        "smollm3",
        "starcoder2",
    ),
    rotary_paths=("rotary_emb",),
    note="all channels of a head",
)
