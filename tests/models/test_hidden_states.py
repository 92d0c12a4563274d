"""Hidden states of chosen layers, as transformers returns them: of prompts, of chains and of trees."""

from functools import cache

import pytest
import torch
from checkpoints import tiny_module
from decoder_cases import CACHES, adapted
from transformers import PreTrainedModel

from specbench.decoding.draft import Draft
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.models.language_model import LanguageModel

LAYERS = 3
TEXTS = ([5, 9, 2, 7, 11, 3, 8], [4, 1, 6])
PARENT = (0, 1, 1, 2)  # a tree, whose paths are nodes 0 1 2 4 and 0 1 3


@cache
def module() -> PreTrainedModel:
    return tiny_module(vocab_size=32, num_hidden_layers=LAYERS, max_position_embeddings=64)


def expected(text: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """[T, A * H] by transformers' own list, whose last entry stands behind the last norm."""
    base = module().model
    states = list(base(torch.tensor([text]), output_hidden_states=True).hidden_states)
    found = []
    hook = base.norm.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    base(torch.tensor([text]))
    hook.remove()
    states[-1] = found[0]
    return torch.cat([states[layer][0] for layer in layers], -1)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


class Heard:
    """Keeps what a target says of prompts."""

    def __init__(self):
        self.found = {}

    def take_hidden(self, row, begin, hidden):
        self.found.setdefault(row, []).append(hidden)

    def clear_hidden(self):
        self.found = {}


def target(cache_name: str, executor=None) -> tuple[LanguageModel, State, Heard]:
    model = adapted(module(), cache=cache_name, executor=executor)
    model.hidden_reader = heard = Heard()
    model.feature_layers = (0, 2, LAYERS)
    state = State.start([Sequence(text, len(text) + 8, 7) for text in TEXTS], [], 6, torch.device("cpu"))
    model.allocate(2, 32)
    return model, state, heard


@pytest.mark.parametrize("cache_name", CACHES)
def test_states_of_prompts_chains_and_trees(cache_name):
    """Prompts are read in pieces of two tokens. Negative control: another layer."""
    model, state, heard = target(cache_name)
    model.prefill(state, chunk=2)
    hidden = torch.cat(heard.found[None], 1)  # [2, 6, 3 * H]
    guesses = torch.tensor([[9, 2, 6, 1], [7, 3, 1, 12]])
    chain = model.score(state, Draft.chain(guesses, None, torch.tensor([4, 4])), keep_hidden=True).hidden
    tree = model.score(state, Draft.tree(guesses, PARENT, None, torch.tensor([4, 4])), keep_hidden=True).hidden
    for row, text in enumerate(TEXTS):
        own, n = guesses[row].tolist(), len(text)
        close(hidden[row, : n - 1], expected(text, model.feature_layers)[:-1])
        close(chain[row], expected(text + own, model.feature_layers)[n - 1 :])
        path = expected([*text, own[0], own[1], own[3]], model.feature_layers)[n - 1 :]
        close(tree[row, [0, 1, 2, 4]], path)
        assert not torch.allclose(chain[row], expected(text + own, (0, 1, LAYERS))[n - 1 :], atol=0.1)
