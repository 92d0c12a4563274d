"""Architectures of all kinds of masks, positions, experts and states: each is its own perfect drafter, or refused."""

from functools import cache

import pytest
import torch
from checkpoints import config_only
from decoder_cases import CACHES, VERIFIERS, another, generated_by, make_drafter, queued, spare_of, verifier_of
from transformers import CONFIG_MAPPING, GenerationConfig

from specbench.cache.slots import StaticCache
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.errors import ConfigError
from specbench.executors.eager import EagerExecutor
from specbench.models import load
from specbench.models.load import Context, PretrainedModel, footprint, load_tokenizer
from specbench.models.recurrent import recurrence_of
from specbench.models.reference_forward import reads_trees
from specbench.policies.base import FixedGamma

PROMPTS = ([5, 9, 33, 17, 8], [40, 12, 7, 3, 44, 52, 6, 29], [11, 20, 31])
NEW, GAMMA = 8, 3
SIZES = dict(vocab_size=4160, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64, bos_token_id=1, eos_token_id=1,
             pad_token_id=1)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=48, num_experts_per_tok=2)
SHAPES = {  # windows and chunks are shorter than the texts
    "llama": {},
    "qwen3": {},
    "gemma2": dict(query_pre_attn_scalar=8, sliding_window=5),
    "gpt2": {},
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "bart": dict(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, is_decoder=True,
                 is_encoder_decoder=False),
    "gpt_neox": {},
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    "deepseek_v3": dict(EXPERTS, num_key_value_heads=4, n_routed_experts=4, kv_lora_rank=32, q_lora_rank=32,
                        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_group=2, topk_group=2,
                        first_k_dense_replace=1),
    "qwen3_next": dict(EXPERTS, shared_expert_intermediate_size=48, num_experts=4, linear_key_head_dim=8,
                       linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
                       layer_types=["linear_attention", "full_attention"]),
    "mamba": dict(state_size=16, time_step_rank=2),
    "roberta": dict(is_decoder=True),
    "llama4_text": dict(intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=2, no_rope_layers=[1, 0],
                        attention_chunk_size=5, layer_types=["chunked_attention", "full_attention"]),
    "qwen2": {},
}  # fmt: skip
REFUSED = ("bloom", "xlm")


@pytest.fixture(scope="module", autouse=True)
def _one_tokenizer():
    """All models have the shipped tokenizer, which takes longer to read than a tiny model to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load_tokenizer", lambda settings, role: tokenizer())
        yield


@cache
def tokenizer():
    settings = PretrainedModel.Settings(path="shipped:target", weights="pretrained", chat_template="never")
    return load_tokenizer(settings, "target")


@pytest.fixture
def loaded(tmp_path):
    """A function that makes a tiny model, built as a run builds it, with `more` in its configuration."""

    def make(model_type: str, **more) -> PretrainedModel:
        sizes = SIZES | SHAPES.get(model_type, {}) | more
        folder = config_only(CONFIG_MAPPING[model_type](**sizes), tmp_path / model_type)
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


def spread(module: torch.nn.Module) -> None:
    """Gives a module random weights with which every token matters, since they are large."""
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() >= 2:
            weight.copy_(1.5 * noise / weight.shape[-1] ** 0.5)
        else:
            weight.add_(0.1 * noise)


def decode(model: PretrainedModel, temperature: float, rows: int, cache_name: str, kind: str):
    """New tokens of a batch of a model that drafts for itself, and the accepted share of each tested guess."""
    sampling = Sampling(temperature=temperature)
    target = model.shared(sampling, CACHES[cache_name], model.executor)
    drafter = make_drafter(kind, target, None, another(target))
    judge = verifier_of(VERIFIERS["speculative" if kind == "model" else "iterative"], sampling)
    jobs = [Sequence(prompt, len(prompt) + NEW, 7 + i) for i, prompt in enumerate(PROMPTS[:rows])]
    betas = []

    def record(state, scores, draft, verdict, kept):
        beta = judge.beta(scores.p, draft, verdict)
        steps = torch.arange(beta.shape[1]) < draft.steps()[:, None]
        betas.extend(beta[steps & (kept > 0)[:, None]].tolist())

    spare = spare_of(kind, GAMMA)
    queue = queued(target, drafter, jobs, rows, judge, FixedGamma(GAMMA), spare=spare, after_round=record)
    return [sequence.generated for sequence in queue.sequences], betas


def generated(model: PretrainedModel, prompts) -> list[list[int]]:
    """What transformers' generate() writes after prompts at temperature 0. It counts the positions of RoBERTa and its
    kin from 0, and their own forward does not: there the text is that of plain forwards."""
    if not model.decoder.first:
        return [generated_by(model.module, prompt, NEW) for prompt in prompts]
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(NEW):
            ids = torch.cat([ids, model.module(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        texts.append(ids[0, len(prompt) :].tolist())
    return texts


def check(model: PretrainedModel, temperature: float, rows: int, cache_name: str, kind: str) -> None:
    """Raises AssertionError if a model is not its own perfect drafter, or writes other texts than transformers."""
    texts, betas = decode(model, temperature, rows, cache_name, kind)
    if temperature == 0:
        assert texts == generated(model, PROMPTS[:rows])
    assert betas and min(betas) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("number", "model_type"), enumerate(SHAPES))
def test_an_architecture_runs_exactly(number, model_type, loaded):
    """In a batch; architectures take turns with the caches, chains and trees."""
    model = loaded(model_type)
    kind = "tree_distinct" if model.trees and number // 2 % 2 else "model"
    check(model, 0, 2, [*CACHES][number % 3], kind)


@pytest.mark.parametrize("model_type", REFUSED)
def test_an_architecture_that_cannot_be_exact_is_refused(model_type, loaded):
    with pytest.raises(ConfigError) as refused:
        loaded(model_type)
    assert len(str(refused.value).splitlines()) == 1


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
