"""A table for each kind of layer: `forward(x, position_ids, layer_type)`, `rope_parameters` nested by kind.

Layers with full attention read the whole text, and their table is extended. Layers with a sliding window
never see a distance beyond it, so their table stays as it was, bit for bit, and goes on being computed by the
family's own module.

Gemma 4 and LFM 3 rotate "proportionally" in full-attention layers: the exponents of the frequencies count
all channels of a head, but only the fastest pairs turn. For an encoding, such a head has as many channels as
turn, and the base to the power of their share; the other pairs stay at rest.
"""

from typing import Any

from rope_extend.families import FamilyAdapter

_FULL_KINDS = ("full_attention", "hybrid", "indexed_attention")


def has_full_attention(attention: Any) -> bool:
    """Whether an attention module reads the whole text."""
    return str(attention.config.layer_types[attention.layer_idx]) in _FULL_KINDS


_FULL = ("full_attention",)
_AT_REST = "its rotated channels do not lie next to each other in the head"

ADAPTERS = (
    FamilyAdapter(
        model_types=("gemma3_text", "gemma3n_text", "mellum", "modernbert-decoder", "olmo3"),
        rotary_paths=("rotary_emb",),
        note="full-attention layers only; sliding ones as they were",
        in_float32=("olmo3",),
        rotates=has_full_attention,
        layer_types=_FULL,
    ),
    FamilyAdapter(
        model_types=("gemma3",),
        rotary_paths=("language_model.rotary_emb",),
        note="full-attention layers only; sliding ones as they were",
        rotates=has_full_attention,
        config_path="text_config",
        layer_types=_FULL,
    ),
    FamilyAdapter(
        model_types=("laguna", "mimo_v2_flash"),
        rotary_paths=("rotary_emb",),
        note="full-attention layers only; the first channels of a head",
        rotates=has_full_attention,
        layer_types=_FULL,
    ),
    FamilyAdapter(
        model_types=("zaya",),
        rotary_paths=("rotary_emb",),
        note="full-attention layers only (`hybrid`); the first channels of a head",
        rotates=has_full_attention,
        layer_types=("hybrid",),
    ),
    FamilyAdapter(
        model_types=("gemma4_text", "gemma4_unified_text", "lfm3"),
        rotary_paths=("rotary_emb",),
        note="full-attention layers only, of whose pairs the fastest turn",
        in_float32=("lfm3",),
        rotates=has_full_attention,
        unreachable=_AT_REST,
        layer_types=_FULL,
    ),
    FamilyAdapter(
        model_types=("gemma4", "gemma4_unified"),
        rotary_paths=("language_model.rotary_emb",),
        note="full-attention layers only, of whose pairs the fastest turn",
        rotates=has_full_attention,
        unreachable=_AT_REST,
        config_path="text_config",
        layer_types=_FULL,
    ),
    FamilyAdapter(
        model_types=("dots3_note_text",),
        rotary_paths=("rotary_emb",),
        note="full-attention layers only, with their indexers; neighbouring channels as pairs",
        pairs="neighbours",
        rotated="last",
        rotates=has_full_attention,
        unreachable="its indexer rotates queries and keys of its own, outside of attention",
        layer_types=("indexed_attention", "full_attention"),
    ),
)
