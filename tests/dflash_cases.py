"""Tiny DFlash checkpoints of each kind."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import save_file

HIDDEN, TOTAL, V, BLOCK, MASK, HEADS, KEYS, SIZE = 16, 5, 4160, 4, 7, 4, 2, 8
LAYER = dict(model_type="qwen3", hidden_size=HIDDEN, intermediate_size=24, num_attention_heads=HEADS,
             num_key_value_heads=KEYS, head_dim=SIZE, vocab_size=V, rms_norm_eps=1e-6,
             rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=2048)  # fmt: skip
Z_LAB = dict(LAYER, num_hidden_layers=2, block_size=BLOCK, num_target_layers=TOTAL, architectures=["DFlashDraftModel"],
             dflash_config={"mask_token_id": MASK, "target_layer_ids": [0, 3]})  # fmt: skip
OWN = {"speculators_model_type": "dflash", "speculators_version": "0.9.0", "block_size": BLOCK, "mask_token_id": MASK,
       "aux_hidden_state_layer_ids": [1, 4]}  # fmt: skip
WINDOW = dict(LAYER, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=5,
              use_sliding_window=True)  # fmt: skip
FEWER = 300  # tokens that a draft vocabulary holds
KINDS = {  # config.json, tokens that it predicts, rank of the bias
    "z-lab": (Z_LAB, None, 0),
    "speculators": (dict(OWN, transformer_layer_config=WINDOW, draft_vocab_size=FEWER), FEWER, 0),
    "dspark": (dict(OWN, speculators_model_type="dspark", sliding_window_non_causal=True, markov_rank=3,
                    transformer_layer_config=WINDOW, draft_vocab_size=V, sample_from_anchor=True), None, 3),
}  # fmt: skip


def random_weights(fewer: int | None, rank: int) -> dict[str, torch.Tensor]:
    """Tensors of a drafter under the published names."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(2):
        p = f"layers.{i}."
        shapes |= {
            f"{p}self_attn.{n}_proj.weight": (h * SIZE, HIDDEN) for n, h in zip("qkv", (HEADS, KEYS, KEYS), strict=True)
        }
        shapes |= {f"{p}self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE), f"{p}mlp.down_proj.weight": (HIDDEN, 24)}
        shapes |= {f"{p}mlp.{n}_proj.weight": (24, HIDDEN) for n in ("gate", "up")}
        shapes |= {f"{p}self_attn.{n}_norm.weight": (SIZE,) for n in "qk"}
        shapes |= {f"{p}{n}_layernorm.weight": (HIDDEN,) for n in ("input", "post_attention")}
    if fewer:
        shapes["lm_head.weight"] = (fewer, HIDDEN)
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (V, rank), "markov_head.markov_w2.weight": (V, rank),
                   "confidence_head.proj.weight": (1, HIDDEN + rank), "confidence_head.proj.bias": (1,)}  # fmt: skip
    found = {n: torch.randn(s, generator=generator) * (1 if "markov" in n else 0.3) for n, s in shapes.items()}
    if fewer:
        targets = torch.randperm(V, generator=generator)[:fewer].sort().values
        found |= {"d2t": targets - torch.arange(fewer), "t2d": torch.zeros(V).bool().index_fill(0, targets, True)}
    return found


@cache
def folder_of(kind: str) -> Path:
    config, fewer, rank = KINDS[kind]
    folder = Path(mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(fewer, rank), folder / "model.safetensors")
    return folder
