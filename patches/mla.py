"""Latent attention (MLA): keys and values are kept compressed, and a few channels beside them are rotated.

Queries and keys reach the attention function as the compressed channels, expanded, then the rotated ones,
in halves whatever their layout in the weights. Some families choose by an indexer which keys a query sees.
"""

from rope_extend.families import FamilyAdapter

_PATHS = ("rotary_emb",)
_NOTE = "the channels beside the latent ones"

ADAPTERS = (
    FamilyAdapter(
        model_types=(
            "axk1",
            "bailing_hybrid",
            "deepseek_v3",
            "glm4_moe_lite",
            "longcat_flash",
            "minicpm3",
            "youtu",
        ),
        rotary_paths=_PATHS,
        note=_NOTE,
        rotated="last",
    ),
    FamilyAdapter(
        model_types=("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"),
        rotary_paths=_PATHS,
        note=f"{_NOTE}, and an indexer's",
        rotated="last",
        unreachable="its indexer chooses keys by rotated queries of its own, outside the attention function",
    ),
)
