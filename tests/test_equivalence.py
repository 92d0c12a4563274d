"""On the shipped pair: temperature 0 is the baseline token for token, and batches change nothing."""

from functools import cache

import pytest
import torch
from conftest import CACHES, DRAFTERS, make_context, make_drafter

from specbench.data.prompts import load, render
from specbench.data.stdlib import StdlibData
from specbench.decoding.autoregressive import decode_autoregressive
from specbench.decoding.noise import prompt_key
from specbench.decoding.sampling import Sampling
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.executors.eager import EagerExecutor
from specbench.gamma_policies.fixed import FixedGamma
from specbench.measure.timers import Stopwatch
from specbench.models.language_model import LanguageModel
from specbench.models.pretrained import PretrainedModel
from specbench.verifiers.speculative import SpeculativeVerifier

PROMPTS, NEW_TOKENS = 3, 24


@cache
def shipped(role: str) -> PretrainedModel:
    settings = PretrainedModel.Settings(
        path=f"shipped:{role}", revision=None, weights="pretrained", chat_template="never"
    )
    context = make_context(Sampling())
    context.executor = EagerExecutor(EagerExecutor.Settings(), context)
    return PretrainedModel(settings, context, role)


def model(role: str, sampling: Sampling, cache_name: str) -> LanguageModel:
    loaded = shipped(role)
    kind = CACHES[cache_name]
    return LanguageModel(
        loaded.module,
        loaded.tokenizer,
        name=role,
        sampling=sampling,
        new_cache=lambda rows, columns: kind(kind.Settings(), rows, columns),
        executor=EagerExecutor(EagerExecutor.Settings(), None),
    )


@cache
def requests() -> tuple:
    source = StdlibData(StdlibData.Settings(limit=PROMPTS, count=32))
    tokenizer = shipped("target").tokenizer
    return tuple(render(prompt, [], tokenizer, chat=False) for prompt in load(source))


def decode(rows, sampling, kind=None, cache_name="static", gamma=5, text_file=None):
    """New tokens of the given requests, decoded in one batch; kind None is autoregressive."""
    target = model("target", sampling, cache_name)
    state = State.start(
        [r.tokens for r in rows],
        [len(r.tokens) + NEW_TOKENS for r in rows],
        [prompt_key(0, r.id) for r in rows],
        target.stop_tokens,
        gamma + 1,
        target.device,
    )
    verifier = SpeculativeVerifier(SpeculativeVerifier.Settings(), make_context(sampling))
    target.allocate(state.batch_size, state.tokens.shape[1])
    target.prefill(state)
    clock = Stopwatch(target.device)
    if kind is None:
        return decode_autoregressive(state, target, verifier, clock).new_tokens()
    drafter = make_drafter(kind, target, text_file, model("drafter", sampling, cache_name))
    policy = FixedGamma(FixedGamma.Settings(gamma=gamma), None)
    return decode_speculative(state, target, drafter, policy, verifier, clock).new_tokens()


@pytest.fixture(scope="module")
def code_text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "code.py"
    path.write_text("\n".join(r.text for r in requests()))
    return str(path)


@cache
def greedy_baseline() -> list[list[int]]:
    return [decode([r], Sampling(temperature=0))[0] for r in requests()]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("cache_name", CACHES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_temperature_zero_equals_the_baseline(kind, cache_name, batch_size, code_text):
    rows, found = requests(), []
    for begin in range(0, PROMPTS, batch_size):
        part = rows[begin : begin + batch_size]
        found += decode(part, Sampling(temperature=0), kind, cache_name, text_file=code_text)
    assert found == greedy_baseline()


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_batch_is_its_singles_at_temperature_one(kind, code_text):
    sampling = Sampling(temperature=1)
    singles = [decode([r], sampling, kind, text_file=code_text)[0] for r in requests()]
    assert decode(requests(), sampling, kind, text_file=code_text) == singles


def test_options_of_the_distribution_keep_the_equality(code_text):
    """top-k, top-p and the repetition penalty reach p and q alike."""
    sampling = Sampling(temperature=0, top_k=20, top_p=0.9, repetition_penalty=1.3)
    baseline = [decode([r], sampling)[0] for r in requests()]
    assert baseline != greedy_baseline()
    for kind in ("model", "ngram", "bigram"):
        assert decode(requests(), sampling, kind, text_file=code_text) == baseline


def test_gamma_zero_is_autoregressive_decoding_at_any_temperature():
    sampling = Sampling(temperature=1)
    assert decode(requests(), sampling, "model", gamma=0) == decode(requests(), sampling)


def test_autoregressive_decoding_equals_transformers_generate():
    loaded = shipped("target")
    for request, ours in zip(requests(), greedy_baseline(), strict=True):
        tokens = torch.tensor([request.tokens])
        theirs = loaded.module.generate(tokens, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert theirs[0, len(request.tokens) :].tolist() == ours
