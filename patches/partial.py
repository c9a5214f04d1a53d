"""Partial rotary: as Llama's shape, but only the first channels of each head are rotated.

The share is `partial_rotary_factor`; the frequencies follow from the rotated width, which is read off the
model's own table.
"""

from rope_extend.families import FamilyAdapter

ADAPTER = FamilyAdapter(
    model_types=("glm4_moe", "gpt_neox", "persimmon", "phi", "stablelm"),
    rotary_paths=("rotary_emb",),
    note="the first channels of a head",
)
