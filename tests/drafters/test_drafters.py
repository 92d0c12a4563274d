"""What drafters without a network guess, on texts small enough to do by hand."""

import numpy as np
import pytest
import torch
from decoder_cases import V, make_drafter, tabular_model
from small_runs import parts_of

from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.errors import ConfigError


def guesses(kind, prompt, gamma, target, text_file="", temperature=0.0):
    sampling = Sampling(temperature=temperature)
    target = tabular_model(target, sampling)
    drafter = make_drafter(kind, target, text_file)
    state = State.start([Sequence(prompt, 40, 1)], [], gamma + 1, target.device)
    drafter.begin(state)
    draft = drafter.propose(state, [gamma])
    return draft.tokens[0].tolist(), draft


def test_ngram_chains_its_own_guesses_and_stops_without_one(tables):
    tokens, draft = guesses("ngram", [4, 5, 6, 7, 4], 6, tables.target)
    assert tokens == [5, 6, 7, 4, 5, 6]
    assert draft.probs is None and draft.is_chain
    assert guesses("ngram", [1, 2, 3], 4, tables.target)[0] == []


def test_prompt_lookup_copies_and_goes_on_with_its_own_copy(tables):
    assert guesses("prompt_lookup", [9, 1, 2, 3, 8, 1, 2], 3, tables.target)[0] == [3, 8, 1]
    assert guesses("prompt_lookup", [7, 1, 2, 1, 2], 5, tables.target)[0] == [1, 2, 1, 2, 1]
    assert guesses("prompt_lookup", [1, 2, 3], 5, tables.target)[0] == []


def test_the_count_models_have_the_q_they_were_fitted_to(tables, number_text):
    numbers = np.loadtxt(number_text, dtype=int)
    unigram = np.bincount(numbers, minlength=V) + 1.0
    _, draft = guesses("unigram", [3], 2, tables.target, number_text, temperature=1)
    assert np.allclose(draft.probs[0, 1], unigram / unigram.sum(), atol=1e-6)
    _, draft = guesses("bigram", [3], 1, tables.target, number_text, temperature=1)
    after = np.bincount(numbers[1:][numbers[:-1] == 3], minlength=V) + unigram / unigram.sum()
    assert np.allclose(draft.probs[0, 0], after / after.sum(), atol=1e-6)


def test_random_guesses_are_uniform(tables):
    target = tabular_model(tables.target, Sampling())
    drafter = make_drafter("random", target, "")
    rows = 4000
    state = State.start([Sequence([1], 9, row) for row in range(rows)], [], 4, target.device)
    draft = drafter.propose(state, [3] * rows)
    counts = torch.bincount(draft.tokens.flatten(), minlength=V).float()
    assert ((counts - 3 * rows / V) ** 2 / (3 * rows / V)).sum() < (V - 1) + 10 * (2 * (V - 1)) ** 0.5
    assert torch.equal(draft.probs, torch.full((rows, 3, V), 1 / V))


def test_errors_of_the_drafter_below_name_its_keys():
    below = ("drafter@drafter.below=blockwise", "drafter.below.path=shipped:drafter")
    with pytest.raises(ConfigError, match=r"^drafter\.below\.path=shipped:drafter"):
        parts_of("drafter=hierarchical", *below)
