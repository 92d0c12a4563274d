"""The distribution of whole texts of the tabular target, texts of every drafter and verifier, and their chi-squares."""

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from decoder_cases import V, make_drafter, spare_of, tabular_model, verifier_of

from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_autoregressive, decode_speculative
from specbench.decoding.state import State
from specbench.decoding.timer import Clock
from specbench.decoding.verify import leading, speculative_sampling
from specbench.decoding.verify_tree import iterative_sampling
from specbench.models.language_model import LanguageModel
from specbench.policies.base import Costs, FixedGamma
from specbench.verifiers.base import SpeculativeVerifier
from specbench.verifiers.chains import BlockVerifier, RejectionVerifier, rejection_rate
from specbench.verifiers.trees import IterativeVerifier, TraversalVerifier

TRIALS, FEW = 10_000, 5_000  # texts, which decode together
PROMPT = [3, 7, 1, 3, 7, 2, 3]  # repeats, so that copying drafters have something to copy
NEW_TOKENS = 12
SAMPLING = Sampling(temperature=1.0)
LEAST = 5  # texts expected in a cell; rarer cells count as one


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


class Distribution:
    """The distribution of texts after PROMPT: section 2.2 once more, in numpy."""

    def __init__(self, table: torch.Tensor, sampling: Sampling = SAMPLING):
        self.logits, self.sampling = table.double().numpy(), sampling
        distributions, of = np.unique(self.logits.reshape(V * V, V), axis=0, return_inverse=True)
        self.contexts = len(distributions)
        self.context = of.reshape(V, V)  # the number of the distribution after each pair
        self.step = None  # p of the next token after each pair, [before, last, next], if it depends on nothing else
        if sampling.repetition_penalty == 1:
            self.step = self.after(np.stack(np.divmod(np.arange(V * V), V), 1)).reshape(V, V, V)

    def after(self, texts: np.ndarray) -> np.ndarray:
        """p of the next token [n, V] after texts [n, t]."""
        if self.step is not None:
            return self.step[texts[:, -2], texts[:, -1]]
        logits, own = self.logits[texts[:, -2], texts[:, -1]], self.sampling
        seen = np.zeros_like(logits, bool)
        np.put_along_axis(seen, texts, True, 1)
        penalised = np.where(logits < 0, logits * own.repetition_penalty, logits / own.repetition_penalty)
        logits = np.where(seen, penalised, logits) / own.temperature
        if own.top_k:
            logits = np.where(logits < np.sort(logits, 1)[:, -own.top_k, None], -np.inf, logits)
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        if own.top_p < 1:  # the fewest of the most probable tokens that have top_p of the mass
            order = np.argsort(-p, 1)
            before = np.cumsum(np.take_along_axis(p, order, 1), 1) - np.take_along_axis(p, order, 1)
            kept = np.zeros_like(p, bool)
            np.put_along_axis(kept, order, before < own.top_p, 1)
            p = np.where(kept, p, 0)
            p /= p.sum(1, keepdims=True)
        return p

    def pairs(self) -> np.ndarray:
        """The distribution of the last two tokens at each output position, [NEW_TOKENS, V, V], without a penalty."""
        pair = np.zeros((V, V))
        pair[PROMPT[-2], PROMPT[-1]] = 1
        distributions = []
        for _ in range(NEW_TOKENS):
            pair = np.einsum("ab,abc->bc", pair, self.step)
            distributions.append(pair)
        return np.array(distributions)


def excess(counts: np.ndarray, expected: np.ndarray, distributions: int = 1) -> float:
    """Chi-square of counts in cells [n], in units of its limit. The cells are those of so many multinomials."""
    if counts[expected == 0].any():
        return np.inf
    rare = expected < LEAST
    cells = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected)]
    (counts, expected), df = (cell[cells[1] > 0] for cell in cells), int((~rare).sum() + rare.any()) - distributions
    return (((counts - expected) ** 2) / expected).sum() / (df + 8 * np.sqrt(2 * df))


def worst_excess(outputs: np.ndarray, distribution: Distribution) -> float:
    """The largest chi-square of outputs [n, NEW_TOKENS] in units of its limit: above 1 the distribution is refused."""
    texts = np.concatenate([np.tile(PROMPT, (len(outputs), 1)), outputs], 1)
    counts, expected = np.zeros((2, distribution.contexts, V))
    for end in range(len(PROMPT), texts.shape[1]):
        context = distribution.context[texts[:, end - 2], texts[:, end - 1]]
        counts += np.bincount(context * V + texts[:, end], minlength=counts.size).reshape(counts.shape)
        after = distribution.after(texts[:, :end]).T
        expected += np.stack([np.bincount(context, p, distribution.contexts) for p in after], 1)
    found = [excess(counts.ravel(), expected.ravel(), distribution.contexts)]
    if distribution.sampling.repetition_penalty == 1:
        for end, pair in enumerate(distribution.pairs(), len(PROMPT)):
            counts = np.bincount(texts[:, end - 1] * V + texts[:, end], minlength=V * V)
            found.append(excess(counts, pair.ravel() * len(outputs)))
    return max(found)


@cache
def fresh(rows: int, seed: int, spare: int) -> State:
    keys = torch.randint(2**62, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
    jobs = [Sequence(PROMPT, len(PROMPT) + NEW_TOKENS, key) for key in keys]
    return State.start(jobs, [], spare, torch.device("cpu"))


def start(rows: int, seed: int = 0, spare: int = 4) -> State:
    """As many rows, whose noise depends on a seed."""
    state = fresh(rows, seed, spare)
    fields = {name: t.clone() for name, t in vars(state.rows).items()}
    copied = State(replace(state.rows, **fields))
    copied.sequences = [replace(sequence, tokens=list(PROMPT)) for sequence in state.sequences]
    return copied


def read_by(target: LanguageModel, rows: int, spare: int = 4) -> State:
    """As `start`, with texts that the target has read."""
    state = start(rows, spare=spare)
    target.allocate(rows, state.tokens.shape[1])
    target.prefill(state)
    return state


def plain_texts(target: LanguageModel, rows: int) -> np.ndarray:
    """What every row writes by plain decoding, [rows, NEW_TOKENS]."""
    state = read_by(target, rows)
    decode_autoregressive(state, target, verifier_of(SpeculativeVerifier, target.sampling), Clock())
    return new_tokens(state)


def new_tokens(state: State) -> np.ndarray:
    """What every row wrote, [rows, NEW_TOKENS]."""
    return state.tokens[:, len(PROMPT) : len(PROMPT) + NEW_TOKENS].numpy()


def decode(tables, number_text, kind="model", cache="static", verifier=SpeculativeVerifier, gamma=3, lenience=1.0,
           prepare=lambda state: state, drafter_table=None, policy=None, spoil=lambda draft: draft,
           trials=TRIALS, sampling=SAMPLING, own=None, vocabulary=None):  # fmt: skip
    """What every trial wrote, [trials, NEW_TOKENS]. `own` is the drafter's sampling and `vocabulary` how it reads and
    writes the target's tokens, if they are not the target's."""
    target = tabular_model(tables.target, sampling, cache)
    table = tables.adversarial if drafter_table is None else drafter_table
    helper = tabular_model(table, own or sampling, cache, vocab_size=V)
    helper.vocabulary = vocabulary or helper.vocabulary
    drafter = make_drafter(kind, target, number_text, helper)
    propose = drafter.propose
    drafter.propose = lambda state, gamma: spoil(propose(state, gamma))
    state = prepare(read_by(target, trials, spare_of(kind, gamma)))
    judge = verifier_of(verifier, sampling, lenience)
    decode_speculative(state, target, drafter, policy or FixedGamma(gamma), judge, Clock())
    return new_tokens(state)


class ForgetsOrder(IterativeVerifier):
    """Negative control: every sibling is judged as if it were the first."""

    def accept(self, p, draft, noise):
        if not draft.tokens.shape[1]:
            return super().accept(p, draft, noise)
        parent = draft.parents[0].tolist()
        first = [parent.index(above) for above in parent]
        return iterative_sampling(p, replace(draft, probs=draft.probs[:, first]), noise.r, noise.bits)


class TooSmallM(RejectionVerifier):
    """Negative control: rejection sampling with an M that is a quarter of max p / q (A.2)."""

    def accept(self, p, draft, noise):
        if not draft.tokens.shape[1]:
            return super().accept(p, draft, noise)
        p_x, q_x = (each.gather(-1, draft.tokens[..., None])[..., 0] for each in (p[:, :-1], draft.probs))
        n = leading(noise.r * q_x < 4 * rejection_rate(p[:, :-1], draft.probs) * p_x, draft.count)
        return speculative_sampling(p, replace(draft, count=n), torch.zeros_like(noise.r), noise.bits)


class BlockWithOldNoise(BlockVerifier):
    """Negative control: what was looked at behind the kept block is drawn from again."""

    looks_ahead = False


class TraversalWithOldNoise(TraversalVerifier):
    """Negative control, as `BlockWithOldNoise`."""

    looks_ahead = False


def learning_policy(kind, **settings):
    policy = kind(**settings)
    costs = Costs()
    costs.calls = {0: [1.0], 3: [1.6]}
    policy.calibrate(costs)
    return policy
