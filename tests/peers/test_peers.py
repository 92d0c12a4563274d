"""transformers' decoders beside a run: the right text under its settings, timed without the prompt."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from small_runs import parts_of
from transformers import GenerationConfig

from specbench.decoding.sequence import Sequence
from specbench.models.generation import DECIDED, not_applied
from specbench.peers.transformers import TransformersPeers, Watch, assistants

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add"
# Values, which are no defaults, of keys that a generation_config may have and that change a text or how it is decoded.
ODD = {
    "num_beams": 3, "min_p": 1.0, "typical_p": 0.1, "no_repeat_ngram_size": 1, "forced_eos_token_id": 7,
    "exponential_decay_length_penalty": (1, 9.0), "suppress_tokens": [5], "begin_suppress_tokens": [6],
    "sequence_bias": [[[5], -9.0]], "guidance_scale": 3.0, "watermarking_config": {"bias": 9.0},
    "bad_words_ids": [[5, 6]], "max_time": 1e-9, "stop_strings": ["e"], "min_new_tokens": 9, "max_length": 3,
    "max_new_tokens": 2, "do_sample": True, "temperature": 9.0, "top_k": 2, "repetition_penalty": 9.0,
    "use_cache": False, "cache_implementation": "quantized", "return_dict_in_generate": True, "eos_token_id": 7,
    "num_assistant_tokens": 1, "prompt_lookup_num_tokens": 2, "assistant_early_exit": 1, "penalty_alpha": 0.6,
}  # fmt: skip


@pytest.fixture(scope="module")
def parts():
    return parts_of("peers=transformers", "temperature=0", "gamma=3")


def greedy(module, tokens: list[int], count: int) -> list[int]:
    """Argmax after argmax, by whole forwards."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(module(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(tokens) :]


@pytest.mark.parametrize("name", ["generate", "assisted", "prompt_lookup"])
def test_text_is_the_targets_greedy_one(name, parts):
    target = parts.target
    tokens = target.tokenizer(PROMPT)["input_ids"]
    output = parts.peers[name].decode(Sequence(tokens, len(tokens) + 12, 1))
    expected = greedy(target.stock, tokens, 12)
    assert output.tokens == expected
    assert output.tokens != greedy(parts.drafter.models[0].stock, tokens, 12)  # the control
    assert output.decode_seconds > 0
    assert output.decoded == 11 if name == "generate" else 0 < output.decoded <= 11  # a first step may keep several


def test_what_a_generation_config_says_is_left_aside_and_named(parts, monkeypatch):
    """Each key alone, in target and assistant: all peers decode the run's own text, and the note has the key, unless it
    is of what the run's settings say. The control is generate() without settings of its own, which obeys the keys."""
    target, helper = parts.target, parts.drafter.models[0].stock
    module = target.stock
    tokens = target.tokenizer(PROMPT)["input_ids"]
    expected, obeyed = greedy(module, tokens, 12), set()
    for key in ODD:
        asked = GenerationConfig()
        setattr(asked, key, ODD[key])
        for own in (module, helper):
            monkeypatch.setattr(own, "generation_config", asked)
        for name, peer in parts.peers.items():
            assert peer.decode(Sequence(tokens, len(tokens) + 12, 1)).tokens == expected, (key, name)
        assert module.generation_config is asked and helper.generation_config is asked
        named = [each.partition("=")[0] for each in not_applied(module, 1.0)]
        known = DECIDED - {"bad_words_ids", "repetition_penalty"}
        assert named == ([] if key in known else [key])
        if key in ("num_beams", "no_repeat_ngram_size", "min_new_tokens", "suppress_tokens", "sequence_bias"):
            text = module.generate(torch.tensor([tokens]), max_new_tokens=12)[0, len(tokens) :].tolist()
            obeyed |= {key} if text != expected else set()
    assert len(obeyed) >= 2
    monkeypatch.setattr(module, "generation_config", GenerationConfig())
    assert not_applied(module, 1.0) == []


@pytest.mark.parametrize("name", ["generate", "assisted", "prompt_lookup"])
def test_a_stop_string_ends_a_peers_text_where_it_ends_the_runs(name):
    parts = parts_of("peers=transformers", "temperature=0", "gamma=3")
    tokens = parts.target.tokenizer(PROMPT)["input_ids"]
    whole = greedy(parts.target.stock, tokens, 24)
    text = parts.target.tokenizer.decode(whole)
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    parts = parts_of("peers=transformers", "temperature=0", "gamma=3", f'stop=["{stop}"]'.replace("\n", "\\n"))
    output = parts.peers[name].decode(Sequence(tokens, len(tokens) + 24, 1))
    end = next(n for n in range(1, 25) if stop in parts.target.tokenizer.decode(whole[:n]))
    assert output.tokens == whole[:end] and end < 24 and output.decoded < end


def test_only_calls_behind_a_forward_count():
    """transformers 5.17 also asks whether guesses would end the text, in front of the forward that judges them."""
    strings = SimpleNamespace(find=lambda before, new: None)
    module, watch = torch.nn.Linear(2, 2), Watch(torch.device("cpu"), 1, strings)
    with watch.steps_of(module):
        for length, reads, known in ((5, False, 0), (3, True, 2), (9, False, 2), (4, True, 3)):
            if reads:
                module(torch.zeros(2))
            watch(torch.zeros(1, length), None)
            assert watch.known == known
    assert watch.first == 2 and not module._forward_pre_hooks


def test_an_error_is_of_one_prompt_alone(parts, monkeypatch):
    peer, decode = parts.peers["generate"], parts.peers["generate"].decode

    def fails(job):
        if job.key == 2:
            raise AttributeError("'dict' object has no attribute 'shape'")
        return decode(job)

    monkeypatch.setattr(peer, "decode", fails)
    tokens = parts.target.tokenizer(PROMPT)["input_ids"]
    found = peer.decode_all([Sequence(tokens, len(tokens) + 2, key) for key in (1, 2, 3)])
    assert ["error" in each for each in found] == [False, True, False] and "AttributeError" in found[1]["error"]


@pytest.mark.parametrize(("version", "compiled"), [("5.23.1", False), ("5.24.0", True)])
def test_on_cuda_caches_are_static_and_of_one_size(version, compiled, parts, monkeypatch):
    """Without a device: the settings, and the text that `generate` gives with them."""
    target, guide = parts.target, parts.drafter.models[0]
    context = SimpleNamespace(sampling=target.sampling, stop_strings=[])
    monkeypatch.setattr(transformers, "__version__", version)
    monkeypatch.setattr(target, "device", torch.device("cuda"))
    peers = TransformersPeers.from_settings(None, context, target, guide, 3)
    static = {name: "cache_implementation" in peer.settings for name, peer in peers.items()}
    assert static == {"generate": False, "generate_static": True, "assisted": compiled, "prompt_lookup": compiled}
    monkeypatch.undo()
    peer, given, generate = peers["generate_static"], [], target.stock.generate
    peer.device, peer.columns = target.device, 90

    def noting(*words, generation_config, **more):
        given.append(generation_config.max_cache_len)
        return generate(*words, generation_config=generation_config, **more)

    monkeypatch.setattr(target.stock, "generate", noting)
    tokens = target.tokenizer(PROMPT)["input_ids"]
    for count in (5, 90):
        assert peer.decode(Sequence(tokens, len(tokens) + count, 1)).tokens == greedy(target.stock, tokens, count)
    assert given == [90, len(tokens) + 90]


def test_which_peers_there_are(parts):
    assert set(parts.peers) == {"generate", "assisted", "prompt_lookup"}
    assert set(assistants(parts.target, None, 3)) == {"prompt_lookup"}
    assert not parts_of().peers


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_strongest_baseline_on_cuda():
    assert "generate_static" in parts_of("peers=transformers", "device=cuda").peers
