"""The output distribution of the whole decoder, through cache and rollback, on a target whose distribution is known.

V = 16; 12 tokens after one prompt, so that a text has several rounds. Chi-squares must be below df + 8 sqrt(2 df): of
the pairs of neighbouring tokens at each position, against their exact distribution, and of all tokens together, each
against its distribution given the text before it. Negative controls must fail the same test. `model`, and one and two
models whose guesses stand side by side, where a shared noise is the fault that is hardest to see, have 10,000 texts.
The others have 5,000: enough for lenience .9, whose chi-square is then 1.45 of its limit. Drafters below drafters,
lookups and the paged cache work row by row on the host and have 2,000; a wrong q of the first is seen with 1,000. A
negative control has as many as its fault needs for about twice the limit, or all. At temperature 0
tests/decoding/test_equivalence.py tests that tokens are equal.
"""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import reference
import torch
from choosing import only, slow_unless
from decoder_cases import CACHES, DRAFTERS, TABULAR, TREES, VERIFIERS, V, make_drafter, tabular_model
from distribution_cases import (
    FEW,
    PROMPT,
    SAMPLING,
    TRIALS,
    AcceptEverything,
    BlockWithOldNoise,
    Distribution,
    ForgetsOrder,
    ResidualFromTarget,
    TooSmallM,
    TraversalWithOldNoise,
    decode,
    learning_policy,
    plain_texts,
    read_by,
    worst_excess,
)

from specbench.cache.slots import StaticCache
from specbench.decoding import speculative
from specbench.decoding.noise import ACCEPTANCE, PROPOSAL, RESIDUAL, exponentials, uniforms
from specbench.decoding.sampling import Sampling
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.timer import Clock
from specbench.drafters import hierarchical
from specbench.drafters.hierarchical import HierarchicalDrafter
from specbench.models.language_model import LanguageModel
from specbench.policies.base import FixedGamma, GammaPolicy
from specbench.policies.choosing import AdaptiveGamma, HeuristicGamma
from specbench.policies.stopping import ConfidenceGamma, EntropyGamma
from specbench.verifiers.base import SpeculativeVerifier
from specbench.verifiers.trees import IterativeVerifier, MatchVerifier


class StaleCache(StaticCache):
    """Negative control for rollback: a column that was written once is never written again."""

    written = len(PROMPT)

    def clear(self):
        super().clear()
        self.written = len(PROMPT)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        before = self.pools[2 * layer_idx].clone() if layer_idx < len(self) else None
        keys, values = super().update(key_states, value_states, layer_idx)
        if before is not None:
            self.pools[2 * layer_idx][:, :, : self.written] = before[:, :, : self.written]
            self.written = max(self.written, self.visible)
        return keys, values


@pytest.fixture
def tables(few_contexts):
    return few_contexts


LIKE_OTHERS = (  # in the default run other drafts of their kind stand for these
    "ngram", "prompt_lookup", "suffix",
    "bigram", "early_exit", "mtp",
    "mtp_distinct", "eagle3", "eagle3_dynamic", "blockwise", "under_ngram", "under_under_model",
    "tree_independent", "tree_distinct", "tree_best", "tree_dynamic", "multi_draft_two", "dflash", 
)  # fmt: skip
MORE = {("model", "block"), ("model", "rejection"), ("model", "traversal"), ("mtp_distinct", "traversal")}
MANY = ("model", "tree_distinct", "multi_draft_two")
BY_ROW = ("suffix", "ngram")


def possible(kind: str, verifier: str) -> bool:
    """Chains have every verifier, but that guesses without a q have no rejection sampling; trees have some."""
    if kind in TREES:
        return VERIFIERS[verifier].trees
    return verifier != "rejection" or kind not in ("ngram", "prompt_lookup", "suffix")


def covering():
    """All pairs. The default run has `MORE` and, for each drafter that is not like another, a verifier that reads q:
    `match` writes the same text whatever q is. The caches take turns."""
    for place, kind in enumerate((*DRAFTERS, *TABULAR)):
        able = [name for name in VERIFIERS if possible(kind, name)]
        reading = [name for name in able if name != "match"]
        usual = "iterative" if kind in TREES else "speculative" if kind.startswith("under_") else None
        own = usual or reading[place % len(reading)]
        for name in able:
            fast = (kind, name) in MORE or (name == own and kind not in LIKE_OTHERS)
            cache = "static" if fast and place % 3 else [*CACHES][place % len(CACHES)]
            yield slow_unless(fast, kind, name, "static" if kind.startswith("under_") else cache)


@pytest.mark.parametrize(("kind", "verifier", "cache"), covering())
def test_every_drafter_and_verifier_leave_the_target_distribution(kind, verifier, cache, tables, number_text):
    by_row = kind.startswith("under_") or kind in BY_ROW or cache == "paged"
    trials = 2_000 if by_row else TRIALS if kind in MANY and verifier in ("speculative", "iterative") else FEW
    judge, table = VERIFIERS[verifier], tables.similar
    outputs = decode(tables, number_text, kind, cache, judge, drafter_table=table, trials=trials)
    assert worst_excess(outputs, Distribution(tables.target)) < 1


@pytest.mark.parametrize("kind", only(["model"], [
    "model", "tree_distinct", "multi_draft", "tree_independent", "early_exit", "under_under_model"
]))  # fmt: skip
def test_an_adversarial_drafter_leaves_the_target_distribution(kind, tables, number_text):
    verifier = VERIFIERS["iterative" if kind in TREES else "speculative"]
    outputs = decode(tables, number_text, kind, verifier=verifier, trials=FEW)
    assert worst_excess(outputs, Distribution(tables.target)) < 1


WRONG = {  # verifier: the drafts, the drafter's table, texts, gamma
    ForgetsOrder: ("tree_distinct", "similar", 3_000, 3),
    TooSmallM: ("model", "similar", 3_000, 3),
    BlockWithOldNoise: ("model", "constant", TRIALS, 5),
    TraversalWithOldNoise: ("model", "constant", TRIALS, 5),
}


@pytest.mark.parametrize("verifier", WRONG)
def test_wrong_verifiers_are_caught(verifier, tables, number_text):
    """The right one, whose class theirs is derived from, passes on the same texts."""
    kind, table, trials, gamma = WRONG[verifier]
    for judge in (verifier, verifier.__base__):
        more = {"drafter_table": getattr(tables, table), "trials": trials, "gamma": gamma}
        outputs = decode(tables, number_text, kind, verifier=judge, **more)
        assert (worst_excess(outputs, Distribution(tables.target)) > 1) == (judge is verifier)


def exchange(draft):
    """Of four guesses at a depth two are the first model's, two the second's: the q are exchanged."""
    if not draft.tokens.shape[1]:
        return draft
    by_model = draft.probs.view(len(draft.tokens), draft.depth, 2, 2, V)
    return replace(draft, probs=by_model.flip(2).flatten(1, 3))


def unheated(draft):
    """q as it was before temperature .6, which is its power .6."""
    if draft.probs is None:
        return draft
    q = draft.probs**0.6
    return replace(draft, probs=q / q.sum(-1, keepdim=True))


def drop_odd_last_guess(draft):
    """Whether a guess is verified must not depend on the guess itself."""
    if not draft.tokens.shape[1]:
        return draft
    last = draft.tokens.gather(1, (draft.count - 1).clamp(min=0)[:, None])[:, 0]
    return replace(draft, count=draft.count - ((last % 2 == 1) & (draft.count > 0)).long())


def share_noise(state):
    """Proposal and residual must not share their randomness."""
    state.noise[RESIDUAL] = state.noise[PROPOSAL]
    return state


CONTROLS = {
    "all accepted": {"verifier": AcceptEverything, "trials": 1_000},
    "residual of the target": {"verifier": ResidualFromTarget, "trials": 1_000},
    "lenience": {"lenience": 0.9, "trials": FEW},
    "no rollback": {"cache": StaleCache, "trials": 1_000, "drafter_table": None},
    "shared noise": {"prepare": share_noise},
    "q before the temperature": {"own": Sampling(0.6), "spoil": unheated, "trials": 1_000},
    "guesses that are dropped": {"gamma": 2, "spoil": drop_odd_last_guess, "trials": 4_000},
    "exchanged q": {"kind": "multi_draft_two", "verifier": IterativeVerifier, "spoil": exchange, "trials": 1_000},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_wrong_is_caught(name, tables, number_text):
    """Negative controls."""
    outputs = decode(tables, number_text, **{"drafter_table": tables.similar} | CONTROLS[name])
    assert worst_excess(outputs, Distribution(tables.target)) > 1


def test_a_path_that_is_left_where_it_was_is_caught(tables, number_text, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(LanguageModel, "commit_path", lambda *arguments: None)
    outputs = decode(tables, number_text, "tree_distinct", verifier=IterativeVerifier, drafter_table=tables.similar,
                     trials=1_000)  # fmt: skip
    assert worst_excess(outputs, Distribution(tables.target)) > 1


@pytest.mark.parametrize("renewed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_the_drafter_below_remembers_needs_new_noise(renewed, tables, number_text, monkeypatch):
    """Its heads' hidden state follows from guesses that were discarded, and so from the numbers that drew them."""
    if not renewed:  # negative control
        monkeypatch.setattr(HierarchicalDrafter, "rollback", lambda *arguments: None)
    last = 4 * torch.eye(V).expand(V, V, V)  # the drafter repeats the last token
    outputs = decode(tables, number_text, "under_blockwise", drafter_table=last, trials=1_500)
    assert (worst_excess(outputs, Distribution(tables.target)) > 1) != renewed


@pytest.mark.parametrize("kind", ["under_model", pytest.param("under_under_model", marks=pytest.mark.slow)])
def test_a_q_of_the_drafter_below_is_caught(kind, tables, number_text, monkeypatch):
    """Negative control: where a guess of the drafter below was judged, its q is kept instead of the drafter's own."""

    def other_q(state, model, below, policy, judge, clock, hook, begin):
        def keep(inner, scores, draft, verdict, kept):
            q = scores.p if draft.probs is None else torch.cat([draft.probs, scores.p[:, -1:]], 1)
            hook(inner, replace(scores, p=q), draft, verdict, kept)

        return decode_speculative(state, model, below, policy, judge, clock, keep, begin=begin)

    monkeypatch.setattr(hierarchical, "decode_speculative", other_q)
    outputs = decode(tables, number_text, kind, drafter_table=tables.similar, trials=1_000)
    assert worst_excess(outputs, Distribution(tables.target)) > 1


@pytest.mark.parametrize(("own", "kind"), [
    slow_unless(kind == "model" and own != Sampling(1.5, top_k=4), own, kind)
    for own in (Sampling(0.6), Sampling(1.5, top_k=4), Sampling(0)) for kind in ("model", "tree_distinct")
], ids=str)  # fmt: skip
def test_a_drafter_with_a_standardization_of_its_own(own, kind, tables, number_text):
    """Section 6: M_q may be sampled otherwise than M_p."""
    verifier = VERIFIERS["iterative" if kind in TREES else "speculative"]
    outputs = decode(tables, number_text, kind, verifier=verifier, drafter_table=tables.similar, own=own, trials=FEW)
    assert worst_excess(outputs, Distribution(tables.target)) < 1


STANDARDIZED = [Sampling(top_p=0.8), Sampling(0.7, top_k=6, top_p=0.9), Sampling(repetition_penalty=1.5)]


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        *(slow_unless(own == STANDARDIZED[1], "model", own) for own in STANDARDIZED),
        ("tree_distinct", STANDARDIZED[2]),
        pytest.param("under_model", STANDARDIZED[2], marks=pytest.mark.slow),
    ],
    ids=["top_p", "all", "penalty", "tree", "hierarchical"],
)
def test_a_standardized_distribution_is_left_as_it_is(kind, sampling, tables, number_text):
    verifier = VERIFIERS["iterative" if kind in TREES else "speculative"]
    outputs = decode(tables, number_text, kind, verifier=verifier, drafter_table=tables.similar, sampling=sampling,
                     trials=FEW)  # fmt: skip
    assert worst_excess(outputs, Distribution(tables.target, sampling)) < 1


def test_a_forgotten_standardization_is_caught(tables, number_text, monkeypatch):
    """Negative controls: no top-p at all, and a penalty that does not reach the guesses of the round."""
    outputs = decode(tables, number_text, drafter_table=tables.similar, trials=1_000)
    assert worst_excess(outputs, Distribution(tables.target, Sampling(top_p=0.8))) > 1
    seen, penalty = LanguageModel._seen, Sampling(repetition_penalty=3.0)

    def committed(self, text, length, guesses, tree):
        return seen(self, text, length, guesses[:, :0], None).expand(-1, guesses.shape[1] + 1, -1)

    monkeypatch.setattr(LanguageModel, "_seen", committed)
    outputs = decode(tables, number_text, drafter_table=tables.similar, sampling=penalty, trials=FEW)
    assert worst_excess(outputs, Distribution(tables.target, penalty)) > 1


class OneForEachRow(GammaPolicy):
    """A policy of its own for each row, so that what it learns is what the row has seen."""

    def __init__(self, policy: GammaPolicy, rows: int):
        self.own = [deepcopy(policy) for _ in range(rows)]
        self.largest, self.widths, self.signal = policy.largest, policy.widths, policy.signal

    def _of(self, state, row):
        own = state.sequences[row]
        return SimpleNamespace(sequences=[own], lengths=[len(own.tokens)], active=[own.active], batch_size=1)

    def next_gamma(self, state):
        return [own.next_gamma(self._of(state, row))[0] for row, own in enumerate(self.own)]

    def go_on(self, state, count, signals):
        each = zip(self.own, count, signals, strict=True)
        return [own.go_on(self._of(state, row), [n], [s])[0] for row, (own, n, s) in enumerate(each)]

    def observe(self, drafted, kept):
        for own, guesses, new in zip(self.own, drafted, kept, strict=True):
            own.observe([guesses], [new])


@pytest.mark.parametrize(
    "policy",
    [
        slow_unless(False, learning_policy(AdaptiveGamma, largest=3, prior=2.0, forget=0.1, probe=64)),
        slow_unless(False, learning_policy(EntropyGamma, largest=3)),
        learning_policy(HeuristicGamma, gamma=2, largest=3),
        learning_policy(ConfidenceGamma, largest=3, threshold=0.3),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_a_gamma_that_depends_on_the_text_leaves_the_target_distribution(policy, tables, number_text):
    own = OneForEachRow(policy, 2_500)
    outputs = decode(tables, number_text, policy=own, drafter_table=tables.similar, trials=2_500)
    assert worst_excess(outputs, Distribution(tables.target)) < 1


class AfterCertainGuesses(GammaPolicy):
    """An adversary: drafts one guess in the next round if the last guess that was discarded is one of certain tokens,
    else none; and three in rounds after which nothing was discarded."""

    largest, widths = 3, (1, 2, 3)

    def __init__(self, rows: int):
        self.signal = lambda q, x: x.double()
        self.seen = [[] for _ in range(rows)]
        self.next = [3] * rows

    def next_gamma(self, state):
        self.seen = [[] for _ in self.next]
        return self.next

    def go_on(self, state, count, signals):
        for own, n, token in zip(self.seen, count, signals, strict=True):
            if len(own) < n:
                own.append(token)
        return [True] * len(count)

    def observe(self, drafted, kept):
        gone = [own[new : new + 1] for own, new in zip(self.seen, kept, strict=True)]  # at the next round's position
        self.next = [int(tokens[0] < 5) if tokens else 3 for tokens in gone]


@pytest.mark.parametrize("renewed", [True, False])
@pytest.mark.parametrize("verifier", [SpeculativeVerifier, pytest.param(MatchVerifier, marks=pytest.mark.slow)])
def test_a_gamma_that_depends_on_discarded_guesses_needs_new_noise(renewed, verifier, tables, number_text, monkeypatch):
    """The next guess at that position would be drawn with the numbers that the policy has seen."""
    if not renewed:  # negative control
        monkeypatch.setattr(speculative, "renew", lambda noise, done: None)
    policy = AfterCertainGuesses(FEW)
    outputs = decode(tables, number_text, verifier=verifier, policy=policy, drafter_table=tables.constant, trials=FEW)
    caught = worst_excess(outputs, Distribution(tables.target)) > 1
    assert caught == (not renewed and verifier is SpeculativeVerifier)


def test_autoregressive_decoding_has_the_target_distribution(tables):
    outputs = plain_texts(tabular_model(tables.target, SAMPLING), TRIALS)
    assert worst_excess(outputs, Distribution(tables.target)) < 1


def test_a_round_is_algorithm_1_step_by_step(tables):
    """The decoder's first round, and the oracle's whole step, on the same randomness."""
    rows, gamma = 300, 4
    target, helper = tabular_model(tables.target, SAMPLING), tabular_model(tables.similar, SAMPLING)
    state, first = read_by(target, rows, gamma + 1), []
    noise = state.noise[:, :, len(PROMPT) :]

    def keep(state, scores, draft, verdict, kept):
        first.append([t[: n + 1] for t, n in zip(verdict.tokens.tolist(), verdict.accepted.tolist(), strict=True)])

    verifier = SpeculativeVerifier(SAMPLING)
    policy = FixedGamma(gamma)
    drafter = make_drafter("model", target, "", helper)
    decode_speculative(state, target, drafter, policy, verifier, Clock(), keep)

    def distribution(table):
        return lambda text: table[text[-2], text[-1]].softmax(-1).numpy()

    for row in range(rows):
        step = reference.speculative_decoding_step(
            distribution(tables.target), distribution(tables.similar), PROMPT, gamma,
            exponentials(noise[PROPOSAL, row], V).numpy(),
            uniforms(noise[ACCEPTANCE, row]).numpy(),
            exponentials(noise[RESIDUAL, row], V).numpy(),
        )  # fmt: skip
        assert first[0][row] == step[len(PROMPT) :]
