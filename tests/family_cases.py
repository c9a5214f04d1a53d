"""The families: one row each, with what its tiny config needs. A new row gets every check."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from packaging.version import Version
from rotary_cases import ENCODINGS, TARGET, TRAINED
from transformers import CONFIG_MAPPING


@dataclass(frozen=True)
class FamilyCase:
    """One family: what its tiny config needs in addition to COMMON."""

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    counts_cached: bool = True
    """Whether a stock forward without positions counts from the length of the cache."""
    auto_reloads: bool = True
    """Whether `AutoModelForCausalLM` loads a saved stock model."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Checks that the unpatched model fails too, `cache` or `padding`, each with the reason."""
    reloads: Collection[str] | None = None
    """The rows of ENCODINGS that stock transformers supports in this family; None for the usual ones."""
    seed: int = 0
    """Of its random weights. Some seeds give weights that magnify float32's rounding."""

    def __str__(self) -> str:
        return self.model_type


COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": TRAINED,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Two layers and a window of TRAINED tokens."""


def config(*shared: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """The values of shared configs, in order, and further ones."""
    return {key: value for each in (*shared, values) for key, value in each.items()}


def families(names: str, *shared: Mapping[str, Any], **values: Any) -> list[FamilyCase]:
    """Families with one config: shared configs, further values of it, and fields of `FamilyCase`."""
    own = {name: values.pop(name) for name in FamilyCase.__dataclass_fields__ if name in values}
    return [FamilyCase(name, config(*shared, **values), **own) for name in names.split()]


MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}

PARTIAL = {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
PLAIN = {"rope_parameters": {"rope_theta": 10_000.0}}
"""For families whose default config already carries scaling."""

LATENT = {
    **MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
INDEXED = {**LATENT, "index_topk": 512, "index_head_dim": 16, "index_n_heads": 2}
SHARED = {**MOE, "shared_expert_intermediate_size": 24}
SENSE = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 16,
}  # fmt: skip
"""For the vision and audio parts of multimodal models, which the tests do not use."""
SLIDING_AND_FULL = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}
"""For families that rotate only in layers with a sliding window: one layer of each kind."""
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8}

KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}


def tables(kind: str = "full_attention", **parameters: Any) -> Mapping[str, Any]:
    """Rotary parameters for two kinds of layer, each with a base of its own."""
    other = {"full_attention": "sliding_attention", "indexed_attention": "sliding_attention"}.get(
        kind, f"{kind}_sliding"
    )
    return {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0, **parameters},
            other: {"rope_type": "default", "rope_theta": 1_000.0, **parameters},
        }
    }


GEMMA = {**KINDS, "head_dim": 16, "pad_token_id": 0}
GEMMA3 = {**GEMMA, **tables(), "query_pre_attn_scalar": 16}
GEMMA3N = {
    **GEMMA3, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0,
    "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": None,
}  # fmt: skip
GEMMA4 = {**GEMMA, "global_head_dim": 32, "num_kv_shared_layers": 0}
"""Heads of other widths where attention is full; a quarter of their channels is rotated."""
GEMMA4_TEXT = {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
SIGHT = {"num_key_value_heads": 2, "head_dim": 8, "image_size": 16, "patch_size": 8}
ONE_BASE = ("none", "linear", "ntk", "abf")
"""The methods that `proportional` can express. transformers raises on `longrope` if the layers differ in the
width or number of their heads."""
NO_LISTS = (*ONE_BASE, "yarn", "yarn-options", "yarn-attention", "llama3")
"""All but `longrope`."""

LOCAL = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
BLT = {
    "patch_in_forward": False, "local_attention_window_len": 16, "cross_attn_k": 1,
    "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3],
    "encoder_config": {**LOCAL, "hidden_size_global": 32, "num_hidden_layers": 1, "cross_attn_k": 1,
                       "cross_attn_all_layers": False},
    "decoder_config": {**LOCAL, "hidden_size_global": 32, "num_hidden_layers": 2, "cross_attn_k": 1},
    "global_config": {**LOCAL, **PLAIN, "num_hidden_layers": 2, "max_position_embeddings": TRAINED},
    "patcher_config": {**LOCAL, "num_hidden_layers": 1},
}  # fmt: skip
DOTS3 = {
    **INDEXED, **tables("indexed_attention"), "sliding_window": 16,
    "layer_types": ["sliding_attention", "indexed_attention"],
    "head_dim": 16, "qk_rope_head_dim": 8, "pad_token_id": 0,
    "shared_experts_intermediate_size": 24, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 16,
}  # fmt: skip
LINEAR_HEADS = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
SECTIONS = {
    **LINEAR_HEADS, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
                        "mrope_section": [3, 3, 2], "mrope_interleaved": True},
}  # fmt: skip
_AHEAD = "under sdpa it inverts its mask, and attends to later tokens"
DOGE = {} if Version(transformers.__version__) >= Version("5.23") else {"cache": _AHEAD, "padding": _AHEAD}
"""Limits of Doge in transformers 5.17."""

SOFT = {"attention_multiplier": 0.25}
"""Granite's default is 1, which makes attention so sharp that it magnifies float32's rounding."""

ALL_FAMILIES = sorted(
    [
        *families("afmoe", MOE, SLIDING_AND_FULL, head_dim=16, num_shared_experts=1),
        *families("apertus apertus1p5_text cwm", PLAIN),
        *families("arcee aria_text ernie4_5 exaone falcon gpt_neox_japanese hyperclovax internlm3 "
            "iquestcoder jais2 llama nanochat olmo olmo2 persimmon qwen2"),
        *families("axk1 deepseek_v3 glm4_moe_lite minicpm3 sarvam_mla youtu", LATENT),
        *families("axk2 deepseek_v32 glm_moe_dsa", INDEXED),
        *families("bailing_hybrid", PLAIN, LATENT, layer_types=["linear_attention", "full_attention"],
            pad_token_id=0),
        *families("bamba", MAMBA, attn_layer_indices=[1], counts_cached=False),
        *families("bitnet", seed=1),
        *families("blt", BLT, limits=config(cache="its global transformer has no cache",
            padding="its global transformer takes no attention mask")),
        *families("cohere", PLAIN, logit_scale=1.0),
        *families("cohere2", SLIDING_AND_FULL, logit_scale=1.0),
        *families("cohere2_moe", MOE, SLIDING_AND_FULL, head_dim=16, logit_scale=1.0),
        *families("deepseek_v2", LATENT, head_dim=16, first_k_dense_replace=1),
        *families("diffllama", num_key_value_heads=2),
        *families("doge", limits=DOGE),
        *families("dots3_note_text", DOTS3, reloads=NO_LISTS),
        *families("dots1", MOE, n_routed_experts=4, n_shared_experts=1, head_dim=16),
        *families("ernie4_5_moe", moe_intermediate_size=24, moe_num_experts=4, moe_k=2),
        *families("exaone4", SLIDING_AND_FULL),
        *families("exaone_moe", MOE, SLIDING_AND_FULL),
        *families("falcon_h1", MAMBA, mamba_d_ssm=32),
        *families("flex_olmo olmo_hybrid", pad_token_id=0),
        *families("flint kolibri1", SHARED, SLIDING_AND_FULL, head_dim=16),
        *families("fuyu", text_config=config(COMMON, PARTIAL, model_type="persimmon")),
        *families("gemma hrm_text qwen3 seed_oss vaultgemma", head_dim=16),
        *families("gemma2", head_dim=16, sliding_window=64),
        *families("gemma3", text_config=config(COMMON, GEMMA3), vision_config=config(SENSE, SIGHT),
            mm_tokens_per_image=4),
        *families("gemma3_text", GEMMA3),
        *families("gemma3n_text", GEMMA3N),
        *families("gemma4", text_config=config(COMMON, GEMMA4_TEXT), vision_config=config(SENSE, SIGHT,
            position_embedding_size=16), audio_config=None, reloads=ONE_BASE),
        *families("gemma4_text", GEMMA4_TEXT, reloads=ONE_BASE),
        *families("gemma4_unified", text_config=config(COMMON, GEMMA4),
            vision_config=config(mm_embed_dim=16, output_proj_dims=16, mm_posemb_size=16),
            audio_config=None, reloads=ONE_BASE),
        *families("gemma4_unified_text", GEMMA4, reloads=ONE_BASE),
        *families("glm glm4 helium", head_dim=16, pad_token_id=0),
        *families("glm4_moe", MOE, n_routed_experts=4),
        *families("got_ocr2", text_config=config(COMMON, model_type="qwen2"), vision_config=config(SENSE,
            mlp_dim=16, output_channels=8, window_size=2, global_attn_indexes=[0])),
        *families("gpt_neox nemotron phi stablelm", PARTIAL),
        *families("gpt_oss", KINDS, PLAIN, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        *families("granite granitemoe granitemoeshared", SOFT),
        *families("granite_swa", SOFT, sliding_window=512, layer_rope_theta=[0, 10_000.0]),
        *families("granitemoe_swa", SOFT, num_local_experts=4, sliding_window=512,
            layer_rope_theta=[0, 10_000.0]),
        *families("hy_v3 qwen3_moe", MOE, head_dim=16),
        *families("hy_v4", INDEXED, pad_token_id=0),
        *families("jetmoe", kv_channels=16),
        *families("laguna", KINDS, tables(partial_rotary_factor=0.5), MOE, head_dim=16,
            shared_expert_intermediate_size=24),
        *families("lfm2", PLAIN, num_hidden_layers=3, layer_types=["conv", *["full_attention"] * 2]),
        *families("lfm3", head_dim=16, num_hidden_layers=3, sliding_window=16, pad_token_id=0,
            layer_types=["conv", "sliding_attention", "full_attention"]),
        *families("llama4_text", PLAIN, head_dim=16, num_local_experts=4, num_experts_per_tok=1,
            intermediate_size_mlp=48, num_hidden_layers=4, attention_chunk_size=TARGET),
        *families("longcat_flash", PLAIN, LATENT, head_dim=16, moe_topk=2, zero_expert_num=2,
            expert_ffn_hidden_size=24, ffn_hidden_size=48, num_hidden_layers=4),
        *families("mellum", KINDS, tables(), MOE, head_dim=16),
        *families("mimo_v2_flash", KINDS, MOE, tables(partial_rotary_factor=0.5), head_dim=16,
            v_head_dim=16, n_routed_experts=4),
        *families("minimax", PLAIN, num_local_experts=4, head_dim=16),
        *families("minimax_m2", PLAIN, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        *families("minimax_m3_vl_text", PLAIN, MOE, head_dim=16, num_local_experts=4,
            dense_intermediate_size=48, shared_intermediate_size=24, index_n_heads=1, index_head_dim=16),
        *families("ministral3", head_dim=16, rope_parameters=config(rope_theta=10_000.0,
            llama_4_scaling_beta=0.1, original_max_position_embeddings=TRAINED)),
        *families("ministral mistral", head_dim=16, sliding_window=64),
        *families("mixtral", num_local_experts=4),
        *families("mllama", text_config=config(COMMON, PLAIN, cross_attention_layers=[1], pad_token_id=0),
            vision_config=config(SENSE, num_global_layers=1, attention_heads=2, max_num_tiles=1,
            supported_aspect_ratios=[[1, 1]], intermediate_layers_indices=[0], vision_output_dim=32),
            auto_reloads=False),
        *families("modernbert-decoder", KINDS, tables(), local_attention=32, pad_token_id=0, cls_token_id=1,
            sep_token_id=2),
        *families("moshi", head_dim=16, num_codebooks=2, audio_vocab_size=32, ffn_dim=48),
        *families("moss_transcribe_diarize", text_config=config(COMMON, head_dim=16, model_type="qwen3"),
            audio_config=config(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16,
            num_mel_bins=8, max_source_positions=16)),
        *families("olmo3", KINDS, tables(), pad_token_id=0),
        *families("olmoe", num_experts=4, num_experts_per_tok=2),
        *families("phi3", original_max_position_embeddings=TRAINED, pad_token_id=0),
        *families("phi4_multimodal", original_max_position_embeddings=TRAINED, pad_token_id=0,
            vision_config=config(SENSE, crop_size=32), audio_config=config(SENSE, num_blocks=1,
            ext_pw_out_channel=16, nemo_conv_channels=16, input_size=16, nemo_final_size=16)),
        *families("phimoe", PLAIN, num_local_experts=4, router_jitter_noise=0.0, reloads=[str(case) for case
            in ENCODINGS if str(case) != "longrope"]),
        *families("qwen2_moe", MOE, shared_expert_intermediate_size=24),
        *families("qwen3_5_moe_text", SECTIONS, MOE, shared_expert_intermediate_size=24, seed=1),
        *families("qwen3_5_text", SECTIONS),
        *families("qwen3_next", PARTIAL, SHARED, LINEAR_HEADS, head_dim=16, num_hidden_layers=3,
            layer_types=["linear_attention", *["full_attention"] * 2]),
        *families("sarvam_moe", MOE, n_routed_experts=4, head_dim=16),
        *families("smollm3", PLAIN, no_rope_layers=[1, 0], pad_token_id=0),
        *families("solar_open", MOE, n_routed_experts=4, head_dim=16),
        *families("starcoder2", sliding_window=None),
        *families("zaya", tables("hybrid", partial_rotary_factor=0.5), head_dim=16, num_experts=4,
            num_experts_per_tok=1, moe_intermediate_size=24, router_hidden_size=16),
    ],
    key=str,
)  # fmt: skip

FAMILIES = [case for case in ALL_FAMILIES if case.model_type in CONFIG_MAPPING]
"""Families of the installed transformers. The oldest supported version lacks some of them."""
