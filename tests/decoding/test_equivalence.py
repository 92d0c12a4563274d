"""On shipped pairs: temperature 0 is the baseline token for token, and batches change nothing.

Most run on two models of one layer. Drafters that are parts of the target of three layers, or were trained for it, run
on that one.
"""

from functools import cache, partial

import decoder_cases
import pytest
import torch
from choosing import in_turn, only, slow_unless
from decoder_cases import CACHES, DRAFTERS, TREES, VERIFIERS, generated_by, make_drafter, queued, spare_of
from graph_memory import SimulatedGraphs
from small_runs import noisy_drafter, short_prompts

from specbench.cache.slots import StaticCache
from specbench.data.prompts import load, render
from specbench.data.records import JsonlData
from specbench.decoding.noise import prompt_key
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.executors.base import Executor
from specbench.executors.compiled import CompiledExecutor
from specbench.executors.eager import EagerExecutor
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context, PretrainedModel
from specbench.policies.base import FixedGamma
from specbench.verifiers.base import Verifier

PROMPTS, NEW_TOKENS = 3, 12
LITTLE, LARGE = ("drafter", "noisy"), ("target", "drafter")
OF_THE_LARGE = ("blockwise", "medusa", "early_exit", "pass_lookahead", "mtp", "eagle3",
                "mtp_distinct", "eagle3_dynamic")  # fmt: skip
EXECUTORS = {"plain": partial(EagerExecutor, half_weights=False), "eager": EagerExecutor,
             "compiled": CompiledExecutor, "graphs": SimulatedGraphs}  # fmt: skip


@cache
def executor_of(name: str) -> Executor:
    return EXECUTORS[name]()


@cache
def shipped(role: str, executor: str = "eager") -> PretrainedModel:
    path = noisy_drafter() if role == "noisy" else f"shipped:{role}"
    settings = PretrainedModel.Settings(path=path, revision=None, weights="pretrained", chat_template="never")
    context = Context(torch.device("cpu"), torch.float32, Sampling(), StaticCache, executor_of(executor))
    return PretrainedModel(settings, context, role)


@cache
def model(role: str, sampling: Sampling, cache_name: str, executor: str = "eager") -> LanguageModel:
    loaded = shipped(role, executor)
    return loaded.shared(sampling, CACHES[cache_name], loaded.executor)


@cache
def verifier_of(sampling: Sampling, name: str) -> Verifier:
    return decoder_cases.verifier_of(VERIFIERS[name], sampling)


@cache
def requests() -> tuple:
    """Short prompts, so that compiled programs are needed for one bucket of columns only."""
    settings = JsonlData.Settings(path=short_prompts(), field="prompt", template=None, limit=PROMPTS)
    tokenizer = shipped("target").tokenizer
    return tuple(render(prompt, [], tokenizer, chat=False) for prompt in load(JsonlData(settings)))


def pair_of(kind) -> tuple[str, str]:
    return LARGE if kind in OF_THE_LARGE else LITTLE


def decode(
    rows, sampling, kind=None, cache_name="static", gamma=4, text_file=None, executor="eager", judge=None, pair=None
):
    """New tokens of the given requests, decoded in one batch; kind None is autoregressive."""
    pair = pair or pair_of(kind)
    target = model(pair[0], sampling, cache_name, executor)
    drafter = kind and make_drafter(kind, target, text_file, model(pair[1], sampling, cache_name, executor))
    jobs = [Sequence(r.tokens, len(r.tokens) + NEW_TOKENS, prompt_key(0, r.id)) for r in rows]
    spare = 1 if drafter is None else spare_of(kind, gamma)
    verifier = verifier_of(sampling, judge or ("iterative" if kind in TREES else "speculative"))
    queue = queued(target, drafter, jobs, len(jobs), verifier, FixedGamma(gamma), spare=spare, stops=target.stop_tokens)
    return [sequence.generated for sequence in queue.sequences]


@pytest.fixture(scope="module")
def code_text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "code.py"
    path.write_text("\n".join(r.text for r in requests()))
    return str(path)


@cache
def greedy_baseline(pair=LITTLE) -> list[list[int]]:
    return [decode([r], Sampling(temperature=0), pair=pair)[0] for r in requests()]


@cache
def sampled_baseline(pair=LITTLE) -> list[list[int]]:
    return decode(requests(), Sampling(temperature=1), pair=pair)


WAYS = [("static", 1), *((name, 3) for name in CACHES)]
# At temperature 0 the default run has all but those whose distribution test_distribution.py tests, and those that
# another one stands for; at 1 it has some in each of two tests.
SEEN_THERE = ("unigram", "random", "pass_lookahead", "medusa", "own_trees", "tree_sampled",
          "multi_draft", "mtp_distinct")  # fmt: skip
LIKE = {"mtp": "mtp_distinct", "eagle3": "eagle3_dynamic", "blockwise": "medusa"}
SINGLES = ("model", "bigram", "prompt_lookup", "suffix", "under_under_model", "tree_sampled")
MATCHED = ("ngram", "unigram", "tree_best", "multi_draft", "tree_independent")


@pytest.mark.parametrize(("kind", "cache_name", "batch_size"), in_turn(
    DRAFTERS, WAYS, [kind for kind in DRAFTERS if kind not in (*SEEN_THERE, *LIKE)]
))  # fmt: skip
def test_temperature_zero_equals_the_baseline(kind, cache_name, batch_size, code_text):
    rows, found = requests(), []
    for begin in range(0, PROMPTS, batch_size):
        part = rows[begin : begin + batch_size]
        found += decode(part, Sampling(temperature=0), kind, cache_name, text_file=code_text)
    assert found == greedy_baseline(pair_of(kind))


@pytest.mark.parametrize("kind", only(SINGLES, DRAFTERS))
def test_a_batch_is_its_singles_at_temperature_one(kind, code_text):
    sampling = Sampling(temperature=1)
    singles = [decode([r], sampling, kind, text_file=code_text)[0] for r in requests()]
    assert decode(requests(), sampling, kind, text_file=code_text) == singles


@pytest.mark.parametrize("judge", [slow_unless(judge in ("match", "rejection"), judge)
                                   for judge in ("match", "block", "rejection", "iterative")])  # fmt: skip
def test_every_verifier_keeps_the_text_of_a_batch(judge, code_text):
    sampling = Sampling(temperature=1)
    singles = [decode([r], sampling, "model", judge=judge)[0] for r in requests()]
    assert decode(requests(), sampling, "model", judge=judge) == singles
    greedy = Sampling(temperature=0)
    assert decode(requests(), greedy, "model", judge=judge) == greedy_baseline()


@pytest.mark.parametrize("kind", only(MATCHED, DRAFTERS))
def test_matching_writes_what_plain_decoding_writes(kind, code_text):
    """At any temperature: the token is p's own draw, whatever was guessed."""
    sampling = Sampling(temperature=1)
    found = decode(requests(), sampling, kind, text_file=code_text, judge="match")
    assert found == sampled_baseline(pair_of(kind))


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


@pytest.mark.parametrize(("executor", "temperature", "cache_name", "kind"), [
    ("plain", 0, "static", "model"), ("plain", 1, "paged", "model"), ("graphs", 1, "static", "model"),
    ("compiled", 0, "static", "model"), ("compiled", 1, "paged", None),
    *(pytest.param("compiled", *other, marks=pytest.mark.slow) for other in (
        (1, "static", "model"), (1, "static", "tree_distinct"), (0, "paged", "medusa"), (1, "paged", "early_exit"),
        (0, "static", "pass_lookahead"), (0, "static", "blockwise"), (1, "static", "multi_draft"))),
])  # fmt: skip
def test_every_executor_gives_the_tokens_of_eager_mode(executor, temperature, cache_name, kind, traced):
    """In a batch, in float32, so every token. Compiled functions are only traced."""
    sampling = Sampling(temperature=temperature)
    expected = decode(requests(), sampling, kind, gamma=2)
    made = len(traced)
    assert decode(requests(), sampling, kind, cache_name, gamma=2, executor=executor) == expected
    assert (len(traced) > made) == (executor == "compiled")


def test_autoregressive_decoding_equals_transformers_generate():
    loaded = shipped("target")
    for request, ours in zip(requests(), greedy_baseline(LARGE), strict=True):
        assert generated_by(loaded.module, request.tokens, NEW_TOKENS) == ours
