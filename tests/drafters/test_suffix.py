"""Lookups by suffix: against a search that counts all occurrences."""

import numpy as np
import pytest
import torch

from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.drafters.suffix import NgramDrafter, SuffixAutomaton, SuffixDrafter


def occurrences(text, string):
    """The tokens that followed each occurrence of a string, by time; None at the end of the text."""
    ends = range(len(string), len(text) + 1)
    return [(*text, None)[end] for end in ends if text[end - len(string) : end] == string]


def by_search(seen, text, limits, depth, min_prob):
    """SuffixDecoding's guess after `text`, from its definition: for every m, the most frequent continuation."""
    best, score = ([], []), 0.0
    for m in range(1, min(depth, len(text)) + 1):
        string, prob, tokens, probs = text[-m:], 1.0, [], []
        while len(tokens) < limits[m]:
            followed = occurrences(seen, string)
            last = {token: place for place, token in enumerate(followed) if token is not None}
            if not last:
                break
            token = max(last, key=lambda t: (followed.count(t), last[t]))
            prob *= followed.count(token) / len(followed)
            if prob < min_prob:
                break
            tokens.append(token)
            probs.append(prob)
            string = [*string, token]
        if sum(probs) >= score and tokens:
            best, score = (tokens, probs), sum(probs)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_an_automaton_guesses_what_a_search_finds(seed):
    draws = np.random.default_rng(seed)
    alphabet, depth, offset = int(draws.integers(1, 5)), int(draws.integers(2, 9)), float(draws.integers(0, 3))
    limits = [min(4, int(m + offset), depth - m) for m in range(depth + 1)]
    text, automaton = draws.integers(alphabet, size=60).tolist(), SuffixAutomaton(depth)
    unlike = 0
    for end in range(1, len(text) + 1):
        automaton.extend(text[end - 1 : end])
        found = automaton.guess(limits, 0.1)
        assert found == by_search(text[:end], text[:end], limits, depth, 0.1)
        unlike += found != by_search(text[: end - 1], text[:end], limits, depth, 0.1)
    assert unlike  # negative control: without the last token's own occurrences


def by_orders(text, gamma, least, most):
    """The n-gram drafter's guesses after `text`, from its definition: the longest context that was seen decides."""
    own = list(text)
    while len(own) < len(text) + gamma:
        contexts = [own[-size:] for size in range(min(most - 1, len(own)), least - 2, -1)]
        followers = ([token for token in occurrences(text, c) if token is not None] for c in contexts)
        followed = next(filter(None, followers), [])
        if not followed:
            break
        last = {token: place for place, token in enumerate(followed)}
        own.append(max(last, key=lambda t: (followed.count(t), last[t])))
    return own[len(text) :]


@pytest.mark.parametrize("seed", range(12))
def test_ngrams_are_those_of_a_search(seed):
    draws = np.random.default_rng(seed)
    alphabet, least, more = int(draws.integers(2, 6)), int(draws.integers(2, 4)), int(draws.integers(0, 4))
    drafter, text = NgramDrafter(least, least + more), draws.integers(alphabet, size=50).tolist()
    drafter.begin(state_of([0]))
    found = [drafter.guess(0, text[:end], 5) for end in range(1, len(text) + 1)]
    assert found == [by_orders(text[:end], 5, least, least + more) for end in range(1, len(text) + 1)]
    assert sum(map(len, found)) > 20


def state_of(text, encoder_input=None):
    """A state whose only row has this text."""
    return State.start([Sequence(text, 40, 1, encoder_input)], [], 8, torch.device("cpu"))


def suffix(**other):
    return SuffixDrafter(**{"depth": 8, "factor": 1.0, "offset": 1.0, "min_prob": 0.1, "gamma": 4} | other)


def test_the_first_guess_does_not_depend_on_gamma():
    """After 1 2 came 3 7 8 once and 9 twice: the score of the longest match decides, whatever is drafted of it."""
    state = state_of([0, 1, 2, 3, 7, 8, 5, 2, 9, 6, 2, 9, 4, 0, 1, 2])
    drafter = suffix()
    drafter.begin(state)
    drafts = [drafter.propose(state, [gamma]).tokens[0].tolist() for gamma in (1, 2, 4)]
    assert drafts == [[3], [3, 7], [3, 7, 8, 5]]
    assert suffix(gamma=1).limits[2] == 1  # the most guesses of a run do decide


def test_tokens_that_were_rejected_are_taken_back():
    drafter, text = suffix(), [1, 2, 3, 1, 2]
    drafter.begin(state_of(text))
    assert drafter.guess(0, [*text, 4, 1, 2], 1) == [4]  # what a decoding inside `hierarchical` had committed
    assert drafter.guess(0, text, 1) == [3]
    text.append(5)
    assert drafter.guess(0, [*text, 1, 2], 1) == drafter.guess(0, [*text, 1, 2], 1) == [5]


@pytest.mark.parametrize("drafter", [suffix(), NgramDrafter(2, 4)])
def test_an_encoders_input_is_searched_too(drafter):
    state = state_of([9, 1, 2], [5, 1, 2, 6, 7])
    drafter.begin(state)
    assert drafter.propose(state, [2]).tokens.tolist() == [[6, 7]]
