"""Phi-3: Llama's shape, but its config class loads only two kinds of rotary parameters.

Every other schedule travels as `longrope`, which carries any static table. Phi-4-mini shares the class
and rotates three quarters of each head.
"""

from rope_extend.families import FamilyAdapter

ADAPTER = FamilyAdapter(
    model_types=("phi3",),
    rotary_paths=("rotary_emb",),
    note="all or the first channels of a head",
    stock_rope_types=("default", "longrope"),
)
