"""A table for each layer type: `forward(x, position_ids, layer_type)`, `rope_parameters` nested by type.

Layers with full attention see the whole text, and their table is extended. Layers with a sliding window never
see a longer distance. The family's own module still computes their table, bit for bit as before.

Gemma 4 and LFM 3 rotate "proportionally" in full-attention layers: the exponents of the frequencies count
all channels of a head, but only the fastest pairs rotate. An encoding sees such a head as one with fewer
channels, and with the base to the power of their share. The other pairs have frequency zero.
"""

from typing import Any

from rope_extend.models.families import FamilyAdapter

_FULL_TYPES = ("full_attention", "hybrid", "indexed_attention")


def has_full_attention(attention: Any) -> bool:
    """Whether an attention module sees the whole text."""
    return str(attention.config.layer_types[attention.layer_idx]) in _FULL_TYPES


_FULL = ("full_attention",)
_NOT_ADJACENT = "its rotated channels are not next to each other in the head"

ADAPTERS = (
    FamilyAdapter(
        model_types=("gemma3_text", "gemma3n_text", "mellum", "modernbert-decoder", "olmo3"),
        rotary_paths=("rotary_emb",),
        note="full-attention layers only; sliding ones unchanged",
        in_float32=("olmo3",),
        rotates=has_full_attention,
        layer_types=_FULL,
    ),
    FamilyAdapter(
        model_types=("gemma3",),
        rotary_paths=("language_model.rotary_emb",),
        note="full-attention layers only; sliding ones unchanged",
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
        hides_positions=("zaya",),
        note="full-attention layers only (`hybrid`); the first channels of a head",
        rotates=has_full_attention,
        layer_types=("hybrid",),
    ),
    FamilyAdapter(
        model_types=("gemma4_text", "gemma4_unified_text", "lfm3"),
        rotary_paths=("rotary_emb",),
        note="full-attention layers only, where only the fastest pairs rotate",
        in_float32=("lfm3",),
        rotates=has_full_attention,
        unreachable=_NOT_ADJACENT,
        layer_types=_FULL,
    ),
    FamilyAdapter(
        model_types=("gemma4", "gemma4_unified"),
        rotary_paths=("language_model.rotary_emb",),
        note="full-attention layers only, where only the fastest pairs rotate",
        rotates=has_full_attention,
        unreachable=_NOT_ADJACENT,
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
        unreachable="its indexer rotates its own queries and keys, outside the attention function",
        layer_types=("indexed_attention", "full_attention"),
    ),
)
