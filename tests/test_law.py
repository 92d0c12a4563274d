"""The output distribution of the whole decoder, through cache and rollback, on a target whose distribution is known.

V = 16, 100,000 trials, chi-square per output position within df + 8 sqrt(2 df), and negative controls that
must fail the same test. Every verifier has that many with one drafter, and every drafter with its usual verifier
(half as many where it works row by row in Python). The other pairs have 25,000, enough for lenience .8 and for a
verifier that does not fit a drafter, but not for the subtlest of the controls.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import reference
import torch
from conftest import CACHES, DRAFTERS, TREES, VERIFIERS, V, make_drafter, spare_of, tabular_model, verifier_of

from specbench.cache.static import StaticCache
from specbench.decoding import round_noise
from specbench.decoding.autoregressive import decode_autoregressive
from specbench.decoding.clock import NoClock
from specbench.decoding.noise import ACCEPTANCE, PROPOSAL, RESIDUAL, exponentials, uniforms
from specbench.decoding.sampling import Sampling
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import Job, State
from specbench.decoding.verify import speculative_sampling
from specbench.decoding.verify_tree import iterative_sampling
from specbench.gamma_policies.adaptive import AdaptiveGamma
from specbench.gamma_policies.confidence import ConfidenceGamma
from specbench.gamma_policies.entropy import EntropyGamma
from specbench.gamma_policies.fixed import FixedGamma
from specbench.gamma_policies.heuristic import HeuristicGamma
from specbench.measure.costs import CostTable
from specbench.models.language_model import LanguageModel
from specbench.verifiers.block import BlockVerifier
from specbench.verifiers.iterative import IterativeVerifier
from specbench.verifiers.speculative import SpeculativeVerifier

TRIALS, FEW, ROWS = 100_000, 25_000, 12_500  # trials, and how many of them decode together
PROMPT = [3, 7, 1, 3, 7, 2, 3]  # repeats, so that copying drafters have something to copy
NEW_TOKENS = 4
SAMPLING = Sampling(temperature=1.0)
ROW_BY_ROW = ("ngram", "ngram_sample", "prompt_lookup", "bigram", "unigram", "under_ngram")


class AcceptEverything(SpeculativeVerifier):
    """Negative control."""

    def accept(self, p, draft, noise):
        return speculative_sampling(p, draft, torch.zeros_like(noise.r), noise.bits)


class ResidualFromTarget(SpeculativeVerifier):
    """Negative control: after a rejection t is drawn from p instead of norm(max(0, p - q))."""

    def accept(self, p, draft, noise):
        n = speculative_sampling(p, draft, noise.r, noise.bits).accepted
        as_if_no_more = replace(draft, count=n)
        return speculative_sampling(p, as_if_no_more, torch.zeros_like(noise.r), noise.bits)


class StaleCache(StaticCache):
    """Negative control for rollback: a column that was written once is never written again."""

    written = len(PROMPT)

    def clear(self):
        super().clear()
        self.written = len(PROMPT)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        before = self.keys[layer_idx].clone() if layer_idx < len(self.keys) else None
        keys, values = super().update(key_states, value_states, layer_idx)
        if before is not None:
            self.keys[layer_idx][:, :, : self.written] = before[:, :, : self.written]
            self.written = max(self.written, self.visible)
        return keys, values


def exact_marginals(table: torch.Tensor) -> np.ndarray:
    """The law of each output position, [NEW_TOKENS, V], by summing over the pairs before it."""
    step = table.double().softmax(-1).numpy()  # [before, last, next]
    pair = np.zeros((V, V))
    pair[PROMPT[-2], PROMPT[-1]] = 1
    laws = []
    for _ in range(NEW_TOKENS):
        pair = np.einsum("ab,abc->bc", pair, step)
        laws.append(pair.sum(0))
    return np.array(laws)


@cache
def fresh(begin: int, rows: int, seed: int, spare: int) -> State:
    """Rows begin .. begin + rows - 1 of all trials with a seed."""
    keys = torch.randint(2**62, (TRIALS,), generator=torch.Generator().manual_seed(seed)).tolist()
    jobs = [Job(PROMPT, len(PROMPT) + NEW_TOKENS, key) for key in keys[begin : begin + rows]]
    return State.start(jobs, [], spare, torch.device("cpu"))


def start(rows: int, seed: int = 0, spare: int = 4, begin: int = 0) -> State:
    state = fresh(begin, rows, seed, spare)
    fields = {name: t.clone() for name, t in vars(state.rows).items()}
    lists = {name: list(getattr(state, name)) for name in ("lengths", "limits", "prompt_lengths", "active", "owners")}
    texts = [list(text) for text in state.texts]
    return replace(state, rows=replace(state.rows, **fields), texts=texts, **lists)


def new_tokens(state: State) -> np.ndarray:
    """What every row wrote, [rows, NEW_TOKENS]."""
    return state.tokens[:, len(PROMPT) : len(PROMPT) + NEW_TOKENS].numpy()


def worst_excess(outputs: np.ndarray, law: np.ndarray) -> float:
    """Largest chi-square over positions, in units of its limit: above 1 the law is refused."""
    limit = (V - 1) + 8 * np.sqrt(2 * (V - 1))
    excess = []
    for position in range(NEW_TOKENS):
        counts = np.bincount(outputs[:, position], minlength=V)
        expected = law[position] * len(outputs)
        excess.append((((counts - expected) ** 2) / expected).sum() / limit)
    return max(excess)


def decode(tables, number_text, kind="model", cache="static", verifier=SpeculativeVerifier, gamma=3, lenience=1.0,
           prepare=lambda state: state, drafter_table=None, policy=None, spoil=lambda draft: draft,
           trials=TRIALS, own=SAMPLING):  # fmt: skip
    """What every trial wrote, [trials, NEW_TOKENS]. Rows decode in parts that stay in the processor's caches."""
    target = tabular_model(tables.target, SAMPLING, cache)
    helper = tabular_model(tables.adversarial if drafter_table is None else drafter_table, own, cache, vocab_size=V)
    drafter = make_drafter(kind, target, number_text, helper)
    judge = verifier_of(verifier, SAMPLING, lenience)
    policy = policy or FixedGamma(gamma)
    propose = drafter.propose
    drafter.propose = lambda state, gamma: spoil(propose(state, gamma))
    found = []
    for begin in range(0, trials, ROWS):
        state = prepare(start(ROWS, spare=spare_of(kind, gamma), begin=begin))
        target.allocate(ROWS, state.tokens.shape[1])
        target.prefill(state)
        decode_speculative(state, target, drafter, policy, judge, NoClock())
        found.append(new_tokens(state))
    return np.concatenate(found)


def possible(kind: str, verifier: str) -> bool:
    """Chains have every verifier, but that guesses without a law have no rejection sampling; trees have two."""
    if kind in TREES:
        return VERIFIERS[verifier].trees
    return verifier != "rejection" or kind not in ("ngram", "prompt_lookup")


@pytest.mark.parametrize(("kind", "verifier"), [(k, v) for k in DRAFTERS for v in VERIFIERS if possible(k, v)], ids=str)
def test_every_drafter_and_verifier_leave_the_target_law(kind, verifier, tables, number_text):
    usual = verifier == ("iterative" if kind in TREES else "speculative") or kind in ("model", "tree_distinct")
    trials = (TRIALS // 2 if kind in ROW_BY_ROW else TRIALS) if usual else FEW
    judge, table = VERIFIERS[verifier], tables.similar
    outputs = decode(tables, number_text, kind, verifier=judge, drafter_table=table, trials=trials)
    assert worst_excess(outputs, exact_marginals(tables.target)) < 1


ADVERSARIAL = ("model", "tree_independent", "tree_distinct", "multi_draft", "early_exit", "under_under_model")


@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_an_adversarial_drafter_leaves_the_target_law(kind, tables, number_text):
    verifier = VERIFIERS["iterative" if kind in TREES else "speculative"]
    assert worst_excess(decode(tables, number_text, kind, verifier=verifier), exact_marginals(tables.target)) < 1


class TriesRepeatsOnce(IterativeVerifier):
    """Negative control: siblings that say the same are one guess, which loses a subtraction of q."""

    def accept(self, p, draft, noise):
        if not draft.tokens.shape[1]:
            return super().accept(p, draft, noise)
        r, probs = noise.r.clone(), draft.probs.clone()
        parent = draft.parents[0].tolist()
        for i, above in enumerate(parent):
            for earlier in range(i):
                if parent[earlier] == above:
                    same = draft.tokens[:, i] == draft.tokens[:, earlier]
                    r[same, i], probs[same, i] = 2.0, 0.0
        return iterative_sampling(p, replace(draft, probs=probs), r, noise.bits)


class ForgetsOrder(IterativeVerifier):
    """Negative control: every sibling is judged as if it were the first."""

    def accept(self, p, draft, noise):
        if not draft.tokens.shape[1]:
            return super().accept(p, draft, noise)
        parent = draft.parents[0].tolist()
        first = [parent.index(above) for above in parent]
        return iterative_sampling(p, replace(draft, probs=draft.probs[:, first]), noise.r, noise.bits)


class BlockWithOldNoise(BlockVerifier):
    """Negative control: what was looked at behind the kept block is drawn from again."""

    looks_ahead = False


@pytest.mark.parametrize(
    ("kind", "verifier"),
    [("tree_independent", TriesRepeatsOnce), ("tree_distinct", ForgetsOrder), ("model", BlockWithOldNoise)],
    ids=["repeats", "order", "noise"],
)
def test_wrong_verifiers_are_caught(kind, verifier, tables, number_text):
    outputs = decode(tables, number_text, kind, verifier=verifier, drafter_table=tables.similar)
    assert worst_excess(outputs, exact_marginals(tables.target)) > 1


def test_a_path_that_is_left_where_it_was_is_caught(tables, number_text, monkeypatch):
    monkeypatch.setattr(LanguageModel, "keep_path", lambda *arguments: None)
    outputs = decode(tables, number_text, "tree_distinct", verifier=IterativeVerifier, drafter_table=tables.similar)
    assert worst_excess(outputs, exact_marginals(tables.target)) > 1


def test_drafters_side_by_side_need_noise_of_their_own(tables, number_text, monkeypatch):
    """Negative control: two models whose guesses are drawn with the same numbers."""
    monkeypatch.setattr(round_noise, "STREAM", 0)
    outputs = decode(tables, number_text, "multi_draft_two", verifier=IterativeVerifier, drafter_table=tables.similar)
    assert worst_excess(outputs, exact_marginals(tables.target)) > 1


@pytest.mark.parametrize(("temperature", "top_k"), [(0.6, 0), (1.5, 4), (0, 0)])
def test_a_drafter_with_a_standardization_of_its_own(temperature, top_k, tables, number_text):
    """Section 6: M_q may be sampled otherwise than M_p."""
    own = Sampling(temperature=temperature, top_k=top_k)
    for kind in ("model", "tree_distinct"):
        verifier = VERIFIERS["iterative" if kind in TREES else "speculative"]
        outputs = decode(tables, number_text, kind, verifier=verifier, drafter_table=tables.similar, own=own)
        assert worst_excess(outputs, exact_marginals(tables.target)) < 1


def learning_policy(kind, **settings):
    policy = kind(**settings)
    costs = CostTable()
    costs.laps = {0: [(0.0, 1.0, 0.0, 1.0, 1)], 3: [(0.6, 1.0, 0.0, 1.6, 1)]}
    policy.calibrate(costs)
    return policy


@pytest.mark.parametrize(
    "policy",
    [
        learning_policy(AdaptiveGamma, largest=3, prior=2.0, forget=0.1),
        learning_policy(EntropyGamma, largest=3, signal="entropy"),
        learning_policy(EntropyGamma, largest=3, signal="confidence"),
        learning_policy(HeuristicGamma, gamma=2, largest=3),
        learning_policy(ConfidenceGamma, largest=3, threshold=0.3),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_a_gamma_that_depends_on_the_text_leaves_the_target_law(policy, tables, number_text):
    outputs = decode(tables, number_text, policy=policy, drafter_table=tables.similar)
    assert worst_excess(outputs, exact_marginals(tables.target)) < 1


def test_a_draft_that_drops_guesses_it_has_seen_is_refused(tables, number_text):
    """Negative control: whether a guess is verified must not depend on the guess itself."""

    def drop_odd_last_guess(draft):
        if not draft.tokens.shape[1]:
            return draft
        last = draft.tokens.gather(1, (draft.count - 1).clamp(min=0)[:, None])[:, 0]
        fewer = draft.count - ((last % 2 == 1) & (draft.count > 0)).long()
        return replace(draft, count=fewer)

    outputs = decode(tables, number_text, drafter_table=tables.similar, gamma=2, spoil=drop_odd_last_guess)
    assert worst_excess(outputs, exact_marginals(tables.target)) > 1


@pytest.mark.parametrize("cache", CACHES)
def test_a_similar_drafter_through_every_cache(cache, tables, number_text):
    """With many acceptances, so that rollback happens at every depth."""
    outputs = decode(tables, number_text, cache=cache, drafter_table=tables.similar)
    assert worst_excess(outputs, exact_marginals(tables.target)) < 1


def test_autoregressive_decoding_has_the_target_law(tables):
    target, found = tabular_model(tables.target, SAMPLING), []
    for begin in range(0, TRIALS, ROWS):
        state = start(ROWS, begin=begin)
        target.allocate(ROWS, state.tokens.shape[1])
        target.prefill(state)
        decode_autoregressive(state, target, SpeculativeVerifier(SAMPLING), NoClock())
        found.append(new_tokens(state))
    assert worst_excess(np.concatenate(found), exact_marginals(tables.target)) < 1


@pytest.mark.parametrize("verifier", [AcceptEverything, ResidualFromTarget])
def test_biased_verifiers_are_caught(verifier, tables, number_text):
    outputs = decode(tables, number_text, verifier=verifier, drafter_table=tables.similar)
    assert worst_excess(outputs, exact_marginals(tables.target)) > 1


@pytest.mark.parametrize("trials", [TRIALS, FEW])
def test_lenience_is_caught(trials, tables, number_text):
    outputs = decode(tables, number_text, lenience=0.8, drafter_table=tables.similar, trials=trials)
    assert worst_excess(outputs, exact_marginals(tables.target)) > 1


def test_a_missing_rollback_is_caught(tables, number_text):
    outputs = decode(tables, number_text, cache=StaleCache)
    assert worst_excess(outputs, exact_marginals(tables.target)) > 1


def test_a_shared_noise_stream_is_caught(tables, number_text):
    """Proposal and residual must not share their randomness."""

    def share(state):
        state.noise[RESIDUAL] = state.noise[PROPOSAL]
        return state

    outputs = decode(tables, number_text, prepare=share, drafter_table=tables.similar)
    assert worst_excess(outputs, exact_marginals(tables.target)) > 1


def test_a_round_is_algorithm_1_step_by_step(tables):
    """The decoder's first round, and the oracle's whole step, on the same randomness."""
    rows, gamma = 300, NEW_TOKENS - 1
    target, helper = tabular_model(tables.target, SAMPLING), tabular_model(tables.similar, SAMPLING)
    state, first = start(rows), []
    noise = state.noise[:, :, len(PROMPT) :]
    target.allocate(rows, state.tokens.shape[1])
    target.prefill(state)

    def keep(state, scores, draft, verdict, kept):
        first.append([t[: n + 1] for t, n in zip(verdict.tokens.tolist(), verdict.accepted.tolist(), strict=True)])

    verifier = SpeculativeVerifier(SAMPLING)
    policy = FixedGamma(gamma)
    drafter = make_drafter("model", target, "", helper)
    decode_speculative(state, target, drafter, policy, verifier, NoClock(), keep)

    def law(table):
        return lambda text: table[text[-2], text[-1]].softmax(-1).numpy()

    for row in range(rows):
        step = reference.speculative_decoding_step(
            law(tables.target), law(tables.similar), PROMPT, gamma,
            exponentials(noise[PROPOSAL, row], V).numpy(),
            uniforms(noise[ACCEPTANCE, row]).numpy(),
            exponentials(noise[RESIDUAL, row], V).numpy(),
        )  # fmt: skip
        assert first[0][row] == step[len(PROMPT) :]
