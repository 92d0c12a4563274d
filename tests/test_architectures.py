"""Every causal architecture that transformers lists: its own drafter, exactly; or refused by a sentence."""

import tempfile
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from architectures import spread, tiny_config, write
from conftest import CACHES, VERIFIERS, another, make_drafter, spare_of, verifier_of
from transformers import GenerationConfig

from specbench.cache.static import StaticCache
from specbench.context import Context
from specbench.decoding.clock import Stopwatch
from specbench.decoding.sampling import Sampling
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import Job, State
from specbench.executors.eager import EagerExecutor
from specbench.gamma_policies.fixed import FixedGamma
from specbench.models import pretrained
from specbench.models.likeness import reads_trees
from specbench.models.pretrained import PretrainedModel, footprint, load_tokenizer

PROMPTS = ([5, 9, 33, 17, 8], [40, 12, 7, 3, 44, 52, 6, 29], [11, 20, 31])
NEW, GAMMA = 8, 3


@pytest.fixture(scope="module", autouse=True)
def _one_tokenizer():
    """All models have the shipped tokenizer, which takes longer to read than a tiny model to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "load_tokenizer", lambda settings, role: tokenizer())
        yield


@cache
def tokenizer():
    return load_tokenizer(PretrainedModel.Settings(path="shipped:target", weights="pretrained"), "target")


def loaded(model_type: str) -> PretrainedModel:
    """A tiny model, built as a run builds it. Raises ConfigError."""
    folder = write(tiny_config(model_type), Path(tempfile.mkdtemp()) / model_type)
    settings = PretrainedModel.Settings(path=str(folder), revision=None, weights="random", chat_template="never")
    footprint(settings, "target", torch.float32)
    context = Context(torch.device("cpu"), torch.float32, Sampling(), StaticCache, EagerExecutor())
    model = PretrainedModel(settings, context, "target")
    spread(model.module)
    model.trees = reads_trees(model, model_type)  # with weights of which each matters
    model.module.generation_config = GenerationConfig()  # of the model's own law
    return model


def decode(model: PretrainedModel, temperature: float, rows: int, cache_name: str, kind: str):
    """New tokens of the first prompts, decoded in one batch by a model that is its own drafter, and the accepted share
    of each tested guess."""
    sampling = Sampling(temperature=temperature)
    target = model.shared(sampling, CACHES[cache_name], model.executor)
    drafter = make_drafter(kind, target, None, another(target))
    judge = verifier_of(VERIFIERS["speculative" if kind == "model" else "iterative"], sampling)
    jobs = [Job(prompt, len(prompt) + NEW, 7 + i) for i, prompt in enumerate(PROMPTS[:rows])]
    state = State.start(jobs, [], spare_of(kind, GAMMA), target.device)
    target.allocate(rows, state.tokens.shape[1])
    target.prefill(state)
    betas = []

    def record(state, scores, draft, verdict, kept):
        beta = judge.beta(scores.p, draft, verdict)
        steps = torch.arange(beta.shape[1]) < draft.steps()[:, None]
        betas.extend(beta[steps & (kept > 0)[:, None]].tolist())

    decode_speculative(state, target, drafter, FixedGamma(GAMMA), judge, Stopwatch(target.device), record)
    return state.new_tokens(), betas


def generated(model: PretrainedModel, prompts) -> list[list[int]]:
    """What transformers' generate() writes after prompts at temperature 0. It counts the positions of
    RoBERTa and its kin from 0, and their own forward does not: there the text is that of plain forwards."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        if model.decoder.first:
            for _ in range(NEW):
                ids = torch.cat([ids, model.module(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
            texts.append(ids[0, len(prompt) :].tolist())
            continue
        found = model.module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        texts.append(found[0, len(prompt) :].tolist())
    return texts


WAYS = [*product((0, 1), (1, 3), CACHES, ("model", "tree_distinct"))]


def check(model: PretrainedModel, temperature: float, rows: int, cache_name: str, kind: str, compared: int = 0) -> None:
    """Raises AssertionError if a model is not its own perfect drafter, or writes other texts than transformers, of
    which the last `compared` are looked at; 0 is all."""
    texts, betas = decode(model, temperature, rows, cache_name, kind)
    if temperature == 0:
        assert texts[-compared:] == generated(model, PROMPTS[:rows][-compared:])
    assert betas and min(betas) == pytest.approx(1, abs=1e-4)
