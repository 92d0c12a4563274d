"""The model drafter's q and cache, the standardization of logits, and the end of the context."""

import torch
from decoder_cases import V, make_drafter, tabular_model
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from specbench.decoding.draft import Draft
from specbench.decoding.noise import PROPOSAL
from specbench.decoding.rows import window
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State


def pair(tables, sampling: Sampling):
    target = tabular_model(tables.target, sampling)
    return target, make_drafter("model", target, "", tabular_model(tables.similar, sampling))


def test_q_is_the_tensor_that_the_guesses_were_drawn_from(tables):
    sampling = Sampling(temperature=0.7, top_k=5)
    target, drafter = pair(tables, sampling)
    state = State.start([Sequence([1, 2, 3], 20, 11), Sequence([4, 5], 20, 12)], [], 6, target.device)
    drafter.begin(state)
    draft = drafter.propose(state, [4, 4])
    noise = window(state.noise[PROPOSAL], state.length, 4)
    assert draft.tokens.tolist() == draw(draft.probs, noise).tolist()
    assert torch.allclose(draft.probs.sum(-1), torch.ones(2, 4))
    for row in range(2):
        text = [*state.tokens[row, : state.lengths[row]].tolist(), *draft.tokens[row].tolist()]
        for i in range(4):
            before, last = text[state.lengths[row] + i - 2 : state.lengths[row] + i]
            law = sampling.probabilities(tables.similar[before, last])
            assert torch.allclose(draft.probs[row, i], law)


def test_standardization_is_that_of_transformers():
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(0)) * 3
    context = torch.randint(200, (50, 30), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(50, 200, dtype=torch.bool).scatter_(1, context, True)
    expected = RepetitionPenaltyLogitsProcessor(1.4)(context, logits)
    expected = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(30)(None, expected / 0.7)).softmax(-1)
    sampling = Sampling(temperature=0.7, top_k=30, top_p=0.8, repetition_penalty=1.4)
    assert torch.allclose(sampling.probabilities(logits, seen), expected, atol=1e-6)


def test_the_penalty_sees_each_guess_on_the_path(tables):
    """p_i is penalised for the prompt and x_1 .. x_{i-1}, as plain decoding would do it."""
    sampling = Sampling(repetition_penalty=2.0)
    target = tabular_model(tables.target, sampling)
    state = State.start([Sequence([1, 2], 20, 1)], [], 6, target.device)
    target.allocate(1, 24)
    target.prefill(state)
    draft = Draft.chain(torch.tensor([[7, 9]]), None, torch.tensor([2]))
    p = target.score(state, draft).p
    text = [1, 2, 7, 9]
    for i in range(3):
        seen = torch.zeros(V, dtype=torch.bool)
        seen[text[: i + 2]] = True
        law = sampling.probabilities(tables.target[text[i], text[i + 1]], seen)
        assert torch.allclose(p[0, i], law)
