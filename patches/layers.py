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

from rope_extend.models.families import Family, has_rotary, slides, types

_FULL = ("full_attention",)
_NOT_ADJACENT = "its rotated channels are not next to each other in the head"


def slides_if_any(attention: Any) -> bool:
    """EXAONE 4 rotates in layers with a sliding window; in a model without such layers, in all."""
    return attention.sliding_window is None or bool(attention.is_sliding)


def has_base(attention: Any) -> bool:
    """Granite with sinks rotates in layers that have a base in `layer_rope_theta`."""
    return bool(attention.config.layer_rope_theta[attention.layer_idx])


FAMILIES = (
    Family(("smollm3",), "all channels of a head, in some of the layers", rotates=has_rotary),
    Family(types("afmoe flint"), "all channels of a head, in some of the layers", rotates=slides),
    Family(
        types("exaone4 exaone_moe kolibri1"),
        "all channels of a head, in some of the layers",
        rotates=slides_if_any,
    ),
    # One module per base; `rotary_emb` exists too, but is unused. Models with two bases are refused.
    Family(
        types("granite_swa granitemoe_swa"),
        "all channels of a head, in some of the layers",
        rotary_path="rotary_embs.0",
        rotates=has_base,
        layer_bases="layer_rope_theta",
    ),
    Family(
        types("gemma3_text gemma3n_text mellum modernbert-decoder olmo3"),
        "full-attention layers only; sliding ones unchanged",
        in_float32=("olmo3",),
        several_streams=("gemma3n_text",),
        layer_types=_FULL,
    ),
    Family(
        ("gemma3",),
        "full-attention layers only; sliding ones unchanged",
        rotary_path="language_model.rotary_emb",
        config_path="text_config",
        layer_types=_FULL,
    ),
    Family(
        types("laguna mimo_v2_flash"),
        "full-attention layers only; the first channels of a head",
        layer_types=_FULL,
    ),
    Family(
        ("zaya",),
        "full-attention layers only (`hybrid`); the first channels of a head",
        layer_types=("hybrid",),
    ),
    Family(
        types("gemma4_text gemma4_unified_text lfm3"),
        "full-attention layers only, where only the fastest pairs rotate",
        in_float32=("lfm3",),
        unreachable=_NOT_ADJACENT,
        layer_types=_FULL,
    ),
    Family(
        types("gemma4 gemma4_unified"),
        "full-attention layers only, where only the fastest pairs rotate",
        rotary_path="language_model.rotary_emb",
        unreachable=_NOT_ADJACENT,
        config_path="text_config",
        layer_types=_FULL,
    ),
    Family(
        ("dots3_note_text",),
        "full-attention layers only, with their indexers; neighbouring channels as pairs",
        pairs="neighbours",
        rotated="last",
        unreachable="its indexer rotates its own queries and keys, outside the attention function",
        layer_types=("indexed_attention", "full_attention"),
    ),
)
