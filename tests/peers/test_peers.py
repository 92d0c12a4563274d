"""Decoders of transformers beside a run: the right text, counted and timed without the step that reads the prompt."""

import pytest
import torch
from small_runs import parts_of

from specbench.decoding.sequence import Sequence
from specbench.peers.transformers import TransformersPeers, speculative

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add"


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
    expected = greedy(target.stock_module(), tokens, 12)
    assert output.tokens == expected and output.count == 12
    assert output.tokens != greedy(parts.drafter.models[0].stock_module(), tokens, 12)  # the control
    assert output.decode_seconds > 0
    if name == "generate":
        assert output.decoded == 11
    else:
        assert 0 < output.decoded <= 11  # their first step may keep several


def test_an_error_is_of_one_prompt_alone(parts, monkeypatch):
    peer, decode = parts.peers["generate"], parts.peers["generate"].decode

    def fails(job):
        if job.key == 2:
            raise RuntimeError("out of memory")
        return decode(job)

    monkeypatch.setattr(peer, "decode", fails)
    tokens = parts.target.tokenizer(PROMPT)["input_ids"]
    found = peer.decode_all([Sequence(tokens, len(tokens) + 2, key) for key in (1, 2, 3)])
    assert [type(each).__name__ for each in found] == ["PeerOutput", "RuntimeError", "PeerOutput"]


def test_which_peers_there_are(parts):
    assert set(parts.peers) == {"generate", "assisted", "prompt_lookup"}
    assert set(speculative(parts.target, None, 3)) == {"prompt_lookup"}
    assert not parts_of().peers
    assert {"assistant_model"} == set(speculative(parts.target, parts.drafter.models[0], 3)["assisted"])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_strongest_baseline_on_cuda():
    assert TransformersPeers.loads_models and "generate_static" in parts_of("peers=transformers", "device=cuda").peers
