"""Interleaved rotary: Llama's shape, but a pair is two neighbouring channels, not one of each half.

The choice of channels does not change a pair's frequency, so the tables are the same. ERNIE, GLM and Helium
take cos and sin in halves and spread them over neighbours themselves; Cohere's rotary module returns them
spread. GLM rotates only the first half of each head. From Command R7B on, Cohere rotates only in layers with
a sliding window.
"""

from torch import nn

from rope_extend.models.families import FamilyAdapter


def slides(attention: nn.Module) -> bool:
    """Cohere 2 rotates in layers with a sliding window."""
    return attention.sliding_window is not None


def slides_or_dense(attention: nn.Module) -> bool:
    """Cohere 2 MoE also rotates in the dense layers at the beginning."""
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
        layout="neighbours",
        pairs="neighbours",
    ),
    FamilyAdapter(
        model_types=("cohere2",),
        rotary_paths=_PATHS,
        note=_NOTE_SOME,
        layout="neighbours",
        pairs="neighbours",
        rotates=slides,
    ),
    FamilyAdapter(
        model_types=("cohere2_moe",),
        rotary_paths=_PATHS,
        note=_NOTE_SOME,
        layout="neighbours",
        pairs="neighbours",
        rotates=slides_or_dense,
    ),
)
