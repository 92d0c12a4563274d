"""Every causal architecture that transformers lists: its own drafter, exactly; or refused by a sentence. Families."""

from functools import cache
from itertools import product

import pytest
import torch
from architectures import LISTED, tiny_config, write
from architectures_page import is_of_this_release, loaded, outcome, rows
from choosing import slow_unless
from decoder_cases import CACHES, VERIFIERS, another, make_drafter, spare_of, verifier_of
from small_runs import parts_of
from transformers import LlamaConfig, MambaConfig, T5Config

from specbench.decoding.sampling import Sampling
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import Job, State
from specbench.decoding.timer import Timer
from specbench.errors import ConfigError
from specbench.executors import layer_programs
from specbench.executors.compile_cache import Programs
from specbench.executors.layer_programs import LayerPrograms
from specbench.models import pretrained
from specbench.models.architecture import NO_FAMILY, family_of
from specbench.models.checkpoint_checks import reads_trees
from specbench.models.pretrained import PretrainedModel, load_tokenizer
from specbench.policies.fixed import FixedGamma

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
    return load_tokenizer(
        PretrainedModel.Settings(path="shipped:target", weights="pretrained", chat_template="never"), "target"
    )


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

    decode_speculative(state, target, drafter, FixedGamma(GAMMA), judge, Timer(target.device), record)
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


@pytest.mark.parametrize("model_type", [slow_unless(place % 10 == 1, name) for place, name in enumerate(LISTED)])
def test_a_listed_architecture_runs_exactly_or_is_refused(model_type):
    """Once in a batch; architectures take turns with the caches, chains and trees. What is not on the page is new."""
    number = LISTED.index(model_type)
    model, row = outcome(model_type)
    if model is not None:
        kind = "tree_distinct" if model.trees and number // 2 % 2 else "model"
        check(model, 0, 2, [*CACHES][number % 3], kind, compared=1)
    assert not is_of_this_release() or rows()[model_type] == row


@pytest.mark.slow
@pytest.mark.parametrize("model_type", LISTED)
def test_a_listed_architecture_runs_exactly_in_every_way(model_type):
    model, _ = outcome(model_type)
    for way in WAYS if model else ():
        if model.trees or way[-1] == "model":
            check(model, *way)


@pytest.mark.parametrize("model_type", [slow_unless(place % 10 == 3, name) for place, name in enumerate(LISTED)])
def test_layers_that_may_run_as_programs_are_called_as_they_are_without(model_type, monkeypatch, tmp_path):
    """As on a CPU by default, of models with several layers: transformers gives some their arguments by position."""
    model, _ = outcome(model_type)
    if model is None:
        pytest.skip("it is refused")
    expected, _ = decode(model, 0, 1, "static", "model")
    monkeypatch.setattr(layer_programs, "LEAST_LAYERS", 1)
    layers = LayerPrograms(Programs(tmp_path))
    layers.attach(model.module)
    if not layers.attached:
        pytest.skip("it has no list of layers that are alike")
    texts, betas = decode(model, 0, 1, "static", "model")
    assert texts == expected and min(betas) == pytest.approx(1, abs=1e-4)


VARIANTS = {
    "Falcon with ALiBi": ("falcon", dict(alibi=True, new_decoder_architecture=False)),
    "GPT-Neo, local layers alone": ("gpt_neo", dict(attention_types=[[["local"], 2]], num_layers=2)),
    "Qwen2 with a sliding window": (
        "qwen2", dict(use_sliding_window=True, layer_types=["sliding_attention", "full_attention"], sliding_window=3)
    ),
    "Llama 4, chunks alone": ("llama4_text", dict(layer_types=["chunked_attention"] * 2, no_rope_layers=[1, 1])),
    "Gemma 2 with a low cap": ("gemma2", dict(attn_logit_softcapping=2.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_other_masks_are_right_for_ragged_rows_and_trees(name):
    model = loaded(VARIANTS[name][0], **VARIANTS[name][1])
    assert model.trees
    for way in ((0, 3, "paged", "model"), (0, 3, "static", "tree_distinct"), (1, 3, "dynamic", "tree_distinct")):
        check(model, *way)


@pytest.mark.parametrize(("model_type", "more", "spoil"), [
    ("falcon", dict(alibi=True), lambda model: setattr(model.decoder, "patched", None)),
    ("gpt_neo", {}, lambda model: setattr(model.decoder, "patched", None)),
    ("bloom", {}, lambda model: setattr(model.decoder, "patched", None)),
    ("bart", {}, lambda model: setattr(model.decoder, "patched", None)),
    ("roberta", {}, lambda model: setattr(model.decoder, "first", 0)),
    ("llama4_text", {}, lambda model: setattr(model.mask, "chunk", None)),
    ("gemma2", {}, lambda model: setattr(model.mask, "window", 2)),
])  # fmt: skip
def test_a_model_that_is_called_otherwise_is_refused(model_type, more, spoil):
    """Negative control of the comparison when a model loads."""
    model = loaded(model_type, **more)
    spoil(model)
    with pytest.raises(ConfigError, match="does not follow the positions and masks"):
        reads_trees(model, model_type)


def test_executors_that_trace_are_refused_where_positions_are_no_arguments(tmp_path):
    folder = write(tiny_config("bloom"), tmp_path / "bloom")
    with pytest.raises(ConfigError, match="is not possible with this executor: its positions"):
        parts_of("target=model", f"target.path={folder}", "target.weights=random", "drafter=ngram",
                 "executor=compiled")  # fmt: skip


def test_a_tree_is_refused_for_a_model_of_chains(tmp_path):
    """MPT's ALiBi bias is one for all rows."""
    folder = write(tiny_config("mpt"), tmp_path / "mpt")
    given = [f"{role}.{key}" for role in ("target", "drafter") for key in (f"path={folder}", "weights=random")]
    with pytest.raises(ConfigError, match="drafter trees are not possible with"):
        parts_of("target=model", "drafter=tree", *given)
    assert parts_of("target=model", "drafter=model", *given).target.trees is False


def test_a_family_follows_from_the_configuration():
    assert family_of(LlamaConfig()) is family_of(T5Config()) is NO_FAMILY
    hybrid = family_of(LlamaConfig(layer_types=["linear_attention"] * 32))
    assert family_of(MambaConfig()) is hybrid and hybrid is not NO_FAMILY
