"""Speculators of others: logits by a plain implementation and by published programs, guesses of decodes, files."""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import WEIGHTS, checkpoint, config, cut, pop, put, tensors, then, without
from decoder_cases import verifier_of
from safetensors.torch import save_file
from small_runs import composed, small

from specbench.cache.static import StaticCache
from specbench.config.build import build
from specbench.config.validate import check
from specbench.contrib.draft_heads.drafter import SpeculatorDrafter
from specbench.contrib.draft_heads.speculator import read_speculator
from specbench.decoding.sampling import Sampling
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import Job, State
from specbench.decoding.timer import Clock
from specbench.errors import ConfigError
from specbench.executors.eager import EagerExecutor
from specbench.models.context import Context
from specbench.models.pretrained import PretrainedModel
from specbench.models.published import load_network
from specbench.policies.gamma.fixed import FixedGamma
from specbench.verifiers.speculative import SpeculativeVerifier

COUNT, HIDDEN, INNER, VOCABULARY = 3, 16, 8, 12
LSTM = {"model_type": "mlp_speculator", "method": "sum_lstm", "input_hidden_dim": HIDDEN, "emb_dim": "8",
        "inner_dim": "8", "proj_dim": "8", "n_predict": COUNT, "vocab_size": VOCABULARY, "tie_weights": True,
        "tie_lstm_embs": True, "scale_input": True, "num_lookahead_tokens": COUNT}  # fmt: skip
IBM = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": HIDDEN,
       "inner_dim": INNER, "n_predict": COUNT, "vocab_size": VOCABULARY, "top_k_tokens_per_head": [5, 4, 3],
       "n_candidates": 5, "tie_weights": False, "scale_input": False, "transformers_version": "4.38.2"}  # fmt: skip
KINDS = {
    "untied": IBM,
    "scaled": IBM | {"scale_input": True},
    "tied": IBM | {"tie_weights": True},
    "inner_dim 0": IBM | {"inner_dim": 0},
    "lstm": LSTM,
    "lstm of dims in parts": LSTM | {"scale_input": False, "inner_dim": "8.8", "emb_dim": "8.8"},
}
SMALL = {"untied", "tied", "lstm"}


def values(number: int, *shape: int) -> torch.Tensor:
    """Numbers that any machine computes alike."""
    count = torch.arange(math.prod(shape), dtype=torch.float64)
    return (torch.sin(1.7 * count + 37 * number) * 0.9).float().view(shape)


def weights(settings: dict) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of these settings, without their prefix."""
    V, M = settings["vocab_size"], int(str(settings["inner_dim"]).split(".")[0]) or HIDDEN
    if "method" in settings:
        gates = ("forget", "input", "output", "cell")
        shapes = {f"{gate}_proj.{i}.weight": (M, width) for gate in gates for i, width in enumerate((HIDDEN, M))}
        shapes |= {"forget_emb.0.weight": (V, M), "head.0.weight": (V, M)}
        shapes |= {f"{part}.0.{kind}": (M,) for part in ("cell_ln", "state_ln") for kind in ("weight", "bias")}
    else:
        own = 1 if settings["tie_weights"] else COUNT
        shapes = {f"{part}.{i}.weight": (V, M) for part in ("emb", "head") for i in range(own)}
        shapes |= {f"ln.{i}.{kind}": (M,) for i in range(own) for kind in ("weight", "bias")}
        shapes |= {f"proj.{i}.weight": (M, M if i else HIDDEN) for i in range(2 if own == 1 else COUNT)}
    return {name: values(number, *shapes[name]) for number, name in enumerate(sorted(shapes))}


def written(folder: Path, settings: dict, prefix: str = "speculator.") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({prefix + name: tensor for name, tensor in weights(settings).items()}, folder / WEIGHTS)
    return folder


# -- Logits ------------------------------------------------------------------------------------------


def rms(x, weight=1.0, bias=0.0):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight + bias


def gelu(x):
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def plain(settings: dict, hidden: np.ndarray, tokens: list[int], own: dict | None = None) -> np.ndarray:
    """Logits [K, V] of guesses k = 0, 1, ... of one row, with hidden [H], each after tokens[k], in float64."""
    W = own or {name: tensor.double().numpy() for name, tensor in weights(settings).items()}
    M = W["head.0.weight"].shape[1]
    a = 0.5 ** (0.5 / settings["n_predict"])
    w = math.sqrt((1 - a**2) * M / 2) / a
    s = rms(hidden) / math.sqrt(2) if settings["scale_input"] else hidden
    c, found = np.zeros(M), []
    for k, token in enumerate(tokens):
        if "method" in settings:
            e = w * W["forget_emb.0.weight"][token]
            z = {g: W[f"{g}_proj.{min(k, 1)}.weight"] @ s + e for g in ("forget", "input", "output", "cell")}
            f, i, o = (1 / (1 + np.exp(-z[gate])) for gate in ("forget", "input", "output"))
            c = f * c + i * gelu(rms(z["cell"], W["cell_ln.0.weight"], W["cell_ln.0.bias"]))
            s, head = o * gelu(rms(c, W["state_ln.0.weight"], W["state_ln.0.bias"])), 0
        else:
            own_k, head = (min(k, 1), 0) if settings["tie_weights"] else (k, k)
            mixed = W[f"proj.{own_k}.weight"] @ s + w * W[f"emb.{head}.weight"][token]
            s = gelu(rms(mixed, W[f"ln.{head}.weight"], W[f"ln.{head}.bias"]))
        found.append(W[f"head.{head}.weight"] @ s)
    return np.array(found)


HIDDEN_STATES, LAST = values(99, 2, HIDDEN), [4, 9]
# The first two logits of the last guess of both rows, by a separate program whose results equal fms-extras' and
# Arctic's own bit for bit, on these weights.
PUBLISHED = {
    "untied": [[-1.145095, -0.260397], [-1.055463, -0.435353]],
    "scaled": [[-1.145653, -0.260549], [-1.054699, -0.435178]],
    "tied": [[1.486335, -0.842975], [1.481153, -0.84222]],
    "inner_dim 0": [[-2.3888, 2.081775], [-2.33757, 2.029685]],
    "lstm": [[-0.531445, -0.06368], [-0.521846, -0.022634]],
    "lstm of dims in parts": [[-0.531587, -0.063564], [-0.522127, -0.022912]],
}


def of_module(folder: Path) -> tuple[list[list[int]], np.ndarray]:
    """Tokens before each guess, by row, and logits [2, K, V] of a chain of argmaxes."""
    module, last, found = read_speculator(str(folder), "drafter.path"), torch.tensor(LAST), []
    state, texts = module.start(HIDDEN_STATES), [LAST]
    with torch.no_grad():
        for number in range(COUNT):
            logits, state = module.step(number, state, last)
            found.append(logits)
            last = logits.argmax(-1)
            texts.append(last.tolist())
    return np.array(texts).T[:, :COUNT].tolist(), torch.stack(found, 1).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_plain_implementation(kind, tmp_path):
    settings = KINDS[kind]
    texts, found = of_module(written(tmp_path / "s", settings, prefix="" if "lstm" in kind else "speculator."))
    for text, hidden, logits in zip(texts, HIDDEN_STATES.double().numpy(), found, strict=True):
        assert np.abs(logits - plain(settings, hidden, text)).max() < 1e-5
        for wrong in ([text[0], *text[:-1]], text[1:] + text[:1]):  # controls: the embedding of another guess
            if wrong != text:
                assert np.abs(logits - plain(settings, hidden, wrong)).max() > 1e-2


@pytest.mark.parametrize("kind", PUBLISHED)
def test_logits_are_those_of_the_published_programs(kind, tmp_path):
    _, found = of_module(written(tmp_path / "s", KINDS[kind]))
    assert np.abs(found[:, -1, :2] - np.array(PUBLISHED[kind])).max() < 1e-5


HYDRA = {"hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True,
         "base_model_name_or_path": "one", "hidden_state_offset": 0}  # fmt: skip


def hydra(folder: Path, V: int = VOCABULARY, **changes) -> tuple[str, dict[str, torch.Tensor]]:
    """A folder of Hydra heads, and its tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(COUNT):
        width = (head + 2) * HIDDEN
        for part in ("linear", "res_connection"):
            shapes |= {
                f"hydra_mlp.{head}.0.{part}.weight": (HIDDEN, width),
                f"hydra_mlp.{head}.0.{part}.bias": (HIDDEN,),
            }
        shapes |= {f"hydra_mlp.{head}.1.linear.weight": (HIDDEN, HIDDEN), f"hydra_mlp.{head}.1.linear.bias": (HIDDEN,)}
        shapes |= {f"hydra_lm_head.{head}.weight": (V, HIDDEN), f"hydra_lm_head.{head}.bias": (V,)}
    state = {name: values(number, *shapes[name]) for number, name in enumerate(sorted(shapes))}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HYDRA | changes))
    torch.save(state, folder / "hydra_lm_head.pt")
    return str(folder), state


def plain_hydra(state, hidden, embeddings) -> np.ndarray:
    """Logits [K, V] of guesses k = 0, 1, ... of one row, in float64: head k reads the first k + 1 embeddings."""
    W, found = {name: tensor.double().numpy() for name, tensor in state.items()}, []
    for k in range(len(embeddings)):
        x = np.concatenate([hidden, *embeddings[: k + 1]])
        for block in range(2):
            own = f"hydra_mlp.{k}.{block}"
            z = W[f"{own}.linear.weight"] @ x + W[f"{own}.linear.bias"]
            x = x if block else W[f"{own}.res_connection.weight"] @ x + W[f"{own}.res_connection.bias"]
            x = x + z / (1 + np.exp(-z))
        found.append(W[f"hydra_lm_head.{k}.weight"] @ x + W[f"hydra_lm_head.{k}.bias"])
    return np.array(found)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_q_of_hydra_heads_follows_from_hidden_state_and_tokens(temperature, target, tmp_path):
    """In ragged rows, by a plain implementation. Control: embeddings in another order."""
    path, state = hydra(tmp_path / "hydra", 4160)
    model = target.shared(Sampling(temperature), StaticCache, EagerExecutor())
    drafts = SpeculatorDrafter(model, load_network(read_speculator, path, "drafter.path", model), model.sampling, 3)
    errors, controls, propose = [], [], drafts.propose
    jobs = [Job([5, 8, 11, 7][:n], 9 + n, key) for key, n in enumerate((1, 2, 4))]
    begun = State.start(jobs, [], 4, model.device)
    table = target.module.get_input_embeddings().weight.double().numpy()

    def compared(state_, gamma):
        draft = propose(state_, gamma)
        for row, count in enumerate(draft.count.tolist()):
            text = state_.tokens[row : row + 1, : state_.lengths[row]]
            if count and state_.active[row]:
                hidden = target.module(text, output_hidden_states=True).hidden_states[-1][0, -2].double().numpy()
                guesses = draft.tokens[row, :count].tolist()
                read = [table[token] for token in [int(text[0, -1]), *guesses][:count]]
                for order, to in ((read, errors), (read[::-1], controls)):
                    logits = torch.from_numpy(plain_hydra(state, hidden, order))
                    if draft.probs is None:
                        taken = logits.gather(1, torch.tensor(guesses)[:, None])[:, 0]
                        to.append(float((logits.amax(-1) - taken).max()))
                    else:
                        to.append(float((draft.probs[row, :count] - logits.softmax(-1)).abs().max()))
        return draft

    drafts.propose = compared
    model.allocate(len(jobs), begun.tokens.shape[1])
    with torch.inference_mode():
        model.prefill(begun)
        verifier = verifier_of(SpeculativeVerifier, model.sampling)
        decode_speculative(begun, model, drafts, FixedGamma(3), verifier, Clock())
    assert len(errors) > 6 and max(errors) < 1e-5 < max(controls)


@pytest.mark.parametrize(("changes", "told"), [
    ({"hydra_head_arch": "prefix-mlp"}, "hydra_head_arch=prefix-mlp is not allowed"),
    ({"grounded_heads": False}, "grounded_heads=(False|false) is not allowed"),
    ({"hydra_num_heads": 4}, "lacks hydra_lm_head.3.bias"), ({"hydra_num_layers": 1}, "hydra_mlp.0.1.linear.bias"),
])  # fmt: skip
def test_other_hydra_heads_are_refused(changes, told, tmp_path):
    path, _ = hydra(tmp_path / "hydra", **changes)
    with pytest.raises(ConfigError, match=told):
        read_speculator(path, "drafter.path")


def test_copies_of_tied_tensors_are_left_out(tmp_path):
    _, expected = of_module(written(tmp_path / "s", KINDS["tied"]))
    copies = tensors(lambda state: state.update({"speculator.emb.1.weight": state["speculator.emb.0.weight"].clone()}))
    copies(tmp_path / "s")
    assert np.array_equal(of_module(tmp_path / "s")[1], expected)


# -- Decodes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> PretrainedModel:
    path = checkpoint(tmp_path_factory.mktemp("target"))
    settings = PretrainedModel.Settings(
        path=str(path), revision=None, weights="pretrained", chat_template="never"
    )  # fmt: skip
    return PretrainedModel(settings, Context(torch.device("cpu"), torch.float32, Sampling(), StaticCache,
                                             EagerExecutor()), "target")  # fmt: skip


class Stale(SpeculatorDrafter):
    """Control: the hidden state of an earlier round."""

    def settle(self, state, draft, verdict, scores, base):
        before = self.hidden
        super().settle(state, draft, verdict, scores, base)
        self.hidden = self.hidden if before is None else before


class Shifted(SpeculatorDrafter):
    """Control: each guess from the next one's weights."""

    def __init__(self, target, speculator, *others):
        super().__init__(target, speculator, *others)
        step = speculator.step
        speculator.step = lambda number, state, last: step(number + 1, state, last)


class FirstToken(SpeculatorDrafter):
    """Control: the embedding of the last committed token for every guess."""

    def __init__(self, target, speculator, *others):
        super().__init__(target, speculator, *others)
        step = speculator.step

        def wrong(number, state, last):
            self.first = last if number == 0 else self.first
            return step(number, state, self.first)

        speculator.step = wrong


@cache
def large(kind: str) -> dict:
    return KINDS[kind] | {"vocab_size": 4160}


@pytest.mark.parametrize(("kind", "drafter", "temperature"), [
    *((kind, SpeculatorDrafter, 1.0) for kind in sorted(SMALL)), ("lstm", SpeculatorDrafter, 0.0),
    ("untied", Stale, 1.0), ("inner_dim 0", Shifted, 1.0), ("untied", FirstToken, 1.0), ("lstm", FirstToken, 1.0),
])  # fmt: skip
def test_guesses_of_ragged_rows_follow_from_hidden_state_and_tokens(kind, drafter, temperature, target, tmp_path):
    """q of every guess is computed again from the text so far: hidden states by the stock module, and a plain
    implementation after them. Controls must differ."""
    speculator = read_speculator(str(written(tmp_path / "s", large(kind))), "drafter.path")
    own = {name: tensor.double().numpy() for name, tensor in weights(large(kind)).items()}
    model = target.shared(Sampling(temperature), StaticCache, EagerExecutor())
    drafts = drafter(model, speculator, model.sampling, 3)
    jobs = [Job([5, 8, 11, 7][:n], 9 + n, key) for key, n in enumerate((1, 2, 4))]
    state, errors, propose = State.start(jobs, [], 4, model.device), [], drafts.propose

    def compared(state, gamma):
        draft = propose(state, gamma)
        for row, count in enumerate(draft.count.tolist()):
            text = state.tokens[row : row + 1, : state.lengths[row]]
            if count and state.active[row]:
                hidden = target.module(text, output_hidden_states=True).hidden_states[-1][0, -2].double().numpy()
                guesses = draft.tokens[row, :count].tolist()
                logits = plain(large(kind), hidden, [int(text[0, -1]), *guesses][:count], own)
                if draft.probs is None:
                    taken = np.take_along_axis(logits, np.array(guesses)[:, None], 1)[:, 0]
                    errors.append(float((logits.max(-1) - taken).max()))
                else:
                    expected = torch.from_numpy(logits).softmax(-1)
                    errors.append(float((draft.probs[row, :count] - expected).abs().max()))
        return draft

    drafts.propose = compared
    model.allocate(len(jobs), state.tokens.shape[1])
    with torch.inference_mode():
        model.prefill(state)
        decode_speculative(
            state, model, drafts, FixedGamma(3), verifier_of(SpeculativeVerifier, model.sampling), Clock()
        )
    assert len(errors) > 6
    assert (max(errors) < 1e-5) == (drafter is SpeculatorDrafter), errors


# -- Whole runs and files ----------------------------------------------------------------------------


def overrides(target: Path, path: Path) -> list[str]:
    return small("target=model", f"target.path={target}", "drafter=mlp_speculator", f"drafter.path={path}", "gamma=3")


def test_a_run_builds_its_parts(tmp_path):
    path = checkpoint(tmp_path / "target")
    parts = build(check(composed(*overrides(path, written(tmp_path / "s", large("tied"))))))
    assert parts.drafter.longest == COUNT and parts.drafter.own_bytes > 2 * 4160 * INNER * 4


BROKEN = {
    "no config": (without("config.json"), "has no config.json"),
    "another model": (config(model_type="llama"), "model_type=llama"),
    "a tensor is missing": (pop("speculator.proj.1.weight"), "lacks proj.1.weight"),
    "a tensor too many": (tensors(lambda state: state.update(extra=torch.ones(3))), "no place for: extra"),
    "an unknown key": (config(depth=3), "config.json depth is not a setting"),
    "no weights": (without(WEIGHTS), "no weights"),
    "cut": (cut(WEIGHTS, 0.5), "damaged"),
    "a width that is text": (config(emb_dim="wide"), "emb_dim=wide is not allowed"),
    "an interpolation": (config(emb_dim="${oc.env:HOME}"), "has ${ in its config.json"),
    "sizes beyond any memory": (config(vocab_size=9 * 10**18), "could not be loaded (weights"),
    "another width": (config(emb_dim=24), "other shapes"),
    "more guesses than weights": (config(n_predict=4), "lacks"),
    "another target's width": (None, "hidden states of 16 and 12 tokens, but"),
    "another method": (config(method="sum_lstm"), "lacks cell_ln.0.bias"),
    "NaN": (put("speculator.proj.1.weight", 5, torch.nan), "not finite in float32, in proj.1.weight"),
}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("chosen"))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_speculator_is_refused(name, tmp_path, chosen):
    change, expected = BROKEN[name]
    folder = written(tmp_path / "s", large("untied") if change else KINDS["untied"])
    then(*([change] if change else []))(folder)
    before = name != "NaN"  # of weights that are read
    with pytest.raises(ConfigError) as refused:
        checked = check(composed(*overrides(chosen, folder)))
        assert not before
        build(checked)
    assert str(refused.value).startswith(f"drafter.path={folder}") and expected in str(refused.value), refused.value
