"""Layers without rotation: as Llama's shape, but some layers of the decoder have no position encoding.

Each family has its own way to say which; most rotate only where attention slides. The rotary module is
shared, so its tables reach exactly the layers that rotate.
"""

from typing import Any

from rope_extend.families import FamilyAdapter


def chosen(attention: Any) -> bool:
    """SmolLM 3: as `no_rope_layers` says."""
    return bool(attention.use_rope)


def slides(attention: Any) -> bool:
    """AFMoE, Flint: where the window slides."""
    return attention.sliding_window is not None


def slides_if_any(attention: Any) -> bool:
    """EXAONE 4: where the window slides; everywhere in a model in which it slides nowhere."""
    return attention.sliding_window is None or bool(attention.is_sliding)


def has_base(attention: Any) -> bool:
    """Granite with sinks: where the list of bases by layer has one."""
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
        # One module per base; `rotary_emb` is there too, and unused. Models with two bases are refused.
        model_types=("granite_swa", "granitemoe_swa"),
        rotary_paths=("rotary_embs.0",),
        note=_NOTE,
        rotates=has_base,
    ),
)
