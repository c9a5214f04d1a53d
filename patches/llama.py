"""Llama's shape: one rotary module in the decoder, the channels of a head rotated in halves.

- Gemma 2, Mistral, Qwen 2 and Starcoder 2 have layers or options with a sliding window. The window limits the
  keys that a query sees, not their rotation, so the tables are the same. Ministral 3 also scales queries by
  their position.
- Partial rotary: only the first channels of each head rotate, a share of `partial_rotary_factor`. The
  frequencies are computed from the rotated width, which is that of the model's own table.
- Hybrids: attention in some layers, or in parallel with a recurrence, which has the order from the sequence
  itself.
- Qwen 3.5: positions with three parts (time, height, width), each for some of the pairs; for text all are
  equal. Pairs go to the parts in turn, as many as `mrope_section` says, which the config keeps under every
  schedule.
- Moshi has a module in each layer. Its config has a `sliding_window`, which transformers applies in the cache
  but not in the mask: with a cache, a model sees no further than that, patched or not.
"""

from torch import nn

from rope_extend.models.families import Family, types


def always(attention: nn.Module) -> bool:
    """NanoChat normalises queries and keys after the rotation in every layer, without weights."""
    return True


FAMILIES = (
    Family(
        types("""
            apertus apertus1p5_text arcee aria_text bitnet cwm diffllama doge dots1 exaone flex_olmo gemma
            gemma2 granite granitemoe granitemoeshared hrm_text hy_v3 hyperclovax internlm3 iquestcoder jais2
            jetmoe llama ministral ministral3 mistral mixtral olmo olmo2 olmoe qwen2 qwen2_moe qwen3 qwen3_moe
            sarvam_moe seed_oss solar_open starcoder2 vaultgemma
        """),
        "all channels of a head",
        in_float32=types("flex_olmo olmo olmo2"),
    ),
    Family(
        types("falcon gpt_neox_japanese"),
        "all channels of a head",
        unreachable="it computes attention itself, not by one of transformers' attention functions",
    ),
    Family(("nanochat",), "all channels of a head, rotated backwards", backwards=True, normalises=always),
    Family(
        types("glm4_moe gpt_neox minimax_m2 nemotron persimmon phi stablelm"),
        "the first channels of a head",
    ),
    Family(
        ("minimax_m3_vl_text",),
        "the first channels of a head",
        unreachable="its indexer rotates its own queries to choose keys, outside the attention function",
    ),
    Family(
        types("bamba falcon_h1 lfm2 minimax olmo_hybrid qwen3_next"),
        "all or the first channels of a head, in the attention layers",
        in_float32=("olmo_hybrid",),
    ),
    Family(
        types("qwen3_5_text qwen3_5_moe_text"),
        "the first channels of a head; positions may have three parts",
        sections=True,
    ),
    Family(
        ("moshi",),
        "all channels of a head, a module in each layer",
        rotary_path="layers.*.self_attn.rotary_emb",
    ),
)
