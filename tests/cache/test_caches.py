"""Every cache backend: rollback, trees, rows that come and go; and the accounting of blocks."""

import pytest
import torch
from checkpoints import tiny_module
from decoder_cases import CACHES, V, adapted, logits_of

from specbench.cache.paged import PagedCache
from specbench.decoding.draft import Draft
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.models.language_model import LanguageModel


def tiny_llama(cache: str) -> LanguageModel:
    return adapted(tiny_module(vocab_size=V, hidden_size=32, max_position_embeddings=64), cache=cache)


def fresh_logits(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    return model.module(input_ids=tokens).logits


@pytest.mark.parametrize("cache", CACHES)
def test_rollback_to_every_length(cache):
    """After reading a text, any prefix of it can be continued differently, row by row."""
    model = tiny_llama(cache)
    text = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(1))
    other = torch.randint(V, (2, 3), generator=torch.Generator().manual_seed(2))
    for first in range(12):
        for second in (0, 5, 11):
            model.allocate(2, 20)
            logits_of(model, text, [0, 0])
            logits = logits_of(model, other, [first, second])
            for row, length in enumerate((first, second)):
                whole = torch.cat([text[row, :length], other[row]])[None]
                expected = fresh_logits(model, whole)[0, length:]
                assert torch.allclose(logits[row], expected, atol=1e-4)


@pytest.mark.parametrize("cache", CACHES)
def test_a_token_tree_scores_each_branch_as_if_it_stood_alone(cache):
    model = tiny_llama(cache)
    text = torch.randint(V, (2, 6), generator=torch.Generator().manual_seed(1))
    nodes = torch.randint(V, (2, 5), generator=torch.Generator().manual_seed(2))
    tree = Draft.tree(nodes, (0, 0, 1, 2, 2), None, torch.tensor([5, 5]))
    assert not tree.is_chain
    model.allocate(2, 16)
    logits_of(model, text[:, :-1], [0, 0])
    logits = logits_of(model, torch.cat([text[:, -1:], nodes], 1), [5, 5], tree)
    for path in ([0], [0, 2], [1], [1, 3], [1, 4]):
        expected = fresh_logits(model, torch.cat([text, nodes[:, path]], 1))[:, -1]
        assert torch.allclose(logits[:, path[-1] + 1], expected, atol=1e-4)
    # Commit the path 1, 4: it moves to where a chain would have left it, and decoding goes on.
    model.cache.commit(torch.tensor([[0, 2, 5], [0, 2, 5]]), torch.tensor([5, 5]))
    more = torch.tensor([[1], [2]])
    expected = fresh_logits(model, torch.cat([text, nodes[:, [1, 4]], more], 1))[:, -1]
    assert torch.allclose(logits_of(model, more, [8, 8])[:, 0], expected, atol=1e-4)


def paged(rows=2, columns=32, blocks=None, block_size=4) -> PagedCache:
    return PagedCache(rows, columns, block_size, blocks)


def in_use(cache: PagedCache) -> int:
    return cache.blocks.count - len(cache.blocks.free)


@pytest.mark.parametrize("length", range(0, 13))
def test_truncation_keeps_the_partly_filled_block_and_frees_the_rest(length):
    cache = paged()
    cache.reserve([12, 0])
    assert in_use(cache) == 3
    cache.truncate([length, 0])
    assert in_use(cache) == -(-length // 4)
    cache.reserve([12, 0])
    assert in_use(cache) == 3 and len(set(cache.held[0])) == 3


def test_no_block_leaks_whatever_happens():
    """Random admissions, growth, rollback and release: references always add up."""
    generator = torch.Generator().manual_seed(0)

    def upto(n):
        return int(torch.randint(n, (), generator=generator))

    cache = paged(rows=4, columns=32, blocks=20)
    prompts = [[1] * 10, [1] * 8 + [2] * 5, [3] * 12, [1] * 9]
    running = {}
    for _ in range(3000):
        row = upto(4)
        if row in running and upto(4) == 0:
            cache.release(row)
            del running[row]
        elif row not in running:
            prompt = prompts[upto(4)]
            columns = len(prompt) + 1 + upto(16)
            if cache.may_admit(prompt, columns):
                running[row] = [prompt, columns, cache.admit(row, prompt, columns)]
                lengths = [0] * 4
                lengths[row] = len(prompt)
                cache.reserve(lengths)
                cache.written(row, prompt)
        else:
            prompt, columns, _ = running[row]
            length = len(prompt) - 1 + upto(columns - len(prompt) + 1)
            cache.truncate([length if r == row else 99 for r in range(4)])
            lengths = [0] * 4
            lengths[row] = columns
            cache.reserve(lengths)
        held = [block for blocks in cache.held for block in blocks]
        assert [held.count(block) for block in range(1, 21)] == cache.blocks.holders[1:]
        assert set(cache.blocks.free) == {b for b in range(1, 21) if not cache.blocks.holders[b]}
        assert set(cache.blocks.by_prefix.values()) == set(cache.blocks.prefix_of)
    for row in list(running):
        cache.release(row)
    assert in_use(cache) == 0


def test_a_common_prefix_is_shared_and_outlives_its_first_owner():
    cache, prompt = paged(), [5] * 9
    assert cache.admit(0, prompt, 16) == 0
    cache.reserve([9, 0])
    cache.written(0, prompt)
    assert cache.admit(1, [5] * 8 + [7, 7], 16) == 8
    assert cache.held[1] == cache.held[0][:2] and cache.blocks.holders[cache.held[0][0]] == 2
    cache.release(0)
    assert in_use(cache) == 2  # row 1 still has them
    cache.release(1)
    assert in_use(cache) == 0 and cache.admit(0, prompt, 16) == 8  # free, but still known
    cache.clear()
    assert cache.admit(0, prompt, 16) == 0


def test_writing_into_a_shared_block_takes_a_copy():
    """Rollback into a shared prefix must not change it for the others."""
    model = tiny_llama("paged")
    model.allocate(2, 24)
    cache, prompt = model.cache, list(range(9))
    state = State.idle(2, 24, [], model.device)
    state.admit({row: Sequence(prompt, 20, 0) for row in range(2)})
    cache.admit(0, prompt, 20)
    model.read(state, 0, 0, 8)
    cache.written(0, prompt)
    model.cached[1] = cache.admit(1, prompt, 20)
    assert model.cached[1] == 8
    other = torch.tensor([[8, 1, 2], [9, 9, 9]])
    logits = logits_of(model, other, [8, 6])
    whole = torch.cat([torch.tensor([prompt[:8]]), other[:1]], 1)
    assert torch.allclose(logits[0], fresh_logits(model, whole)[0, 8:], atol=1e-4)
    whole = torch.cat([torch.tensor([prompt[:6]]), other[1:]], 1)
    assert torch.allclose(logits[1], fresh_logits(model, whole)[0, 6:], atol=1e-4)
    assert cache.held[0][0] == cache.held[1][0] and cache.held[0][1] != cache.held[1][1]


def test_admission_counts_what_is_promised():
    cache = paged(rows=3, columns=32, blocks=8)
    assert cache.may_admit([1] * 5, 20)
    cache.admit(0, [1] * 5, 20)  # five blocks, none taken yet
    assert in_use(cache) == 0
    assert not cache.may_admit([1] * 5, 16)
    assert cache.may_admit([1] * 5, 12)
    cache.release(0)
    assert cache.may_admit([1] * 5, 32)
