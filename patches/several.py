"""Several rotary modules: one in each layer, or one in each part of the model.

BLT reads bytes in local layers with a sliding window, and patches of bytes in a global transformer with full
attention. What limits how far it reads is the latter, so its table alone is extended: `trained_length` and
`target_length` count patches, `config.global_config` describes them, and the local tables stay as they were.

Moshi has a module in each layer. Its config has a `sliding_window`, which transformers' cache keeps to and
its mask does not: with a cache, a model reads no further than that, patched or not.
"""

from rope_extend.families import FamilyAdapter

ADAPTERS = (
    FamilyAdapter(
        model_types=("blt",),
        rotary_paths=("global_transformer.rotary_emb",),
        note="the global transformer only; lengths count patches of bytes",
        widened="neighbours",
        pairs="neighbours",
        unreachable="its global transformer reads patches, whose positions are not those of its cache",
        config_path="global_config",
    ),
    FamilyAdapter(
        model_types=("moshi",),
        rotary_paths=("layers.*.self_attn.rotary_emb",),
        note="all channels of a head, a module in each layer",
    ),
)
