"""Decoders whose layers differ: some do not rotate, or each layer type has its own table.

Each family marks the layers without rotation in its own way; most rotate only in layers with a sliding
window. The layers share the rotary module, so its tables reach exactly the layers that rotate.

With a table for each type (`forward(x, position_ids, layer_type)`, `rope_parameters` nested by type), that of
layers with full attention is extended. Layers with a sliding window never see a longer distance, and the
family's own module still computes their table, bit for bit as before.

Gemma 4 and LFM 3 rotate "proportionally" in full-attention layers: the exponents of the frequencies count all
channels of a head, but only the fastest pairs rotate. An encoding sees such a head as one with fewer
channels, and with the base to the power of their share. The other pairs have frequency zero.
"""

from typing import Any

from rope_extend.models.families import FamilyAdapter

_FULL = ("full_attention",)
_FULL_TYPES = (*_FULL, "hybrid", "indexed_attention")
_NOT_ADJACENT = "its rotated channels are not next to each other in the head"


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


def has_full_attention(attention: Any) -> bool:
    """Whether an attention module sees the whole text."""
    return str(attention.config.layer_types[attention.layer_idx]) in _FULL_TYPES


ADAPTERS = (
    FamilyAdapter(
        model_types=("smollm3",), note="all channels of a head, in some of the layers", rotates=chosen
    ),
    FamilyAdapter(
        model_types=("afmoe", "flint"), note="all channels of a head, in some of the layers", rotates=slides
    ),
    FamilyAdapter(
        model_types=("exaone4", "exaone_moe", "kolibri1"),
        note="all channels of a head, in some of the layers",
        rotates=slides_if_any,
    ),
    FamilyAdapter(
        # One module per base; `rotary_emb` exists too, but is unused. Models with two bases are refused.
        model_types=("granite_swa", "granitemoe_swa"),
        rotary_paths=("rotary_embs.0",),
        note="all channels of a head, in some of the layers",
        rotates=has_base,
        layer_bases="layer_rope_theta",
    ),
    FamilyAdapter(
        model_types=("gemma3_text", "gemma3n_text", "mellum", "modernbert-decoder", "olmo3"),
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
        note="full-attention layers only; the first channels of a head",
        rotates=has_full_attention,
        layer_types=_FULL,
    ),
    FamilyAdapter(
        model_types=("zaya",),
        hides_positions=("zaya",),
        note="full-attention layers only (`hybrid`); the first channels of a head",
        rotates=has_full_attention,
        layer_types=("hybrid",),
    ),
    FamilyAdapter(
        model_types=("gemma4_text", "gemma4_unified_text", "lfm3"),
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
        note="full-attention layers only, with their indexers; neighbouring channels as pairs",
        pairs="neighbours",
        rotated="last",
        rotates=has_full_attention,
        unreachable="its indexer rotates its own queries and keys, outside the attention function",
        layer_types=("indexed_attention", "full_attention"),
    ),
)
