"""Layers without rotation: Llama's shape, but some layers of the decoder have no position encoding.

Each family marks these layers in its own way; most rotate only in layers with a sliding window. The layers
share the rotary module, so its tables reach exactly the layers that rotate.
"""

from typing import Any

from rope_extend.models.families import FamilyAdapter


def chosen(attention: Any) -> bool:
    """SmolLM 3 rotates in the layers that `no_rope_layers` marks with 1."""
    return bool(attention.use_rope)


def slides(attention: Any) -> bool:
    """AFMoE and Flint rotate in layers with a sliding window."""
    return attention.sliding_window is not None


def slides_if_any(attention: Any) -> bool:
    """EXAONE 4 rotates in layers with a sliding window; in a model without such layers, in all."""
    return attention.sliding_window is None or bool(attention.is_sliding)


def has_base(attention: Any) -> bool:
    """Granite with sinks rotates in layers that have a base in `layer_rope_theta`."""
    return bool(attention.config.layer_rope_theta[attention.layer_idx])


_PATHS = ("rotary_emb",)
_NOTE = "all channels of a head, in some of the layers"

ADAPTERS = (
    FamilyAdapter(model_types=("smollm3",), rotary_paths=_PATHS, note=_NOTE, rotates=chosen),
    FamilyAdapter(model_types=("afmoe", "flint"), rotary_paths=_PATHS, note=_NOTE, rotates=slides),
    FamilyAdapter(
        model_types=("exaone4", "exaone_moe", "kolibri1"),
        rotary_paths=_PATHS,
        note=_NOTE,
        rotates=slides_if_any,
    ),
    FamilyAdapter(
        # One module per base; `rotary_emb` exists too, but is unused. Models with two bases are refused.
        model_types=("granite_swa", "granitemoe_swa"),
        rotary_paths=("rotary_embs.0",),
        note=_NOTE,
        rotates=has_base,
        layer_bases="layer_rope_theta",
    ),
)
