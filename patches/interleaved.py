"""Interleaved rotary: as Llama's shape, but a pair is two neighbouring channels, not one of each half.

The rotary module is the same, cos and sin for each pair laid out twice; the family's attention spreads them
over neighbours. Which channels make a pair does not change how fast it turns, so neither do the tables. GLM
rotates only the first half of each head.
"""

from rope_extend.families import FamilyAdapter

ADAPTER = FamilyAdapter(
    model_types=("ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"),
    rotary_paths=("rotary_emb",),
    note="neighbouring channels as pairs",
    pairs="neighbours",
)
