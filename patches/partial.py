"""Partial rotary: as Llama's shape, but only the first channels of each head are rotated.

The share is `partial_rotary_factor`; the frequencies follow from the rotated width, which is read off the
model's own table.
"""

from rope_extend.families import FamilyAdapter

_NOTE = "the first channels of a head"

ADAPTERS = (
    FamilyAdapter(
        model_types=("glm4_moe", "gpt_neox", "minimax_m2", "persimmon", "phi", "stablelm"),
        rotary_paths=("rotary_emb",),
        note=_NOTE,
    ),
    FamilyAdapter(
        model_types=("minimax_m3_vl_text",),
        rotary_paths=("rotary_emb",),
        note=_NOTE,
        unreachable="its indexer chooses keys by rotated queries of its own, outside the attention function",
    ),
)
