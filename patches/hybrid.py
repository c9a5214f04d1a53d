"""Hybrids: attention of Llama's shape in some layers, or in parallel with a recurrence without positions.

The recurrent and convolutional parts get the order from the sequence itself. The tables act in attention
only. Bamba and Qwen 3 Next rotate only the first channels of each head.
"""

from rope_extend.models.families import FamilyAdapter

ADAPTERS = (
    FamilyAdapter(
        model_types=("bamba", "falcon_h1", "lfm2", "minimax", "olmo_hybrid", "qwen3_next"),
        rotary_paths=("rotary_emb",),
        note="all or the first channels of a head, in the attention layers",
        in_float32=("olmo_hybrid",),
    ),
)
