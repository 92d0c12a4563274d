"""Multi-token-prediction modules of checkpoints: names, shapes, q by transformers' own layers, and refusals."""

import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from checkpoints import checkpoint, shutil
from choosing import only
from decoder_cases import WRONG_PAIRS, noted_drafts
from safetensors.torch import load_file, save_file
from small_runs import composed, parts_of, small
from transformers import AutoModelForCausalLM

from specbench.config.build import build
from specbench.config.check import check
from specbench.drafters.pair_model import PairModel
from specbench.errors import ConfigError

HIDDEN, LAYERS = 16, 2
SHAPE = dict(hidden_size=HIDDEN, intermediate_size=32, moe_intermediate_size=8, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=2048, initializer_range=0.5,
             num_experts_per_tok=2)  # fmt: skip
EXPERTS = dict(n_routed_experts=4, n_shared_experts=1, topk_group=1, first_k_dense_replace=1)
SHAPES = {
    "deepseek_v3": dict(SHAPE, **EXPERTS, n_group=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
                        qk_nope_head_dim=4, v_head_dim=4),
    "glm4_moe": dict(SHAPE, **EXPERTS, n_group=1, head_dim=4, num_nextn_predict_layers=1),
    "qwen3_next": dict(SHAPE, num_experts=4, shared_expert_intermediate_size=8, head_dim=8),
    "qwen2": SHAPE,  # MiMo has its layers
}  # fmt: skip
OTHERS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
BEHIND = ("model.layers.2.", *(f"model.layers.2.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")))
NAMES = {  # of the layer, and of what stands beside it: norms of embedding and hidden state, projection, last norm
    "deepseek_v3": BEHIND,
    "glm4_moe": BEHIND,
    "qwen3_next": ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "qwen2": ("model.mtp_layers.0.", *(f"model.mtp_layers.0.{name}" for name in OTHERS)),
}
WEIGHTS = "model.safetensors"


def shaped(folder: Path, kind: str, layers: int) -> Path:
    types = {"layer_types": ["full_attention"] * layers} if kind == "qwen3_next" else {}
    return checkpoint(folder, model_type=kind, **SHAPES[kind], num_hidden_layers=layers, **types)


@cache
def with_module(kind: str) -> Path:
    """A tiny checkpoint of two layers with a module, the third layer of a larger model, under the real names."""
    folder = Path(mkdtemp())
    out, prefix = shaped(folder / "out", kind, LAYERS), f"model.layers.{LAYERS}."
    more = load_file(shaped(folder / "more", kind, LAYERS + 1) / WEIGHTS)
    layer, embedding_norm, hidden_norm, projection, norm = NAMES[kind]
    found = {layer + name.removeprefix(prefix): tensor for name, tensor in more.items() if name.startswith(prefix)}
    for name in (embedding_norm, hidden_norm, norm):
        found[f"{name}.weight"] = torch.rand(HIDDEN) + 0.5
    found[f"{projection}.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.3
    weights = load_file(out / WEIGHTS)
    if layer == "model.layers.2.":
        found[f"{layer}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        found[f"{layer}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | found, out / WEIGHTS, metadata={"format": "pt"})
    return out


@cache
def parts(kind: str, *overrides: str):
    return parts_of("target=model", f"target.path={with_module(kind)}", "drafter=mtp", "executor=eager", *overrides)


@torch.inference_mode()
def plain_laws(kind, target, text, guesses, exchanged=False):
    """q [gamma, V] from the whole text, with the larger model's third layer, as MiMo's: hidden states first."""
    stock = target.stock
    base = stock.model
    layer = AutoModelForCausalLM.from_pretrained(with_module(kind).parent / "more").model.layers[LAYERS]
    tensors = load_file(with_module(kind) / WEIGHTS)
    embedding_norm, hidden_norm, projection, norm = (tensors[f"{name}.weight"] for name in NAMES[kind][1:])

    def rms(x, weight):
        return torch.func.functional_call(base.norm, {"weight": weight}, (x,))

    tokens = torch.tensor([[*text, *guesses.tolist()]])
    count, laws = len(text), []
    states = base(input_ids=tokens[:, : count - 1], use_cache=False).last_hidden_state
    for end in range(count, count + len(guesses)):
        both = [rms(base.embed_tokens(tokens[:, 1:end]), embedding_norm), rms(states, hidden_norm)]
        x = torch.cat(both[::-1] if (kind == "qwen2") != exchanged else both, -1) @ projection.T
        places = torch.arange(1, end)[None]
        x = layer(x, attention_mask=None, position_ids=places, position_embeddings=base.rotary_emb(x, places))
        own = rms(x, norm)
        laws.append(stock.lm_head(own)[0, -1].softmax(-1))
        states = torch.cat([states, own[:, -1:]], 1)
    return torch.stack(laws)


@pytest.mark.parametrize("kind", only(["deepseek_v3", "qwen2"], SHAPES))
def test_q_is_that_of_the_whole_text(kind):
    """In ragged rows, after any number of accepted guesses. Controls: exchanged halves, the text's last tokens."""
    own = parts(kind)
    found = noted_drafts(own, tokens=10) + noted_drafts(own, tokens=10, alone=True)
    assert len(found) > 6 and {len(guesses) for _, guesses, _ in found} >= {3}
    for text, guesses, q in found:
        assert torch.allclose(q, plain_laws(kind, own.target, text, guesses), atol=1e-5)
    assert not torch.allclose(q, plain_laws(kind, own.target, text, guesses, exchanged=True), atol=1e-3)
    assert not torch.allclose(q, plain_laws(kind, own.target, [*text[:-2], text[-1], text[-2]], guesses), atol=1e-3)


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_hidden_states_and_positions_that_are_wrong_are_seen(name, monkeypatch):
    """Negative controls of the comparison."""
    monkeypatch.setattr(PairModel, name, WRONG_PAIRS[name])
    own = parts("glm4_moe")
    found = noted_drafts(own, gamma=2, tokens=10)
    expected = [plain_laws("glm4_moe", own.target, text, guesses) for text, guesses, _ in found]
    assert not all(torch.allclose(q, e, atol=1e-3) for (_, _, q), e in zip(found, expected, strict=True))


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        build(check(composed(*small("logger=none", "executor=eager", *overrides))))
    return str(error.value)


def spoiled(folder: Path, change) -> Path:
    shutil.copytree(with_module("glm4_moe"), folder)
    weights = load_file(folder / WEIGHTS)
    save_file(change(weights) or weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


BAD = {
    "a part that is missing": (lambda w: w.pop("model.layers.2.hnorm.weight") is None, "lacks hidden_norm.weight"),
    "a layer in part": (lambda w: w.pop("model.layers.2.input_layernorm.weight") is None, "lacks .*input_layernorm"),
    "other shapes": (lambda w: w.update({"model.layers.2.eh_proj.weight": torch.ones(32, 16)}),
                     r"projection.weight \[32, 16\] for \[16, 32\]"),
    "a norm of another width": (lambda w: w.update({"model.layers.2.enorm.weight": torch.ones(8)}),
                                r"embedding_norm.weight \[8\] for \[16\]"),
    "a tensor too many": (lambda w: w.update({"model.layers.2.gate.weight": torch.ones(8)}), "no place for: .*gate"),
    "eight bits": (lambda w: {k: v.to(torch.float8_e4m3fn) if "layers.2.eh_proj" in k else v for k, v in w.items()},
                   "only 16 and 32 bits"),
    "not finite": (lambda w: {k: v / 0 if "layers.2.eh_proj" in k else v for k, v in w.items()}, "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", only(("a part that is missing", "other shapes", "not finite"), BAD))
def test_bad_modules_are_refused_in_a_sentence(name, tmp_path):
    change, expected = BAD[name]
    folder = spoiled(tmp_path / "bad", change)
    assert re.search(expected, refusal("target=model", f"target.path={folder}", "drafter=mtp"))


def test_targets_without_a_module_are_refused_before_they_are_loaded(good, monkeypatch):
    for wanted, expected in (
        (["drafter=mtp"], "target.path=shipped:target, which holds no multi-token-prediction module"),
        (["drafter=mtp", f"drafter.path={good}"], f"drafter.path={good}, which holds no"),
        (["drafter=hierarchical", "drafter@drafter.below=mtp"], "one that needs no hidden states of prompts"),
        (["drafter=mtp", "target.weights=random"], "target.weights=random"),
        (["drafter=mtp", "drafter.path=./nowhere"], "there is no such folder"),
    ):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            check(composed(*small(*wanted)))


def test_a_module_for_other_hidden_states_is_refused():
    told = refusal("drafter=mtp", f"drafter.path={with_module('glm4_moe')}")
    assert "hidden states of 16, but shipped:target has 640" in told
