"""Other layouts of pairs: two neighbouring channels, complex numbers, or one value for each pair.

- The choice of channels does not change a pair's frequency, so the tables are the same. ERNIE, GLM and Helium
  take cos and sin in halves and spread them over neighbours themselves; Cohere's rotary module returns them
  spread. GLM rotates only the first half of each head. From Command R7B on, Cohere rotates only in layers
  with a sliding window.
- Complex: one number, `cos + i sin`, for each pair. DeepSeek-V2 rotates the last channels of a head. Llama 4
  leaves every fourth layer unrotated; where it normalises queries and keys after the rotation
  (`use_qk_norm`), a factor on cos and sin has no effect.
- BLT has local layers over bytes with a sliding window, and a global transformer over patches of bytes. Only
  the table of the latter is extended: `trained_length` and `target_length` count patches, and
  `config.global_config` has them.
"""

from typing import Any

from rope_extend.models.families import Family, has_rotary, slides, types


def normalises(attention: Any) -> bool:
    """Whether an attention module of Llama 4 normalises queries and keys after the rotation."""
    return hasattr(attention, "qk_norm")


FAMILIES = (
    Family(
        types("ernie4_5 ernie4_5_moe glm glm4 helium"),
        "neighbouring channels as pairs",
        in_float32=types("ernie4_5 ernie4_5_moe"),
        pairs="neighbours",
    ),
    Family(("cohere",), "neighbouring channels as pairs", layout="neighbours", pairs="neighbours"),
    Family(
        types("cohere2 cohere2_moe"),
        "neighbouring channels as pairs, in some of the layers",
        layout="neighbours",
        pairs="neighbours",
        rotates=slides,
    ),
    Family(
        ("deepseek_v2",),
        "the last channels of a head, as complex numbers",
        in_float32=("deepseek_v2",),
        layout="complex",
        pairs="neighbours",
        rotated="last",
    ),
    Family(
        ("llama4_text",),
        "all channels of a head, as complex numbers, in three of four layers",
        rotary_path="model.rotary_emb",
        in_float32=("llama4_text",),
        layout="complex",
        pairs="neighbours",
        rotates=has_rotary,
        normalises=normalises,
        counts="its layers without rotation scale queries by the number of tokens before them",
    ),
    Family(("gpt_oss",), "all channels of a head, one value for each pair", layout="once"),
    Family(
        ("blt",),
        "the global transformer only; lengths count patches of bytes",
        rotary_path="global_transformer.rotary_emb",
        layout="neighbours",
        pairs="neighbours",
        unreachable="its global transformer sees patches, whose positions differ from those of its cache",
        counts="its global transformer counts patches of bytes",
        config_path="global_config",
    ),
)
