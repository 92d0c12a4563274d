"""EAGLE checkpoints: each dialect and option against an independent forward pass, whole drafts, and refusals."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from checkpoints import checkpoint
from eagle_cases import (
    DRAFT_V,
    TARGET,
    D,
    PlainEagle,
    V,
    eagle3_tensors,
    layer_shapes,
    numbers,
    plain,
    renamed,
    speculators,
    write,
)
from small_runs import parts_of

from specbench.contrib.eagle.model import DraftVocabulary, EagleModel
from specbench.decoding.noise import prompt_key
from specbench.decoding.queue import Queue
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import Job, State
from specbench.decoding.timer import Clock
from specbench.models.mtp import MtpModel
from specbench.policies.gamma.fixed import FixedGamma

LAYERS = TARGET["num_hidden_layers"]
DEFAULT = (2, LAYERS // 2, LAYERS - 3)


@cache
def target_folder() -> Path:
    return checkpoint(Path(mkdtemp()) / "target", **TARGET)


def eagle1_tensors() -> dict[str, torch.Tensor]:
    shapes = {"fc.weight": (D, 2 * D), "fc.bias": (D,)} | layer_shapes("layers.0", D)
    shapes = {name: numbers(name, *shape) for name, shape in shapes.items() if "input_layernorm" not in name}
    return shapes | {"embed_tokens.weight": numbers("embed_tokens.weight", V, D)}


# -- Checkpoints: tensors as the forward pass has them, tensors as they are stored, config.json --------


def from_speculators(layers=1, qwen=False, without=frozenset(), ids=None, **flags):
    tensors = eagle3_tensors(layers, qwen=qwen, without=without, **flags)
    return tensors, tensors, speculators(tensors, ids, layers, qwen, **flags)


def from_safeailab(names=None, without=frozenset(), more=None, **flags):
    tensors = eagle3_tensors(without=without, **flags)
    return (
        tensors,
        renamed(tensors, {"layers.0.": "midlayer."} | (names or {})),
        plain(tensors, **(more or {}), **flags),
    )


def from_optimizer(aux=3, without=frozenset(), **options):
    tensors = eagle3_tensors(aux=aux, without=without)
    more = {"use_aux_hidden_state": aux > 0, "next_layer_regular": True, "use_mtp_layernorm": False, **options}
    tensors = {
        name: t for name, t in tensors.items() if options.get("use_last_layernorm", True) or name != "norm.weight"
    }
    return tensors, tensors, plain(tensors, eagle_config=more)


AUX_NAMES = {f"fc_norm.{j}.": f"aux_norm_{name}." for j, name in enumerate(("low", "mid", "high"))}
CASES = {
    "plain": lambda: from_speculators(),
    "residual": lambda: from_speculators(norm_before_residual=True),
    "before_fc": lambda: from_speculators(norm_before_fc=True, norm_output=True),
    "fc_norm": lambda: from_speculators(fc_norm=True, norm_before_residual=True),
    "two_layers": lambda: from_speculators(layers=2),
    "qwen": lambda: from_speculators(layers=2, qwen=True, norm_output=True),
    "no_embedding": lambda: from_speculators(without={"embedding"}),
    "no_map": lambda: from_speculators(without={"map"}),
    "nothing_of_the_target": lambda: from_speculators(without={"map", "head", "embedding"}),
    "safeailab": lambda: from_safeailab(),
    "sglang": lambda: from_safeailab(AUX_NAMES, fc_norm=True),
    "prefixed": lambda: from_safeailab({"fc.": "model.fc.", "norm.": "model.norm."}),
    "optimizer": lambda: from_optimizer(),
    "no_aux": lambda: from_optimizer(aux=0, without={"hidden_norm"}),
    "no_last_norm": lambda: from_optimizer(use_last_layernorm=False),
    "eagle1": lambda: (eagle1_tensors(), eagle1_tensors(), plain(eagle1_tensors(), bias=True)),
}  # fmt: skip
# The first four logits behind the pairs of `numbers("features", 6, 3 * D)` and TOKENS, by Eagle3DraftModel.forward of
# speculators 0.9.0 with these tensors (eager attention, ttt_steps=1, position_ids 0 .. 5, float32, transformers 5.23).
TOKENS = [7, 4000, 12, 255, 3111, 9]
STORED = {
    "plain": [0.642739, 0.657768, -0.170699, -0.780268],
    "residual": [-0.01964, 1.037, 0.763831, -0.488846],
    "before_fc": [0.085843, 0.993981, 0.627476, -0.54368],
    "fc_norm": [0.020917, 1.061763, 0.741044, -0.529961],
    "two_layers": [0.343512, 0.638866, 0.114963, -0.556364],
    "qwen": [0.181015, 0.600997, 0.250284, -0.421384],
}


@cache
def case(name: str):
    """The folder of a case, and its forward pass in numpy."""
    tensors, stored, config = CASES[name]()
    folder = write(Path(mkdtemp()) / name, stored, config, binary=name == "safeailab")
    flags = {flag: config.get(flag) for flag in ("norm_before_residual", "norm_output")}
    stock = parts_of("target=model", f"target.path={target_folder()}", "drafter=random", "executor=eager").target
    embedding, head = (t.detach().double().numpy() for t in (
        stock.module.get_input_embeddings().weight, stock.module.get_output_embeddings().weight))  # fmt: skip
    return folder, PlainEagle(tensors, embedding, head, version=1 if name == "eagle1" else 3, **flags)


def overrides(name: str, *more: str) -> list[str]:
    drafter = "eagle" if name == "eagle1" else "eagle3"
    return ["target=model", f"target.path={target_folder()}", f"drafter={drafter}", f"drafter.path={case(name)[0]}",
            "executor=eager", "verifier=synthetic", "verifier.alpha=0.7", *more]  # fmt: skip


@cache
def parts(name: str, *more: str):
    return parts_of(*overrides(name, *more))


def own_model(name: str) -> EagleModel:
    return parts(name).drafter.pairs


def draft_logits(q: torch.Tensor, width: int) -> torch.Tensor:
    """Of the draft model's tokens, from those of all tokens."""
    return q if width == V else q[..., 5 + 13 * torch.arange(DRAFT_V)]


def forward(model: EagleModel, features: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Logits [N, V] behind pairs of the target's hidden states [N, A * D] and tokens."""
    model.allocate(1, 16)
    visible = model.make_room([0], len(tokens))
    pairs = model.join(torch.tensor([tokens]), model.project(features[None]))
    return model.forward(pairs, torch.zeros(1, dtype=torch.long), visible)[0]


@pytest.mark.parametrize("name", STORED)
def test_logits_are_those_of_speculators(name):
    """As stored, and at every position as the forward pass in numpy has them."""
    model, (_, reference) = own_model(name), case(name)
    features = numbers("features", len(TOKENS), 3 * D)
    logits = draft_logits(forward(model, features, TOKENS), DRAFT_V)
    torch.testing.assert_close(logits[-1, :4], torch.tensor(STORED[name]), atol=1e-5, rtol=0)
    own = [reference.feature(row.double().numpy()) for row in features]
    for end in range(1, len(TOKENS) + 1):
        expected, _ = reference(own[:end], TOKENS[:end])
        assert np.abs(logits[end - 1].numpy() - expected).max() < 1e-5
    other, _ = reference(own, [*TOKENS[1:], TOKENS[0]])  # negative control
    assert np.abs(logits[-1].numpy() - other).max() > 1e-3


# -- Whole drafts ------------------------------------------------------------------------------------


def drafts(name, gamma=3, tokens=14, batch=2):
    """What was drafted for ragged texts: for each draft, the text before it, the guesses, and their q [gamma, V]."""
    own, found = parts(name), []
    target, drafter = own.target, own.drafter
    prompts = [[5, 9, 2, 7, 11, 3, 8], [4, 1, 6]]
    jobs = [Job(prompt, len(prompt) + tokens, prompt_key(0, str(i))) for i, prompt in enumerate(prompts)]
    state = State.idle(batch, 40, [], target.device)
    target.allocate(batch, 40)
    propose = type(drafter).propose

    def noted(state, gammas):
        draft = propose(drafter, state, gammas)
        for row, text in enumerate(state.texts):
            if state.active[row] and gammas[row] and draft.probs is not None:
                found.append((list(text), draft.tokens[row, : gammas[row]], draft.probs[row, : gammas[row]].clone()))
        return draft

    drafter.propose = noted
    try:
        queue = Queue(jobs, [target, *drafter.models], 4, own.spare)
        decode_speculative(state, target, drafter, FixedGamma(gamma), own.verifier, Clock(), feed=queue)
    finally:
        del drafter.propose
    return found


def target_features(name: str, text: list[int], layers) -> np.ndarray:
    """[T, A * D] of the target's own module; its last hidden states without layers."""
    base = parts(name).target.stock_module().model
    states = base(torch.tensor([text]), output_hidden_states=True)
    if not layers:
        return states.last_hidden_state[0].double().numpy()
    return torch.cat([states.hidden_states[layer][0] for layer in layers], -1).double().numpy()


def expected_laws(name, text, guesses, layers=None) -> torch.Tensor:
    """q [gamma, V] from the whole text: behind it every guess has the draft model's own state."""
    reference = case(name)[1]
    layers = layers or ((), DEFAULT)[name not in ("no_aux", "eagle1")]
    features = [reference.feature(row) for row in target_features(name, text[:-1], layers)]
    tokens, laws = list(text[1:]), []
    for guess in guesses.tolist():
        logits, state = reference(features, tokens)
        exact = torch.from_numpy(logits).softmax(-1)
        law = exact if len(exact) == V else torch.zeros(V, dtype=torch.double).index_add(
            0, 5 + 13 * torch.arange(DRAFT_V), exact)  # fmt: skip
        laws.append(law.float())
        features, tokens = [*features, state], [*tokens, guess]
    return torch.stack(laws)


@pytest.mark.parametrize("name", CASES)
def test_q_is_that_of_the_whole_text(name):
    """In ragged rows, after every number of accepted guesses, for guesses behind the draft model's own states."""
    found = drafts(name)
    assert 3 in {len(guesses) for _, guesses, _ in found} and accepted(found) >= {0, 1, 2}
    for text, guesses, q in found[:: max(1, len(found) // 4)]:
        torch.testing.assert_close(q, expected_laws(name, text, guesses), atol=1e-5, rtol=0)


def accepted(found) -> set[int]:
    """The numbers of guesses that were accepted between two drafts for one text."""
    texts = [text for text, _, _ in found]
    return {
        len(after) - len(text) - 1
        for text in texts
        for after in sorted((t for t in texts if len(t) > len(text) and t[: len(text)] == text), key=len)[:1]
    }


def differ(name: str, found, layers=None) -> bool:
    return not all(
        torch.allclose(q, expected_laws(name, text, guesses, layers), atol=1e-4) for text, guesses, q in found[:4]
    )


def test_another_layer_is_seen():
    """Negative control."""
    assert differ("plain", drafts("plain"), layers=(3, 5, 6))


def test_hidden_states_of_another_round_are_seen(monkeypatch):
    """Negative control: pairs that were rejected stay pending."""
    monkeypatch.setattr(MtpModel, "take", lambda *given: None)
    assert differ("plain", drafts("plain"))


def test_a_position_off_by_one_is_seen(monkeypatch):
    """Negative control: own states stand one column further on."""
    predict = MtpModel.predict

    def shifted(self, tokens, hidden, first, last, visible):
        return predict(self, tokens, hidden, first if last is not None else first + 1, last, visible)

    monkeypatch.setattr(MtpModel, "predict", shifted)
    assert differ("plain", drafts("plain", gamma=2))


def test_d2t_as_an_index_is_seen(monkeypatch):
    """Negative control: d2t is taken for the target's tokens."""
    own = own_model("plain").vocabulary
    wrong = DraftVocabulary((12 * torch.arange(DRAFT_V) + 5), own.own, own.wanted)
    monkeypatch.setattr(own_model("plain"), "vocabulary", wrong)
    assert differ("plain", drafts("plain"))
