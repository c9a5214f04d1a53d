"""Positions in parts (time, height, width), each turning pairs of its own; for text, all three are the same.

Qwen 3.5 interleaves them: pairs take turns, as often as `mrope_section` says. Only the first channels of each
head are rotated, and only in every fourth layer; the others have linear attention, without positions.
"""

from rope_extend.families import FamilyAdapter

ADAPTER = FamilyAdapter(
    model_types=("qwen3_5_text", "qwen3_5_moe_text"),
    rotary_paths=("rotary_emb",),
    note="the first channels of a head; positions may have three parts",
    sections=True,
)
"""The config carries `mrope_section` along, under every schedule."""
