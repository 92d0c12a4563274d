"""What a step of one token multiplies and reads: experts that it is not routed to are not read."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specbench.models.sizes import expert_shares, per_token, stored

SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, pad_token_id=None,
             num_experts_per_tok=2)  # fmt: skip
SHAPES = {
    "mixtral": dict(num_local_experts=8),
    "qwen3_moe": dict(num_experts=8, head_dim=4),
    "glm4_moe": dict(n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=1, head_dim=4),
    "gpt_oss": dict(num_local_experts=8, head_dim=4),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_experts_of_every_layer_are_found(kind):
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | SHAPES[kind]))).eval()
    found = expert_shares(module, module.config)
    layers = [layer for layer in module.modules() if any(id(p) in found for p in layer.parameters(recurse=False))]
    assert len(layers) == (1 if "first_k_dense_replace" in SHAPES[kind] else 2)
    assert {*found.values()} == {2 / 8}


def test_only_the_weights_of_chosen_experts_are_read():
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmoe", **SIZES, num_experts=8))
        dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    each = sum(p.numel() for p in module.model.layers[0].mlp.experts.parameters()) // 8
    read = stored(module)[0] - module.get_input_embeddings().weight.numel() - 2 * 6 * each
    assert per_token(module) == (read, 4 * read)
    assert not expert_shares(dense, dense.config)
