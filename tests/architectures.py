"""Tiny models with random weights of every causal architecture that transformers lists.

A configuration is the architecture's own, with every size made small: each kind of layer occurs once, and windows are
shorter than the texts of the tests.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specbench.data.sources import SHIPPED

LISTED = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # model types
VOCABULARY, CONTEXT, HIDDEN, HEADS, KEY_HEADS, HEAD, INNER, WINDOW = 4160, 64, 32, 4, 2, 8, 48, 5
HIDDEN_NAMES = ("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size", "input_embedding_size",
                "output_embedding_size", "emb_dim", "attention_hidden_size", "embedding_dim", "lru_width",
                "pronunciation_embed_dim", "shape_embed_dim", "kv_lora_rank", "q_lora_rank", "dim_model_base",
                "hidden_size_per_layer_input", "ple_embed_dim", "axial_hidden_size", "backbone_hidden_size",
                "vision_output_dim", "attention_head_dim", "adapter_in_dim", "adapter_out_dim",
                "adapter_input_size")  # fmt: skip
HEADS_NAMES = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
               "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
               "attention_heads", "swa_num_attention_heads", "index_n_heads", "linear_num_value_heads",
               "linear_num_heads", "num_query_groups")  # fmt: skip
KEY_HEADS_NAMES = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads",
                   "num_global_key_value_heads")  # fmt: skip
HEAD_NAMES = ("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "swa_head_dim", "kv_channels",
              "dim_head", "d_head", "attention_head_size", "index_head_dim", "linear_key_head_dim",
              "linear_value_head_dim", "linear_head_dim", "rotary_dim", "global_head_dim", "d_rel")  # fmt: skip
INNER_NAMES = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim",
               "shared_expert_intermediate_size", "ffn_hidden_size", "dim_ff", "dff", "intermediate_size_mlp",
               "expert_ffn_hidden_size", "dense_intermediate_size", "shared_intermediate_size", "d_inner",
               "feed_forward_size", "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size",
               "prompt_mid_dim", "n_inner")  # fmt: skip
LAYERS_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
                "num_encoder_layers", "num_decoder_layers", "num_layers_per_stack", "num_blocks")  # fmt: skip
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length",
                 "max_target_positions", "context_length", "original_max_position_embeddings")  # fmt: skip
EXPERTS_NAMES = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "zero_expert_num")
CHOSEN_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "n_group", "num_expert_group",
                "topk_group")  # fmt: skip
WINDOW_NAMES = ("sliding_window", "sliding_window_size", "window_size", "local_attention", "attention_window_size",
                "attention_chunk_size")  # fmt: skip
SIZES: dict[str, int] = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "unpadded_vocab_size": VOCABULARY,
    **dict.fromkeys(HIDDEN_NAMES, HIDDEN), **dict.fromkeys(HEADS_NAMES, HEADS),
    **dict.fromkeys(KEY_HEADS_NAMES, KEY_HEADS),
    **dict.fromkeys(HEAD_NAMES, HEAD), **dict.fromkeys(INNER_NAMES, INNER), **dict.fromkeys(CONTEXT_NAMES, CONTEXT),
    **dict.fromkeys(EXPERTS_NAMES, 4), **dict.fromkeys(CHOSEN_NAMES, 2), **dict.fromkeys(WINDOW_NAMES, WINDOW),
    "qk_head_dim": 2 * HEAD, "query_pre_attn_scalar": HEAD,
}  # fmt: skip
# What sizes alone do not say: constraints between them, and switches that make a decoder of a model.
MLA: dict[str, Any] = {"num_key_value_heads": HEADS}
SLIDING: dict[str, Any] = {"swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS,
                           "swa_q_lora_rank": HIDDEN, "swa_kv_lora_rank": HIDDEN, "swa_head_dim": 2 * HEAD,
                           "swa_qk_nope_head_dim": HEAD, "swa_v_head_dim": HEAD}  # fmt: skip
SMALL_HEADS: dict[str, Any] = {"head_dim": HEAD, "num_key_value_heads": KEY_HEADS}
ASSISTANT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
             "vocab_size_per_layer_input": 0}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32",
                     "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "longcat_flash",
                     "minicpm3", "youtu"), MLA),
    "hunyuan_v1_dense": SMALL_HEADS,
    "ministral": SMALL_HEADS,
    "hunyuan_v1_moe": {"head_dim": HEAD, "num_key_value_heads": KEY_HEADS, "num_experts": 4, "moe_topk": 2},
    "nemotron": SMALL_HEADS,
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1], "mamba_d_state": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"],
                         "mamba_d_state": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "cohere_compass_text": {"num_key_value_heads": KEY_HEADS, "layer_types": ["sliding_attention", "full_attention"],
                            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4}
                                                for kind in ("sliding_attention", "full_attention")}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
             "ffn_config": {"ffn_hidden_size": 32}},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None, "H_cycles": 1, "L_cycles": 1},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": INNER,
                     "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [8, 8], "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"num_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "deepseek_v2": MLA | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "zamba": {"num_hidden_layers": 4, "attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS,
              "num_key_value_heads": HEADS,
              "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"num_hidden_layers": 3, "num_key_value_heads": HEADS, "attention_hidden_size": 2 * HIDDEN,
               "attention_head_dim": 2 * HIDDEN // HEADS, "num_mem_blocks": 1, "hybrid_layer_ids": [2],
               "layers_block_type": ["linear_attention", "linear_attention", "hybrid"], "mamba_d_state": 8,
               "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 4},
    "nemotron_h": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "mlp"],
                   "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 4,
                   "n_routed_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
                   "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1},
    "xlnet": {"mem_len": None},
    "dots3_note": {"text_config": MLA | SLIDING},
    "dots3_note_text": MLA | SLIDING,
    "gemma4_assistant": {"text_config": ASSISTANT | {"num_hidden_layers": 2, "num_kv_shared_layers": 2}},
    "gemma4_unified_assistant": {"text_config": {"num_hidden_layers": 2, "num_kv_shared_layers": 2}},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


PARTS = ("text_config",)
# Some configurations cannot be made without these.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": ASSISTANT | {"num_hidden_layers": 4, "num_kv_shared_layers": 4}},
}


def tiny_config(model_type: str, **more: Any) -> transformers.PretrainedConfig:
    """The configuration of an architecture with tiny sizes; errors are those of transformers."""
    kind: Any = transformers.CONFIG_MAPPING[model_type]
    own = OTHERS.get(model_type, {})
    default = kind(**DEFAULTS.get(model_type, {}))
    values = merged(small(default), own | more)
    if default.is_encoder_decoder:
        values["is_encoder_decoder"] = False
    if hasattr(default, "is_decoder"):
        values["is_decoder"] = True
    return kind(**values)


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The values with more; those of a part that is in both are joined."""
    both = {name: values[name] | more[name] for name in PARTS if name in values and name in more}
    return values | more | both


def small(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """The values of a configuration that must change for tiny sizes, those of its parts included."""
    values = config.to_dict()
    found: dict[str, Any] = {name: size for name, size in SIZES.items() if isinstance(values.get(name), int)}
    layers = next((values[name] for name in LAYERS_NAMES if isinstance(values.get(name), int)), 0)
    lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == layers > 2}
    kinds = {name: [*dict.fromkeys(value)] for name, value in lists.items() if not isinstance(value[0], (list, dict))}
    count = max([2, *map(len, kinds.values())])
    if any(len(kind) > 4 for kind in kinds.values()):
        count = max([2, *(len(kind) for kind in kinds.values() if len(kind) <= 4)])
    for name, kind in kinds.items():
        found[name] = [SIZES.get(name, entry) if isinstance(entry, int) else entry for entry in (kind * count)[:count]]
    found |= {name: count for name in LAYERS_NAMES if isinstance(values.get(name), int)}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"):
        if isinstance(values.get(name), (int, list)):
            found[name] = 1
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if isinstance(part, transformers.PretrainedConfig):
            found[name] = small(part)
    return found


def write(config: transformers.PretrainedConfig, folder: Path) -> Path:
    """A folder with this configuration and the shipped tokenizer of 4,096 tokens, but without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / "target" / name, folder)
    return folder


def spread(module: torch.nn.Module, seed: int = 0) -> None:
    """Gives a module weights with which every token matters: random ones, large enough for laws that are not flat."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() >= 2:
                weight.copy_(1.5 * noise / weight.shape[-1] ** 0.5)
            else:
                weight.add_(0.1 * noise)
