"""How many experts a call wakes: the count, the theory beside it, and where both are shown."""

import re
from collections import Counter
from io import StringIO

import numpy as np
import pytest
import torch
from checkpoints import checkpoint
from rich.console import Console
from small_runs import parts_of
from transformers import AutoConfig, AutoModelForCausalLM

from specbench.models.flops import chosen_by_token, count_of, expert_layers, idle_experts
from specbench.results.run_table import run_table
from specbench.run.run import run
from specbench.stats.experts import ExpertCounter
from specbench.theory import distinct_experts

SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, pad_token_id=None,
             num_experts_per_tok=2)  # fmt: skip
DEEPSEEK = dict(n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8,
                qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, n_shared_experts=1)  # fmt: skip
SHAPES = {
    "mixtral": dict(num_local_experts=8),
    "qwen2_moe": dict(num_experts=8, shared_expert_intermediate_size=8),
    "qwen3_moe": dict(num_experts=8, head_dim=4),
    "olmoe": dict(num_experts=8),
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": dict(n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=1, head_dim=4),
    "gpt_oss": dict(num_local_experts=8, head_dim=4),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_counts_are_those_of_the_routers(kind):
    """Of every layer, against what its router returns. Negative control: the counts of another call."""
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | SHAPES[kind]))).eval()
    layers, chosen = expert_layers(module), []
    assert len(layers) == (1 if "first_k_dense_replace" in SHAPES[kind] else 2)
    assert {count_of(layer) for layer in layers} == {8} and chosen_by_token(module.config) == 2
    for name, child in module.named_modules():
        if name.endswith((".gate", ".router")):
            child.register_forward_hook(lambda _, given, found: chosen.append(found[-1]))
    counter = ExpertCounter(layers)
    with counter.watching():
        for tokens in (torch.tensor([[5, 9, 2]]), torch.tensor([[7]])):
            chosen.clear()
            module(tokens)
            counter.count()
    assert counter.woken[1] == (1, sum(len(set(found.flatten().tolist())) for found in chosen)) == (1, 2 * len(layers))
    assert counter.woken.keys() == {1, 3} and counter.woken[3][1] > counter.woken[1][1]


def test_only_the_weights_of_woken_experts_are_read():
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmoe", **(SIZES | SHAPES["olmoe"])))
    each = sum(p.numel() for p in module.model.layers[0].mlp.experts.parameters()) // 8
    assert idle_experts(module) == (2 * 6 * each, 2 * 6 * each * 4)
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    assert idle_experts(dense) == (0, 0) and not expert_layers(dense)


def test_the_expected_number_of_distinct_experts_is_that_of_a_simulation():
    generator = np.random.default_rng(0)
    drawn = generator.random((20_000, 5, 8)).argsort(-1)[..., :2].reshape(20_000, -1)
    simulated = np.mean([len(set(row)) for row in drawn.tolist()])
    assert abs(distinct_experts(8, 2, 5) - simulated) < 0.02
    assert distinct_experts(8, 2, 1) == pytest.approx(2) and distinct_experts(8, 2, 10_000) == pytest.approx(8)


@pytest.mark.slow
def test_a_run_shows_what_its_calls_wake(tmp_path):
    """Plain calls of one row wake k experts; those of rounds more, and all that they read is counted."""
    folder = checkpoint(tmp_path / "olmoe", model_type="olmoe", num_experts=8, num_experts_per_tok=2)
    parts = parts_of("target=model", f"target.path={folder}", "drafter=random", "gamma=3", "max_new_tokens=6",
                     "executor=eager", "verdict_tokens=0")  # fmt: skip
    result, _ = run(parts, tmp_path / "run")
    found = result.experts
    assert (found.layers, found.experts, found.chosen, found.plain) == (2, 8, 2, 2)
    calls = Counter({row.tokens: row.calls for row in found.by_tokens if row.way == "verify"})
    assert calls.total() == result.counts.rounds
    assert sum(n * count for n, count in calls.items()) == result.counts.verified
    assert 2 < found.verify <= 8 and 1 < found.weights_v < 4
    console = Console(width=160, record=True, file=StringIO())
    console.print(run_table(result.as_dict(), tmp_path))
    assert re.search(rf"experts woken +{found.verify:.1f} +of 8 in a layer", console.export_text())
    one = sum(p.nbytes for layer in parts.target.expert_layers for p in layer.parameters()) / 8
    rest = parts.target.step_bytes - 2 * one
    assert found.weights_v == pytest.approx((rest + found.verify * one) / (rest + 2 * one))


@pytest.mark.slow
def test_several_calls_of_a_round_are_not_taken_for_one(tmp_path):
    """A model that moves its state on token by token verifies in gamma + 1 calls, of which no one is counted."""
    folder = checkpoint(tmp_path / "jamba", model_type="jamba", num_experts=8, num_experts_per_tok=2,
                        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                        mamba_d_state=8, mamba_dt_rank=4)  # fmt: skip
    parts = parts_of("target=model", f"target.path={folder}", "drafter=random", "gamma=3", "max_new_tokens=4",
                     "executor=eager", "verdict_tokens=0")  # fmt: skip
    result, _ = run(parts, tmp_path / "run")
    assert parts.target.expert_layers and parts.target.experts_by_token == 2
    assert result.experts is None
