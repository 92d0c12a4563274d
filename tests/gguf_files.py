"""Tiny GGUF files, written by the format's own package from checkpoints, as llama.cpp's converter stores them."""

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}  # fmt: skip
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


def own_name(name: str) -> str:
    """GGUF's name of a tensor of transformers' Llama."""
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[name]}.weight"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of q or k [heads * size, in] as llama.cpp has them: the two halves of each head alternate."""
    rows, inputs = weight.shape
    return weight.view(heads, 2, rows // heads // 2, inputs).transpose(1, 2).reshape(rows, inputs)


def write(file: Path, folder: Path, kind: str = "F32", divisors=None, drop: str = "") -> Path:
    """A GGUF file of the Llama checkpoint in a folder, its matrices of this kind of number. `divisors` are those of
    rotary frequencies; the tensor `drop` is left out."""
    config = json.loads((folder / "config.json").read_text())
    words = json.loads((folder / "tokenizer.json").read_text())["model"]
    out = gguf.GGUFWriter(file, "llama")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    out.add_vocab_size(config["vocab_size"])
    tokens = sorted(words["vocab"], key=words["vocab"].get)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(tokens + [f"[PAD{n}]" for n in range(len(tokens), config["vocab_size"])])
    out.add_token_types([3] + [1] * (len(tokens) - 1) + [5] * (config["vocab_size"] - len(tokens)))
    out.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in words["merges"]])
    out.add_eos_token_id(0)
    out.add_chat_template(TEMPLATE)
    wanted = gguf.GGMLQuantizationType[kind]
    for name, weight in load_file(folder / "model.safetensors").items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        weight = weight.float() if heads is None else interleaved(weight.float(), config[heads])
        if own_name(name) == drop:
            continue
        kept = wanted if weight.dim() > 1 else gguf.GGMLQuantizationType.F32
        out.add_tensor(own_name(name), gguf.quantize(weight.numpy(), kept), raw_dtype=kept)
    if divisors is not None:
        out.add_tensor("rope_freqs.weight", torch.tensor(divisors).numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file
