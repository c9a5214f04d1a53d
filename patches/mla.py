"""Latent attention (MLA): keys and values are compressed, and a few separate channels are rotated.

At the attention function, a head has the expanded latent channels first, then the rotated ones. Those are in
halves, for any layout in the weights. In some families an indexer chooses the keys that a query sees.
"""

from rope_extend.models.families import Family, types

_NOTE = "the channels next to the latent ones"

FAMILIES = (
    Family(
        types("""
            axk1 bailing_hybrid deepseek_v3 glm4_moe_lite longcat_flash minicpm3 sarvam_mla youtu
        """),
        _NOTE,
        rotated="last",
    ),
    Family(
        types("axk2 deepseek_v32 glm_moe_dsa hy_v4"),
        f"{_NOTE}, and an indexer's",
        rotated="last",
        several_streams=("hy_v4",),
        unreachable="its indexer rotates its own queries to choose keys, outside the attention function",
    ),
)
