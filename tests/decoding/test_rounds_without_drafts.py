"""A round without a draft leaves no drafter's cache stale: its q is a fresh drafter's, at every position."""

import pytest
import torch
from decoder_cases import CACHES, TABULAR, TREES, make_drafter, spare_of, tabular_model, verifier_of
from test_equivalence import pair_of, requests, shipped

from specbench.decoding.noise import prompt_key
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Clock
from specbench.drafters.model import ModelDrafter
from specbench.policies.base import GammaPolicy
from specbench.verifiers.base import SpeculativeVerifier
from specbench.verifiers.trees import IterativeVerifier

STATEFUL = ("model", "early_exit", "mtp", "eagle3", "under_model", "under_ngram",
            "pass_lookahead", "multi_draft_two", "tree_distinct", "mtp_distinct", *TABULAR)  # fmt: skip
NEW_TOKENS = 24


class InTurn(GammaPolicy):
    """The gammas of the two rows in turn. Behind a long draft several rounds have none, so that the text grows into
    what the cache holds of rejected guesses."""

    largest, widths = 4, (1, 4)
    turns = ((4, 4), (0, 0), (0, 0), (1, 4), (4, 0), (0, 1))

    def __init__(self):
        self.round = -1

    def next_gamma(self, state):
        self.round += 1
        return [*self.turns[self.round % len(self.turns)]]


def models_of(kind, tables):
    """A target and a model for its drafter, with empty caches."""
    sampling = Sampling()
    if kind in TABULAR:
        return tabular_model(tables.target, sampling), tabular_model(tables.similar, sampling)
    loaded = [shipped(role) for role in pair_of(kind)]
    return tuple(model.shared(sampling, CACHES["static"], model.executor) for model in loaded)


def begun(kind, sequences, tables):
    """A drafter and its target, which have read the texts of these sequences, and the state."""
    target, helper = models_of(kind, tables)
    drafter = make_drafter(kind, target, "", helper)
    state = State.start(sequences, [], spare_of(kind, 4), target.device)
    target.allocate(state.batch_size, state.tokens.shape[1])
    target.prefill(state)
    return drafter, target, state


def worst_difference(kind, tables) -> float:
    """The largest difference between q of a drafter that decodes two texts and q of one that begins there."""
    prompts = [[3, 7, 1, 3], [2, 9]] if kind in TABULAR else [request.tokens for request in requests()[:2]]
    jobs = [Sequence(p, len(p) + NEW_TOKENS, prompt_key(0, str(row))) for row, p in enumerate(prompts)]
    drafter, target, state = begun(kind, jobs, tables)
    propose, found = drafter.propose, []

    def compared(state, gamma):
        noise, texts = state.noise.clone(), [list(sequence.tokens) for sequence in state.sequences]
        draft = propose(state, gamma)
        if draft.tokens.shape[1] and all(state.active):
            fresh, _, again = begun(kind, [Sequence(t, s.limit, 0) for t, s in zip(texts, jobs, strict=True)], tables)
            again.noise.copy_(noise)
            fresh.begin(again)
            own = fresh.propose(again, gamma)
            there = draft.exists() & (torch.tensor(gamma) > 0)[:, None]
            found.append(float((draft.probs - own.probs)[there].abs().max()))
        return draft

    drafter.propose = compared
    verifier = verifier_of(IterativeVerifier if kind in TREES else SpeculativeVerifier, target.sampling)
    decode_speculative(state, target, drafter, InTurn(), verifier, Clock())
    assert len(found) >= 5
    return max(found)


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_drafter_says_what_a_fresh_one_would_say(kind, tables):
    assert worst_difference(kind, tables) < 1e-4


def test_a_cache_that_takes_rejected_guesses_for_text_is_seen(tables, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(ModelDrafter, "skip_round", lambda self, state: None)
    assert worst_difference("model", tables) > 1e-3
