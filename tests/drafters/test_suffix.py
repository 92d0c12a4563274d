"""Lookups by suffix: against a search that counts all occurrences."""

import numpy as np
import pytest

from specbench.drafters.suffix import SuffixAutomaton


def occurrences(texts, string):
    """The tokens that followed each occurrence of a string, by time; None where a text ended."""
    found = []
    for text in texts:
        for end in range(len(string), len(text) + 1):
            if text[end - len(string) : end] == string:
                found.append(text[end] if end < len(text) else None)
    return found


def by_search(texts, text, limits, depth, min_prob):
    """SuffixDecoding's guess after `text`, from its definition: for every m, the most frequent continuation."""
    best, score = ([], []), 0.0
    for m in range(1, min(depth, len(text)) + 1):
        string, prob, tokens, probs = text[-m:], 1.0, [], []
        while len(tokens) < limits[m]:
            followed = occurrences(texts, string)
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
    for end in range(1, len(text) + 1):
        automaton.extend(text[end - 1 : end])
        found = automaton.guess(automaton.end, automaton.size, limits, 0.1)
        assert found == by_search([text[:end]], text[:end], limits, depth, 0.1)


@pytest.mark.parametrize("seed", range(6))
def test_an_automaton_of_several_texts_guesses_what_a_search_finds(seed):
    draws = np.random.default_rng(seed)
    texts = [draws.integers(3, size=length).tolist() for length in draws.integers(1, 15, size=8)]
    limits, automaton = [min(4, m, 6 - m) for m in range(7)], SuffixAutomaton(6)
    for text in texts:
        automaton.extend(text)
        automaton.restart()
    for _ in range(20):
        text = draws.integers(4, size=9).tolist()  # 3 occurs in none of them
        found = automaton.guess(*automaton.match(text), limits, 0.1)
        assert found == by_search(texts, text, limits, 6, 0.1)
