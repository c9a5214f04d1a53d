"""Positions with three parts (time, height, width), each for some of the pairs; for text all parts are equal.

Qwen 3.5 assigns pairs to the parts in turn, as many as `mrope_section` says. Only the first channels of each
head are rotated, and only in every fourth layer. The other layers have linear attention, without positions.
"""

from rope_extend.models.families import FamilyAdapter

ADAPTER = FamilyAdapter(
    model_types=("qwen3_5_text", "qwen3_5_moe_text"),
    rotary_paths=("rotary_emb",),
    note="the first channels of a head; positions may have three parts",
    sections=True,
    hides_positions=("qwen3_5_text", "qwen3_5_moe_text"),
)
"""The config keeps `mrope_section` under every schedule."""
