"""DFlash checkpoints: q of every guess against a plain forward over the whole text, exact runs, and refusals."""

import json
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from checkpoints import checkpoint, shutil
from choosing import in_turn, only
from decoder_cases import noted_drafts
from eagle_cases import numbers
from safetensors.torch import load_file, save_file
from small_runs import composed, parts_of, run, small

from specbench.config.check import check
from specbench.errors import ConfigError

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


@cache
def target() -> Path:
    return checkpoint(Path(mkdtemp()), num_hidden_layers=TOTAL)


def chosen(kind: str, *overrides: str) -> list[str]:
    return ["target=model", f"target.path={target()}", "drafter=dflash", f"drafter.path={folder_of(kind)}",
            "executor=eager", "gamma=3", *overrides]  # fmt: skip


@cache
def parts(kind: str, *overrides: str):
    return parts_of(*chosen(kind, *overrides))


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def turned(x, position):
    """A head [D] at a position: each pair (i, i + D / 2) turned by its angle."""
    half = SIZE // 2
    angle = position / 10000.0 ** (torch.arange(half).double() / half)
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


@torch.inference_mode()
def plain_laws(kind, stock, text, guesses, layers=(1, 4), shift=0, plain_ids=False):
    """q [gamma, V] behind a text, one row, head and key at a time; `layers`, `shift` and `plain_ids` spoil it."""
    _, fewer, rank = KINDS[kind]
    W = {name: tensor.double() for name, tensor in random_weights(fewer, rank).items()}
    n = len(text) - 1
    states = stock(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([states[k][0, :n] for k in layers], -1).double()
    context = rms(features @ W["fc.weight"].T, W["hidden_norm.weight"])
    embedding = stock.get_input_embeddings().weight.double()
    block = embedding[[text[-1], *[MASK] * (BLOCK - 1)]]
    for i in range(2):
        w = {name.removeprefix(f"layers.{i}."): tensor for name, tensor in W.items() if name.startswith(f"layers.{i}")}
        h = rms(block, w["input_layernorm.weight"])
        rows = []
        for j in range(BLOCK):
            begin = max(0, n - 5) if kind != "z-lab" and i == 0 else 0
            end = j + 1 if kind == "speculators" and i == 0 else BLOCK
            seen = [(context[t], t) for t in range(begin, n)] + [(h[t], n + t + shift) for t in range(end)]
            heads = []
            for head in range(HEADS):
                cut = slice(head * SIZE, (head + 1) * SIZE)
                key = slice(head * KEYS // HEADS * SIZE, (head * KEYS // HEADS + 1) * SIZE)
                query = turned(rms(h[j] @ w["self_attn.q_proj.weight"][cut].T, w["self_attn.q_norm.weight"]), n + j)
                keys = [turned(rms(x @ w["self_attn.k_proj.weight"][key].T, w["self_attn.k_norm.weight"]), at)
                        for x, at in seen]  # fmt: skip
                values = torch.stack([x @ w["self_attn.v_proj.weight"][key].T for x, _ in seen])
                weights = (torch.stack(keys) @ query / SIZE**0.5).softmax(0)
                heads.append(weights @ values)
            rows.append(torch.cat(heads) @ w["self_attn.o_proj.weight"].T)
        block = block + torch.stack(rows)
        h = rms(block, w["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(h @ w["mlp.gate_proj.weight"].T)
        block = block + (gate * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    states = rms(block, W["norm.weight"])[0 if kind == "dspark" else 1 :]
    laws = []
    for j, before in enumerate([text[-1], *guesses.tolist()][: len(guesses)]):
        own = states[j] @ W.get("lm_head.weight", stock.get_output_embeddings().weight.double()).T
        if rank:
            own = own + W["markov_head.markov_w2.weight"] @ W["markov_head.markov_w1.weight"][before]
        logits = torch.full((V,), -torch.inf, dtype=torch.double)
        ids = W["d2t"].long() + (0 if plain_ids else torch.arange(fewer)) if fewer else torch.arange(V)
        logits[ids] = own
        laws.append(logits.softmax(-1))
    return torch.stack(laws)


def farthest(found, own, kind, **spoilt):
    """The largest difference of a log q from the plain one, infinite if they allow different tokens."""
    stock, worst = own.target.stock, 0.0
    for text, guesses, q in found:
        expected = plain_laws(kind, stock, text, guesses, **spoilt)
        if ((q > 0) != (expected > 0)).any():
            return float("inf")
        worst = max(worst, float((q.double().log() - expected.log())[q > 0].abs().max()))
    return worst


@pytest.mark.parametrize("kind", only(["speculators", "dspark"], KINDS))
def test_q_is_that_of_a_plain_forward_over_the_whole_text(kind):
    """In ragged rows, after every number of accepted guesses. Controls: hidden states of the layer before, keys of the
    block one position off, and differences of ids taken for ids."""
    own = parts(kind, "temperature=1")
    found = noted_drafts(own, tokens=12)
    assert len(found) > 6 and farthest(found, own, kind) < 1e-5
    assert farthest(found[:1], own, kind, layers=(0, 3)) > 1e-3
    assert farthest(found[:1], own, kind, shift=1) > 1e-3
    if KINDS[kind][1]:
        assert farthest(found[:1], own, kind, plain_ids=True) > 1e-3


@torch.inference_mode()
@pytest.mark.parametrize("with_token", [True, False])
def test_estimates_are_the_logits_of_the_confidence_head(with_token, tmp_path):
    """The head reads the state at a place, and the token before it as the bias does, unless it is narrower."""
    weights, folder, width = random_weights(None, 3), tmp_path / "own", HIDDEN + 3 * with_token
    head = weights["confidence_head.proj.weight"] = weights["confidence_head.proj.weight"][:, :width].contiguous()
    shutil.copytree(folder_of("dspark"), folder)
    save_file(weights, folder / "model.safetensors")
    network = parts_of(*chosen("dspark", f"drafter.path={folder}")).drafter.model.module
    states, before = numbers("states", 2, HIDDEN), torch.tensor([5, 4000])
    features = torch.cat([states, weights["markov_head.markov_w1.weight"][before]], 1)[:, :width]
    own = features @ head[0] + weights["confidence_head.proj.bias"]
    assert torch.allclose(network.estimate(states, before), own, atol=1e-5)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_run_that_the_head_ends_early_is_exact_and_drafts_less(temperature, tmp_path):
    words = (f"temperature={temperature}", "batch_size=2", "gamma_policy=confidence_head", "gamma_policy.largest=4")
    drafted = []
    for place in (0.1, 100.0):
        result, _ = run(parts("dspark", *words, f"gamma_policy.temperatures=[{place}]"), tmp_path / f"{place}")
        assert result.lossless.passed is not False and not result.counts.failed
        drafted.append(result.counts.drafted / result.counts.rounds)
    assert 0 < drafted[0] < drafted[1] and drafted[1] > 3


# The first four numbers of row 2 of a block behind five positions, by a forward pass that was bit-equal to z-lab's
# dflash/model.py (float32, eager attention), with the tensors of "z-lab" and the numbers below.
STORED = [-0.093398, -0.156479, -0.11799, 0.046858]


@torch.inference_mode()
def test_states_are_those_of_z_lab():
    """Control: a context that lacks its last position."""
    network, first = parts("z-lab", "temperature=1").drafter.model.module, torch.zeros(1, dtype=torch.long)
    features, block = numbers("features", 1, 5, 2 * HIDDEN), numbers("block", 1, BLOCK, HIDDEN)
    for count, close in ((5, True), (4, False)):
        states = network(block, network.context(features[:, :count], first), first + 5)
        assert torch.allclose(states[0, 2, :4], torch.tensor(STORED), atol=1e-5, rtol=0) == close


def test_a_prompt_that_no_draft_followed_overwrites_nothing():
    """Its request has ended, and another one in its row has decoded some tokens."""
    model = parts("z-lab", "temperature=1").drafter.model
    hidden, found = torch.randn(2, 1, 12, model.module.fc.in_features), []
    for before in (True, False):
        model.allocate(1, 32)
        if before:
            model.take_hidden(0, 0, hidden[0])
        model.take_hidden(0, 0, hidden[1, :, :3])
        model.take(hidden[1, :, 3:], torch.tensor([3]))
        model.read_prompts()
        found.append(model.context[..., :12, :].clone())
    assert torch.equal(*found)


@pytest.mark.parametrize(("kind", "cache"), in_turn(
    ["z-lab", "speculators", "dspark"], [("static",), ("dynamic",), ("paged",)], ["z-lab"]
))  # fmt: skip
def test_a_run_is_exact(kind, cache, tmp_path):
    result, _ = run(parts(kind, "temperature=0", "gamma=3", "batch_size=2", f"cache={cache}"), tmp_path)
    assert result.lossless.passed and result.counts.drafted > 0 and not result.counts.failed


def spoiled(tmp_path, change, **config) -> str:
    folder = tmp_path / "bad"
    shutil.copytree(folder_of("speculators"), folder)
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights) or weights, folder / "model.safetensors")
    return str(folder)


BAD = {
    "a tensor that is missing": (lambda w: w.pop("fc.weight") is None, {}, "lacks fc.weight"),
    "one too many": (lambda w: w.update(other=w["norm.weight"].clone()), {}, "no place for: other"),
    "not finite": (lambda w: w["fc.weight"].fill_(torch.nan) is None, {}, "not finite"),
    "ids beyond the target": (lambda w: w["d2t"].fill_(V) is None, {}, "d2t names tokens from"),
    "an unknown option": (lambda w: None, {"sigma_reparam": True}, "sigma_reparam"),
    "another width": (lambda w: None, {"transformer_layer_config": dict(WINDOW, hidden_size=32)},
                      "hidden states of 32, but"),
    "a mask that the target lacks": (lambda w: None, {"mask_token_id": V}, f"mask_token_id={V}"),
    "a layer that the target lacks": (lambda w: None, {"aux_hidden_state_layer_ids": [1, 9]}, "layer 9"),
    "other weights": (lambda w: None, {"speculators_model_type": "eagle3"}, "must be dflash or dspark"),
    "another head": (lambda w: None, {"markov_head_type": "rnn", "markov_rank": 3}, "markov_head_type=rnn"),
    "an interpolation": (lambda w: None, {"markov_head_type": "${oc.env:HOME}"}, "has ${ in its config.json"),
    "a huge head": (lambda w: None, {"transformer_layer_config": dict(WINDOW, head_dim=2**45)}, "head_dim=3518"),
    "a huge layer": (lambda w: None, {"transformer_layer_config": dict(WINDOW, intermediate_size=2**62)},
                     "could not be loaded (weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints_are_refused_in_a_sentence(name, tmp_path):
    change, config, expected = BAD[name]
    bad = spoiled(tmp_path, change, **config)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        wanted = small(*chosen("speculators"), f"drafter.path={bad}", "logger=none")
        check(composed(*wanted))
        parts_of(*wanted)


def test_a_policy_that_asks_needs_a_head_and_chains():
    for kind, words in (("z-lab", ()), ("dspark", ("drafter.nodes=4", "verifier=iterative"))):
        with pytest.raises(ConfigError, match="is not possible with drafter=dflash: it needs chains of a DSpark"):
            check(composed(*small(*chosen(kind, "gamma_policy=confidence_head", *words))))
    with pytest.raises(ConfigError, match="has no confidence head"):  # as of a hub id
        parts("z-lab", "temperature=1").drafter.begin(None, object())


def test_a_folder_of_something_else_is_refused():
    with pytest.raises(ConfigError, match="is no DFlash checkpoint"):
        check(composed(*small(*chosen("z-lab"), f"drafter.path={target()}")))
