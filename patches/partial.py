"""Partial rotary: Llama's shape, but only the first channels of each head are rotated.

Their share is `partial_rotary_factor`. The frequencies are computed from the rotated width, which is that of
the model's own table.
"""

from rope_extend.models.families import FamilyAdapter

_NOTE = "the first channels of a head"

ADAPTERS = (
    FamilyAdapter(
        model_types=("glm4_moe", "gpt_neox", "minimax_m2", "persimmon", "phi", "stablelm"),
        rotary_paths=("rotary_emb",),
        hides_positions=("persimmon",),
        note=_NOTE,
    ),
    FamilyAdapter(
        model_types=("minimax_m3_vl_text",),
        rotary_paths=("rotary_emb",),
        note=_NOTE,
        unreachable="its indexer rotates its own queries to choose keys, outside the attention function",
    ),
)
