"""Interleaved rotary: as Llama's shape, but a pair is two neighbouring channels, not one of each half.

Which channels make a pair does not change how fast it turns, so neither do the tables. ERNIE, GLM and
Helium take cos and sin laid out in halves and spread them over neighbours themselves; Cohere's rotary
module gives them spread. GLM rotates only the first half of each head. From Command R7B on, Cohere rotates
only where attention slides.
"""

from torch import nn

from rope_extend.families import FamilyAdapter


def slides(attention: nn.Module) -> bool:
    """Cohere 2: where the window slides."""
    return attention.sliding_window is not None


def slides_or_dense(attention: nn.Module) -> bool:
    """Its mixture of experts: and in the dense layers at the beginning."""
    return attention.sliding_window is not None or bool(attention.force_rope)


_PATHS = ("rotary_emb",)
_NOTE = "neighbouring channels as pairs"
_NOTE_SOME = f"{_NOTE}, in some of the layers"

ADAPTERS = (
    FamilyAdapter(
        model_types=("ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"),
        rotary_paths=_PATHS,
        note=_NOTE,
        in_float32=("ernie4_5", "ernie4_5_moe"),
        pairs="neighbours",
    ),
    FamilyAdapter(
        model_types=("cohere",),
        rotary_paths=_PATHS,
        note=_NOTE,
        widened="neighbours",
        pairs="neighbours",
    ),
    FamilyAdapter(
        model_types=("cohere2",),
        rotary_paths=_PATHS,
        note=_NOTE_SOME,
        widened="neighbours",
        pairs="neighbours",
        rotates=slides,
    ),
    FamilyAdapter(
        model_types=("cohere2_moe",),
        rotary_paths=_PATHS,
        note=_NOTE_SOME,
        widened="neighbours",
        pairs="neighbours",
        rotates=slides_or_dense,
    ),
)
