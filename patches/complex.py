"""Complex rotary: one complex number, `cos + i sin`, for each pair of neighbouring channels.

DeepSeek-V2 rotates the last channels of a head. Llama 4 leaves every fourth layer unrotated; where it
normalises queries and keys after the rotation (`use_qk_norm`), a factor on cos and sin has no effect.
"""

from typing import Any

from rope_extend.models.families import FamilyAdapter


def has_rotary(attention: Any) -> bool:
    """Whether an attention module of Llama 4 rotates."""
    return bool(attention.use_rope)


def normalises(attention: Any) -> bool:
    """Whether an attention module of Llama 4 normalises queries and keys after the rotation."""
    return hasattr(attention, "qk_norm")


ADAPTERS = (
    FamilyAdapter(
        model_types=("deepseek_v2",),
        rotary_paths=("rotary_emb",),
        note="the last channels of a head, as complex numbers",
        in_float32=("deepseek_v2",),
        layout="complex",
        pairs="neighbours",
        rotated="last",
    ),
    FamilyAdapter(
        model_types=("llama4_text",),
        rotary_paths=("model.rotary_emb",),
        note="all channels of a head, as complex numbers, in three of four layers",
        in_float32=("llama4_text",),
        hides_positions=("llama4_text",),
        layout="complex",
        pairs="neighbours",
        rotates=has_rotary,
        normalises=normalises,
        counts="its layers without rotation scale queries by the number of tokens before them",
    ),
)
