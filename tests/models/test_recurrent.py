"""Recurrent and hybrid models: texts, acceptance and the output distribution behind states that are kept and restored.

The models are tiny and random, of transformers' own classes. What is compared with is their `generate()`, and for
sampled texts the law of a chain that is known.
"""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from checkpoints import checkpoint
from decoder_cases import CACHES, V, adapted, generated_by, queued, verifier_of
from distribution_cases import FEW, SAMPLING, Distribution, new_tokens, read_by, worst_excess
from small_runs import parts_of, run
from tabular import RecurrentMarkov
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from specbench.cache.slots import StaticCache
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Clock
from specbench.drafters.model import ModelDrafter
from specbench.errors import ConfigError
from specbench.models.language_model import LanguageModel
from specbench.models.recurrent import Kept, RowStates
from specbench.models.reference_forward import reads_trees
from specbench.policies.base import FixedGamma
from specbench.verifiers.base import SpeculativeVerifier

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0)  # fmt: skip
DELTA = dict(layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4, linear_num_key_heads=4,
             linear_key_head_dim=8, linear_value_head_dim=8)  # fmt: skip
EXPERTS = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
SHAPES = {
    "mamba": dict(state_size=8, time_step_rank=4),
    "mamba2": dict(state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    "recurrent_gemma": dict(num_hidden_layers=3, lru_width=32, attention_window_size=6,
                            block_types=["recurrent", "recurrent", "attention"]),
    "jamba": dict(num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1,
                  expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4),
    "qwen3_next": dict(shared_expert_intermediate_size=16, **DELTA, **EXPERTS),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
}  # fmt: skip
ONE_BY_ONE = {"mamba", "jamba", "recurrent_gemma"}  # in every version of transformers
PROMPTS = ([3, 5, 7, 9, 3], [9, 1], [8, 8, 2, 4, 6, 1, 2, 3, 4, 5, 6, 7])
NEW_TOKENS, GAMMA = 10, 3


@cache
def module_of(kind: str, seed: int = 0):
    """A tiny model with random weights, large enough that texts vary."""
    known = {name: value for name, value in SIZES.items() if hasattr(CONFIG_MAPPING[kind](), name)}
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**known | SHAPES[kind])).eval()
    for name, weight in module.named_parameters():
        if weight.ndim > 1 and "A_log" not in name:
            weight.data.mul_(3)
    module.generation_config.eos_token_id = None
    return module


@cache
def generated(kind: str) -> list[list[int]]:
    """What transformers' own loop writes at temperature 0."""
    return [generated_by(module_of(kind), prompt, NEW_TOKENS) for prompt in PROMPTS]


def model_of(module, temperature: float, columns: str = "static") -> LanguageModel:
    return adapted(module, Sampling(temperature), columns)


def decode(target: LanguageModel, helper: LanguageModel | None, rows: int, chunk: int = 2048):
    """Texts of all prompts through `rows` rows, and how many guesses were drafted and accepted."""
    jobs = [Sequence(prompt, len(prompt) + NEW_TOKENS, key) for key, prompt in enumerate(PROMPTS)]
    judge, found = verifier_of(SpeculativeVerifier, target.sampling), SimpleNamespace(drafted=0, accepted=0)

    def count(state, scores, draft, verdict, kept):
        found.drafted += int(draft.count[kept > 0].sum())
        found.accepted += int(verdict.accepted[kept > 0].sum())

    drafter = helper and ModelDrafter(helper, target.vocab_size, GAMMA)
    queue = queued(target, drafter, jobs, rows, judge, FixedGamma(GAMMA), chunk, GAMMA + 1, count)
    found.texts = [sequence.generated for sequence in queue.sequences]
    return found


def check_kind(kind: str, cases) -> None:
    """Texts equal those of `generate()`, with a drafter, and plainly; its own guesses are all accepted."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    if kind == "recurrent_gemma" and "layer_types" not in CONFIG_MAPPING[kind].attribute_map:
        pytest.skip("this transformers has its keys and values in the modules too, which is refused")
    module, other = module_of(kind), module_of(kind, seed=1)
    for temperature, columns, rows in cases:
        target = model_of(module, temperature, columns)
        assert target.recurrence is not None and (target.recurrence.one_by_one or kind not in ONE_BY_ONE)
        itself = decode(target, model_of(module, temperature, columns), rows)
        assert itself.accepted == itself.drafted > 0
        if temperature == 0:
            helped = decode(target, model_of(other, 0, columns), rows, chunk=3)
            assert helped.accepted < helped.drafted  # states were restored
            plain = decode(target, None, rows, chunk=3)
            assert itself.texts == helped.texts == plain.texts == generated(kind)


def test_texts_and_acceptance():
    check_kind("mamba", [(0.0, "static", 2), (1.0, "dynamic", 1)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
def test_texts_and_acceptance_of_every_kind(kind):
    check_kind(kind, [(t, columns, rows) for t in (0.0, 1.0) for columns in CACHES for rows in (1, 2, 3)])


class TakenForColumns(RowStates):
    """Negative control: a state that is cut to a length like columns, by forgetting nothing."""

    def point_before(self, row, length):
        return length

    def truncate(self, lengths):
        for kept, length in zip(self.kept, lengths, strict=True):
            if kept and kept[-1].read > length:
                kept[-1] = Kept(length, kept[-1].states)


def sampled(few_contexts, one_by_one: bool, trials: int = FEW):
    """What each of many rows wrote after PROMPT, [trials, new tokens]: chains with a state, of both models."""
    models = []
    for table in (few_contexts.target, few_contexts.similar):
        model = model_of(RecurrentMarkov(table), SAMPLING.temperature)
        assert not model.recurrence.one_by_one
        model.recurrence.one_by_one = one_by_one
        models.append(model)
    target, helper = models
    state = read_by(target, trials, GAMMA + 1)
    judge = verifier_of(SpeculativeVerifier, SAMPLING)
    drafter = ModelDrafter(helper, V, GAMMA)
    decode_speculative(state, target, drafter, FixedGamma(GAMMA), judge, Clock())
    return new_tokens(state)


@pytest.mark.slow
@pytest.mark.parametrize("one_by_one", [False, True])
def test_distribution_behind_restored_states(few_contexts, one_by_one):
    assert worst_excess(sampled(few_contexts, one_by_one), Distribution(few_contexts.target)) < 1


def test_a_state_that_is_not_restored_is_caught(few_contexts, monkeypatch):
    monkeypatch.setattr("specbench.models.recurrent.RowStates", TakenForColumns)
    outputs = sampled(few_contexts, one_by_one=False)
    assert worst_excess(outputs, Distribution(few_contexts.target)) > 1


def test_a_state_that_was_not_kept_is_an_error():
    found = RowStates(2)
    found.after(range(2), {"state": torch.ones(2, 4)}, tokens=3)
    with pytest.raises(RuntimeError, match="row 1 has no state behind 2 tokens"):
        found.truncate([3, 2])
    found.truncate([3, 0])
    states = found.before(range(2))
    assert states is not None and states["state"][:, 0].tolist() == [1, 0]


@pytest.mark.parametrize(("kind", "match"), [("xlstm", "kept in a way that is not known"),
                                             ("mamba", "does not follow the positions and masks")])  # fmt: skip
def test_a_model_whose_state_cannot_be_followed_is_refused(kind, match, monkeypatch):
    if kind == "mamba":  # a state that is lost between forwards
        monkeypatch.setattr(RowStates, "before", lambda states, rows: None)
        module = module_of(kind)
    else:
        shape = dict(vocab_size=64, hidden_size=32, num_heads=4, num_blocks=2, embedding_dim=32)
        module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape))
    with pytest.raises(ConfigError, match=match):
        reads_trees(model_of(module, 0.0), kind)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of a recurrent model and a hybrid one, with the shipped tokenizer."""
    made = {}
    for kind in ("mamba", "qwen3_next"):
        made[kind] = checkpoint(tmp_path_factory.mktemp(kind), model_type=kind, eos_token_id=None, **SHAPES[kind])
    return made


@pytest.mark.slow
def test_a_run(folders, tmp_path):
    """A hybrid target with a recurrent drafter, two rows: the verdict reads the texts with the stock module."""
    paths = [f"target.path={folders['qwen3_next']}", f"drafter.path={folders['mamba']}"]
    parts = parts_of("target=model", "drafter=model", *paths, "batch_size=2", "temperature=0", "gamma=2")
    found, _ = run(parts, tmp_path)
    assert found.lossless["passed"] is True
    assert found.counts["accepted"] < found.counts["drafted"]


@pytest.mark.parametrize("kind", ["mamba", "qwen3_next"])
def test_rounds_without_guesses_forget_those_of_the_round_before(kind):
    """After a rejected draft and rounds that draft nothing, q is the module's own."""
    state = State.start([Sequence([3, 5, 7, 9, 3], 24, 0)], [], GAMMA + 1, torch.device("cpu"))
    drafter = ModelDrafter(model_of(module_of(kind), 1.0), 64, GAMMA)
    drafter.begin(state)
    for gamma in (GAMMA, 0, 0, GAMMA):
        draft, length = drafter.propose(state, [gamma]), state.lengths[0]
        if gamma:
            text = torch.cat([state.tokens[:, :length], draft.tokens], 1)
            expected = module_of(kind)(input_ids=text, use_cache=False).logits.softmax(-1)
            assert torch.allclose(draft.probs.float(), expected[:, length - 1 : -1], atol=1e-4)
            token = (int(draft.tokens[0, 0]) + 1) % 64  # the first guess is rejected
        state.tokens[0, length] = token
        state.length.add_(1)
        state.at(0).tokens.append(token)


def test_parts_of_the_model_have_columns_of_their_own():
    """Keys and values of attention, and the keys with which sparse attention chooses, in any order of layers."""
    found = StaticCache(1, 4)
    found.place(torch.arange(2)[None], 2)
    for layer in (1, 3):
        new = torch.full((1, 1, 2, 4), float(layer))
        found.update(new, -new, layer)
        found.update_indexer(10 * new[:, 0], layer)
    stored = [float(tensor[:, :, :2].mean()) for tensor in found.tensors() if tensor.numel()]
    assert stored == [1, -1, 10, 3, -3, 30]


@pytest.mark.parametrize(
    ("override", "choose"),
    [
        ("drafter=tree", "drafter=model, ngram or prompt_lookup"),
        ("executor=compiled", "executor=auto or eager"),
        ("attention=triton", "attention=sdpa"),
        ("decoding=beam", "decoding=sampling"),
    ],
)
def test_what_cannot_follow_a_state_is_refused(folders, override, choose):
    path = folders["mamba"]
    with pytest.raises(ConfigError, match=f"^{override} is not possible with .*{path}.*{choose}$"):
        parts_of("target=model", f"target.path={path}", "drafter=model", f"drafter.path={path}", override)
