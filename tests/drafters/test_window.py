"""The target with sinks and a window: q against a forward with an explicit mask, on every cache, and refusals."""

import copy

import pytest
import torch
from architectures import spread, tiny_config
from decoder_cases import CACHES, DigitTokenizer
from small_runs import composed, parts_of, small
from transformers import AutoModelForCausalLM

from specbench.config.validate import check
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import Job, State
from specbench.drafters.early_exit import WindowDrafter
from specbench.errors import ConfigError
from specbench.executors.auto import CompiledExecutor
from specbench.executors.compile_cache import Programs
from specbench.executors.eager import EagerExecutor
from specbench.models.language_model import LanguageModel
from specbench.models.shared_cache import NearColumns

SINKS, WINDOW, GAMMA = 2, 3, 3
TEXTS = [[5, 9, 33, 17, 8, 21, 4, 4, 12, 40], [7, 3, 11, 2], [6]]


def module_of(model_type):
    module = AutoModelForCausalLM.from_config(tiny_config(model_type)).eval()
    with torch.inference_mode():
        spread(module)
    return module


def target_of(module, cache="static", executor=None):
    return LanguageModel(module, DigitTokenizer(), name="tiny", sampling=Sampling(), new_cache=CACHES[cache],
                         executor=executor or EagerExecutor())  # fmt: skip


def drafted(module, cache, window):
    """A draft behind ragged texts."""
    target = target_of(module, cache)
    state = State.start([Job(text, 30, key) for key, text in enumerate(TEXTS)], [], 20, target.device)
    target.allocate(len(TEXTS), 60)
    target.prefill(state)
    drafter = WindowDrafter(NearColumns(target, target.sampling, SINKS, window), target.vocab_size, GAMMA)
    drafter.begin(state)
    return drafter.propose(state, [GAMMA] * len(TEXTS))


def expected(module, text, guesses, window):
    """q of each guess: the text's tokens but the last see all before them, the others sinks and window alone."""
    tokens = torch.tensor([[*text, *guesses]])
    near, (rows, columns) = len(text) - 1, torch.meshgrid(*[torch.arange(tokens.shape[1])] * 2, indexing="ij")
    sees = (columns <= rows) & ((rows < near) | (columns < SINKS) | (columns > rows - window))
    logits = module(input_ids=tokens, attention_mask=sees[None, None], use_cache=False).logits[0]
    return logits[near:-1].softmax(-1)


@pytest.mark.parametrize(("model_type", "cache"), [("llama", "static"), ("llama", "paged"), ("gpt2", "dynamic")])
def test_q_is_that_of_sinks_and_window(model_type, cache):
    module = module_of(model_type)
    draft = drafted(module, cache, WINDOW)
    for row, text in enumerate(TEXTS):
        q = [expected(module, text, draft.tokens[row].tolist(), window) for window in (WINDOW, WINDOW + 1)]
        assert torch.allclose(draft.probs[row], q[0], atol=1e-5)
        assert len(text) < 4 or not torch.allclose(draft.probs[row], q[1], atol=1e-3)  # control: another window


def test_a_window_over_the_whole_text_is_the_target():
    module = module_of("llama")
    draft = drafted(module, "static", 20)
    for row, text in enumerate(TEXTS):
        tokens = torch.tensor([[*text, *draft.tokens[row].tolist()]])
        assert torch.allclose(draft.probs[row], module(input_ids=tokens).logits[0, len(text) - 1 : -1].softmax(-1),
                              atol=1e-5)  # fmt: skip


@pytest.mark.slow  # test_q_is_that_of_sinks_and_window, without a program
def test_a_program_that_a_short_text_made_reads_the_window_of_a_long_one(traced, tmp_path):
    module = module_of("llama")
    executor = CompiledExecutor(["plain"], programs=Programs(tmp_path))
    target = target_of(copy.deepcopy(module), executor=executor)
    drafter = WindowDrafter(NearColumns(target, target.sampling, SINKS, 20), target.vocab_size, GAMMA)
    for length in (10, 50):
        text = [7 * place % 40 for place in range(length)]
        state = State.start([Job(text, 60, 0)], [], 20, target.device)
        target.allocate(1, 128)
        target.prefill(state)
        drafter.begin(state)
        draft = drafter.propose(state, [GAMMA])
        q = expected(module, text, draft.tokens[0].tolist(), 20)
        assert torch.allclose(draft.probs[0], q, atol=1e-5)
    assert len(traced) == 1


def test_positions_that_follow_from_columns_are_refused():
    context = type("Run", (), {"gamma": 2, "sampling": Sampling()})()
    settings = WindowDrafter.Settings(sinks=1, window=2, temperature=None, top_k=None, top_p=None)
    settings.own = lambda context: context
    with pytest.raises(ConfigError, match=r"drafter=window is not possible with target\.path=tiny: its attention"):
        WindowDrafter.from_settings(settings, context, target_of(module_of("bloom")))
    assert WindowDrafter.from_settings(settings, context, target_of(module_of("llama")))  # control


@pytest.mark.parametrize(("words", "told"), [
    ("drafter=window drafter.window=0", "drafter.window=0 is not allowed: it must be an integer >= 1"),
    ("drafter=window drafter.sinks=-1", "drafter.sinks=-1 is not allowed"),
])  # fmt: skip
def test_bad_settings_are_refused(words, told):
    with pytest.raises(ConfigError, match=told):
        check(composed(*small(*words.split())))


@pytest.mark.slow
def test_its_weights_are_the_targets():
    parts = parts_of("drafter=window", "drafter.window=8")
    assert parts.drafter.own_bytes == 0 and parts.drafter.models == []
