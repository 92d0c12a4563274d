"""Every causal architecture that transformers lists is its own perfect drafter, or refused by a sentence."""

from functools import cache
from itertools import product

import pytest
import torch
from architectures import LISTED, spread, tiny_config, write
from choosing import slow_unless
from decoder_cases import CACHES, VERIFIERS, another, make_drafter, spare_of, verifier_of
from transformers import GenerationConfig

from specbench.cache.static import StaticCache
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Timer
from specbench.errors import ConfigError
from specbench.executors.eager import EagerExecutor
from specbench.models import load
from specbench.models.agreement import reads_trees
from specbench.models.context import Context
from specbench.models.load import PretrainedModel, footprint, load_tokenizer
from specbench.models.recurrent import recurrence_of
from specbench.policies.fixed import FixedGamma

PROMPTS = ([5, 9, 33, 17, 8], [40, 12, 7, 3, 44, 52, 6, 29], [11, 20, 31])
NEW, GAMMA = 8, 3
MUST_RUN = ("llama", "qwen3", "gemma2", "gpt2", "opt", "deepseek_v3", "qwen3_next", "mamba", "roberta", "llama4_text")
WAYS = [*product((0, 1), (1, 3), CACHES, ("model", "tree_distinct"))]


@pytest.fixture(scope="module", autouse=True)
def _one_tokenizer():
    """All models have the shipped tokenizer, which takes longer to read than a tiny model to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load_tokenizer", lambda settings, role: tokenizer())
        yield


@cache
def tokenizer():
    return load_tokenizer(
        PretrainedModel.Settings(path="shipped:target", weights="pretrained", chat_template="never"), "target"
    )


@pytest.fixture
def loaded(tmp_path):
    """A function that makes a tiny model, built as a run builds it, with `more` in its configuration."""

    def make(model_type: str, **more) -> PretrainedModel:
        folder = write(tiny_config(model_type, **more), tmp_path / model_type)
        settings = PretrainedModel.Settings(path=str(folder), revision=None, weights="random", chat_template="never")
        footprint(settings, "target", torch.float32)
        context = Context(torch.device("cpu"), torch.float32, Sampling(), StaticCache, EagerExecutor())
        model = PretrainedModel(settings, context, "target")
        spread(model.module)  # weights of which each matters
        if model.recurrence is not None:
            model.recurrence = recurrence_of(model.module, model.mask, f"target.path={folder}")
        model.trees = reads_trees(model, f"target.path={folder}")
        model.module.generation_config = GenerationConfig()  # of the model's own distribution
        return model

    return make


def decode(model: PretrainedModel, temperature: float, rows: int, cache_name: str, kind: str):
    """New tokens of the first prompts, decoded in one batch by a model that is its own drafter, and the accepted share
    of each tested guess."""
    sampling = Sampling(temperature=temperature)
    target = model.shared(sampling, CACHES[cache_name], model.executor)
    drafter = make_drafter(kind, target, None, another(target))
    judge = verifier_of(VERIFIERS["speculative" if kind == "model" else "iterative"], sampling)
    jobs = [Sequence(prompt, len(prompt) + NEW, 7 + i) for i, prompt in enumerate(PROMPTS[:rows])]
    state = State.start(jobs, [], spare_of(kind, GAMMA), target.device)
    target.allocate(rows, state.tokens.shape[1])
    target.prefill(state)
    betas = []

    def record(state, scores, draft, verdict, kept):
        beta = judge.beta(scores.p, draft, verdict)
        steps = torch.arange(beta.shape[1]) < draft.steps()[:, None]
        betas.extend(beta[steps & (kept > 0)[:, None]].tolist())

    decode_speculative(state, target, drafter, FixedGamma(GAMMA), judge, Timer(target.device), record)
    return state.generated, betas


def generated(model: PretrainedModel, prompts) -> list[list[int]]:
    """What transformers' generate() writes after prompts at temperature 0. It counts the positions of RoBERTa and its
    kin from 0, and their own forward does not: there the text is that of plain forwards."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        if model.decoder.first:
            for _ in range(NEW):
                ids = torch.cat([ids, model.module(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        else:
            mask = torch.ones_like(ids)
            ids = model.module.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        texts.append(ids[0, len(prompt) :].tolist())
    return texts


def check(model: PretrainedModel, temperature: float, rows: int, cache_name: str, kind: str) -> None:
    """Raises AssertionError if a model is not its own perfect drafter, or writes other texts than transformers."""
    texts, betas = decode(model, temperature, rows, cache_name, kind)
    if temperature == 0:
        assert texts == generated(model, PROMPTS[:rows])
    assert betas and min(betas) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "model_type", [slow_unless(name in MUST_RUN or place % 30 == 1, name) for place, name in enumerate(LISTED)]
)
def test_a_listed_architecture_runs_exactly_or_is_refused(model_type, loaded):
    """In a batch; architectures take turns with the caches, chains and trees."""
    number = LISTED.index(model_type)
    try:
        model = loaded(model_type)
    except ConfigError as error:
        assert model_type not in MUST_RUN and len(str(error).splitlines()) == 1, error
        return
    kind = "tree_distinct" if model.trees and number // 2 % 2 else "model"
    check(model, 0, 2, [*CACHES][number % 3], kind)


VARIANTS = {
    "Qwen2 with a sliding window": (
        "qwen2",
        dict(use_sliding_window=True, layer_types=["sliding_attention", "full_attention"], sliding_window=3),
    ),
    "Llama 4, chunks alone": ("llama4_text", dict(layer_types=["chunked_attention"] * 2, no_rope_layers=[1, 1])),
    "Gemma 2 with a low cap": ("gemma2", dict(attn_logit_softcapping=2.0)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_other_masks_are_right_for_ragged_rows_and_trees(name, loaded):
    model = loaded(VARIANTS[name][0], **VARIANTS[name][1])
    assert model.trees
    for way in ((0, 3, "paged", "model"), (0, 3, "static", "tree_distinct"), (1, 3, "dynamic", "tree_distinct")):
        check(model, *way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_learned_position_is_exact_in_every_way(way, loaded):
    check(loaded("bart"), *way)


@pytest.mark.parametrize(
    ("model_type", "spoil"),
    [
        ("bart", lambda model: setattr(model.decoder, "positions", None)),
        ("roberta", lambda model: setattr(model.decoder, "first", 0)),
        ("llama4_text", lambda model: setattr(model.mask, "chunk", None)),
        ("gemma2", lambda model: setattr(model.mask, "window", 2)),
    ],
)
def test_a_model_that_is_called_otherwise_is_refused(model_type, spoil, loaded):
    """Negative control of the comparison when a model loads."""
    model = loaded(model_type)
    spoil(model)
    with pytest.raises(ConfigError, match="does not follow the positions and masks"):
        reads_trees(model, model_type)
