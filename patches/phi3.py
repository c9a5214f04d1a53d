"""Phi-3: Llama's shape, but its config classes load only two types of rotary parameters.

Every other schedule is saved as `longrope`, which expresses any static table. Phi-4-mini uses the class of
Phi-3 and rotates three quarters of each head. Phi-4 multimodal is the same with encoders of images and sound.
Phi-3.5-MoE has separate factors on cos and sin for short and long texts.
"""

from typing import Any

from torch import nn

from rope_extend.models.families import Family


def of_text(attention: nn.Module) -> bool:
    """Phi-4 multimodal rotates only in the text decoder, not in the encoders of images and sound."""
    return type(attention).__name__ == "Phi4MultimodalAttention"


def with_mscale(parameters: dict[str, Any]) -> dict[str, Any] | None:
    """Phi-3.5-MoE: the attention factor under the names that its config class requires.

    It uses the short list of `longrope` at any length, so a form with different lists is not possible.
    """
    if parameters["rope_type"] == "default":
        return parameters
    if parameters["short_factor"] != parameters["long_factor"]:
        return None
    factor = parameters["attention_factor"]
    return parameters | {"short_mscale": factor, "long_mscale": factor}


_NOTE = "all or the first channels of a head"
_ROPE_TYPES = ("default", "longrope")

FAMILIES = (
    Family(("phi3",), _NOTE, stock_rope_types=_ROPE_TYPES),
    Family(("phi4_multimodal",), _NOTE, stock_rope_types=_ROPE_TYPES, rotates=of_text),
    Family(("phimoe",), "all channels of a head", stock_rope_types=_ROPE_TYPES, completes=with_mscale),
)
