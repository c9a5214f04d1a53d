"""Several rotary modules: one in each layer, or one in each part of the model.

BLT has local layers over bytes with a sliding window, and a global transformer over patches of bytes with
full attention. The global transformer limits the window, so only its table is extended. `trained_length` and
`target_length` count patches, `config.global_config` describes them, and the local tables stay unchanged.

Moshi has a module in each layer. Its config has a `sliding_window`, which transformers applies in the cache
but not in the mask: with a cache, a model sees no further than that, patched or not.
"""

from rope_extend.models.families import FamilyAdapter

ADAPTERS = (
    FamilyAdapter(
        model_types=("blt",),
        rotary_paths=("global_transformer.rotary_emb",),
        note="the global transformer only; lengths count patches of bytes",
        layout="neighbours",
        pairs="neighbours",
        unreachable="its global transformer sees patches, whose positions differ from those of its cache",
        counts="its global transformer counts patches of bytes",
        config_path="global_config",
    ),
    FamilyAdapter(
        model_types=("moshi",),
        rotary_paths=("layers.*.self_attn.rotary_emb",),
        hides_positions=("moshi",),
        note="all channels of a head, a module in each layer",
    ),
)
