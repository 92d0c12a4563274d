"""Causal checkpoints whose frequencies change with a text's length, or which forbid tokens: texts are generate()'s."""

from functools import partial

import pytest
import torch
from checkpoints import checkpoint, edited
from decoder_cases import GREEDY, adapted, generated_by, queued, verifier_of
from small_runs import parts_of
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from specbench.cache.slots import StaticCache
from specbench.decoding.sequence import Sequence
from specbench.drafters.model import ModelDrafter
from specbench.models import cached_model, sizes
from specbench.models.language_model import LanguageModel
from specbench.models.reference_forward import stock_logits
from specbench.policies.base import FixedGamma
from specbench.verifiers.base import SpeculativeVerifier

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
             max_position_embeddings=96, initializer_range=0.6, pad_token_id=0, eos_token_id=None)  # fmt: skip
SWITCH, GAMMA = 24, 3
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [9.0] * 8,
            "original_max_position_embeddings": SWITCH}  # fmt: skip
SHORT, LONG = [3, 5, 7, 9, 3], list(range(20, 41))


def longrope() -> LanguageModel:
    torch.manual_seed(0)
    config = Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=SWITCH)
    return adapted(Phi3ForCausalLM(config).eval(), GREEDY)


def decoded(model: LanguageModel, *prompts, new: int = 12) -> list[list[int]]:
    """New tokens of each prompt, up to the model's context, in a row each; the model drafts for itself."""
    jobs = [Sequence(prompt, min(len(prompt) + new, model.context), key) for key, prompt in enumerate(prompts)]
    helper = model.shared(model.sampling, StaticCache, model.executor)
    drafter, judge = ModelDrafter(helper, model.vocab_size, GAMMA), verifier_of(SpeculativeVerifier, model.sampling)
    queue = queued(model, drafter, jobs, len(jobs), judge, FixedGamma(GAMMA), spare=GAMMA + 1, stops=model.stop_tokens)
    return [sequence.generated for sequence in queue.sequences]


def test_no_text_crosses_the_length_at_which_all_frequencies_change():
    model = longrope()
    assert model.context == SWITCH and "beyond 24 tokens" in model.limits[0]
    expected = [generated_by(model.module, SHORT, 12), generated_by(model.module, LONG, SWITCH - len(LONG))]
    assert decoded(model, SHORT, LONG) == expected


def test_beyond_that_length_a_text_depends_on_its_neighbours(monkeypatch):
    """Negative control: without the limit."""
    for module in (sizes, cached_model):
        monkeypatch.setattr(module, "rotary_switch", lambda config: 2**31 - 1)
    model = longrope()
    assert model.context == 96 and not model.limits
    assert decoded(model, SHORT, LONG)[0] != decoded(model, SHORT)[0]


def test_frequencies_that_grow_with_a_text_do_so_beyond_the_context_only():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = adapted(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)).eval(), GREEDY)
    assert model.context == 96
    before = model.module.model.rotary_emb.inv_freq.clone()
    assert len(decoded(model, SHORT, LONG, new=96)[0]) == 91
    assert torch.equal(model.module.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("forbid", ["suppress_tokens", "bad_words_ids"])
def test_what_a_causal_checkpoint_forbids_is_not_drawn(forbid):
    """Nor by the stock module as the verdict reads it. Negative control: the text without it has these tokens."""
    torch.manual_seed(0)
    module = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    free = decoded(adapted(module, GREEDY), SHORT)[0]
    forbidden = sorted({*free[:2]})
    setattr(module.generation_config, forbid, forbidden if forbid == "suppress_tokens" else [[t] for t in forbidden])
    model = adapted(module, GREEDY)
    [text] = decoded(model, SHORT)
    assert text == generated_by(module, SHORT, 12) and not {*text} & {*forbidden} and text != free
    logits = stock_logits(model, torch.tensor([[*SHORT, *text]]), len(SHORT))
    assert logits.argmax(-1).tolist() == text and logits[:, forbidden].isneginf().all()


def test_a_bad_word_that_is_a_stop_ends_a_text_all_the_same():
    torch.manual_seed(0)
    module = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    end = decoded(adapted(module, GREEDY), SHORT)[0][2]
    module.generation_config.update(eos_token_id=end, bad_words_ids=[[end]])
    [text] = decoded(adapted(module, GREEDY), SHORT)
    assert text == generated_by(module, SHORT, 12) and text[-1] == end


def test_what_is_forbidden_as_the_first_token_alone_is_named_in_a_note(tmp_path):
    folder = checkpoint(tmp_path / "model")
    edited("generation_config.json", partial(dict, begin_suppress_tokens=[7], suppress_tokens=[9]))(folder)
    parts = parts_of("target=model", f"target.path={folder}", "drafter=ngram")
    [note] = [note for note in parts.notes if "begin_suppress_tokens" in note]
    assert parts.target.forbidden.tolist() == [9] and "suppress_tokens=[9]" not in note
