"""The model drafter's q and cache, the standardization of logits, and the end of the context."""

import torch
from decoder_cases import V, make_drafter, tabular_model
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import PROPOSAL
from specbench.decoding.rows import commit_tokens, summary_of, window
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Timer
from specbench.policies.fixed import FixedGamma
from specbench.verifiers.speculative import SpeculativeVerifier


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


def test_the_drafter_cache_is_right_after_full_and_partial_acceptance(tables):
    """The last guess is not in the cache when all were kept: the classic off-by-one."""
    sampling = Sampling(temperature=0)
    target, drafter = pair(tables, sampling)
    state = State.start([Sequence([1, 2, 3], 40, 1), Sequence([4], 40, 2)], [], 6, target.device)
    drafter.begin(state)
    for accepted, gamma in (((3, 0), 3), ((0, 3), 3), ((0, 0), 0), ((2, 1), 4), ((1, 1), 1)):
        draft = drafter.propose(state, [gamma, gamma])
        for row in range(2):
            text = state.tokens[row, : state.lengths[row]].tolist()
            for guess in draft.tokens[row].tolist():
                before = text[-2] if len(text) > 1 else text[-1]
                assert guess == tables.similar[before, text[-1]].argmax() or len(text) == 1
                text.append(guess)
        own = torch.tensor([[9], [8]])
        n = torch.tensor(accepted)
        tokens = torch.cat([draft.tokens, own], 1).scatter(1, n[:, None], own)
        verdict = Verdict(tokens, n)
        commit_tokens(state.rows, verdict)
        state.read_round(summary_of(state.rows, verdict, draft))


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


def test_guesses_stop_where_the_context_ends(tables):
    """gamma shrinks to what fits, then plain steps, and the row ends at the context."""
    sampling, drafted = Sampling(), []
    target = tabular_model(tables.target, sampling, context=16)
    drafter = make_drafter("model", target, "", tabular_model(tables.similar, sampling, context=12))
    state = State.start([Sequence([1, 2, 3], 16, 1)], [], 6, target.device)
    target.allocate(1, state.tokens.shape[1])
    target.prefill(state)
    clock = Timer(target.device)
    clock.start()

    def note(state, scores, draft, verdict, kept):
        drafted.append((state.lengths[0] - int(kept[0]), draft.tokens.shape[1]))

    decode_speculative(state, target, drafter, FixedGamma(5), SpeculativeVerifier(sampling), clock, note)
    assert state.lengths == [16]
    assert all(length + guesses < 12 for length, guesses in drafted if guesses)
    assert drafted[-1][1] == 0
