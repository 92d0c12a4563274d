"""Algorithm 1 of Leviathan, Kalman, Matias 2023, for a batch of ragged rows.

M_p is the target, M_q the drafter. A round samples gamma guesses from M_q, runs M_p once on all of them, keeps the n
that the verifier accepts and adds one token t: recovered after a rejection, bonus if all were accepted.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.noise import PROPOSAL, Noise, renew
from specbench.decoding.rows import Rows, commit_tokens, summary_of
from specbench.decoding.state import State
from specbench.decoding.timer import Clock, Stage

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter, Executor, GammaPolicy, Target, Verifier

RoundHook = Callable[[State, Scores, Draft, Verdict, Tensor], None]
Admit = Callable[[State, Clock], bool]


def ignore(state: State, scores: Scores, draft: Draft, verdict: Verdict, kept: Tensor) -> None:
    """A round hook that records nothing. kept [B] is the number of tokens that each row kept."""


def any_active(state: State, clock: Clock) -> bool:
    """The scheduler of a fixed batch: True while a row is active."""
    return any(state.active)


def decode_speculative(
    state: State, target: "Target", drafter: "Drafter", policy: "GammaPolicy", verifier: "Verifier", clock: Clock,
    after_round: RoundHook = ignore, admit: Admit = any_active, begin: bool = True,
) -> State:  # fmt: skip
    """Repeats Algorithm 1 until `admit`, which may give rows to requests, returns False; returns the state. For every
    active row the target's cache must hold all committed tokens but the last. Without `begin` the drafter goes on."""
    drafter.widths = sorted(policy.widths) if target.executor.fixed_shapes else ()  # few shapes to compile or capture
    if begin:
        drafter.begin(state, policy.stop)
    clock.start()
    while admit(state, clock):
        draft, scores, verdict, kept = one_round(state, target, drafter, policy, verifier.under(state), clock)
        root = state.length - kept - 1
        target.rollback(state, draft, verdict, scores, root)  # moves a tree's path; a chain's next call overwrites
        drafter.rollback(state, draft, verdict, scores, root)
        clock.end(Stage.ACCEPT)

        policy.observe(state.drafted, state.kept)
        if policy.constant is None:  # it may have learnt from guesses that were discarded
            renew(state.noise[PROPOSAL], state.rows.done)
        clock.end(Stage.HOST)

        after_round(state, scores, draft, verdict, kept)
        clock.end(Stage.RECORD)
        clock.start()
    return state


def one_round(
    state: State, target: "Target", drafter: "Drafter", policy: "GammaPolicy", verifier: "Verifier", clock: Clock
) -> tuple[Draft, Scores, Verdict, Tensor]:
    """One round of Algorithm 1, without the rollbacks; returns the tokens kept [B] too."""
    gamma = choose_gamma(policy, state, drafter.context)
    if policy.whole and target.executor.whole_rounds and state.stop_strings is None:
        found = drafter.whole_round(state, target, verifier, gamma)
        if found is not None:
            for stage, event in target.executor.marks:
                clock.end(stage, event)
            return found
    draft = propose(drafter, state, gamma)  # sample x_1 .. x_gamma from M_q autoregressively
    clock.end(Stage.DRAFT)
    scores = target.score(state, draft, drafter.needs_hidden)  # run M_p in parallel: p_1(x) .. p_{gamma+1}(x)
    clock.end(Stage.VERIFY)
    verdict, kept = accept_and_append(state, scores.p, draft, verifier, target.executor)  # n, t ~ p'
    return draft, scores, verdict, kept


def choose_gamma(policy: "GammaPolicy", state: State, context: int) -> list[int]:
    """gamma of each row, at most what its limit and the `context` of the drafter, in tokens, leave room for."""
    room = state.remaining(context)
    return [min(wanted, left) for wanted, left in zip(policy.next_gamma(state), room, strict=True)]


def propose(drafter: "Drafter", state: State, gamma: list[int]) -> Draft:
    """The drafter's guesses, at most gamma[b] levels for row b, padded to a width that its executor knows."""
    draft = drafter.propose(state, gamma)
    state.drawn = draft.depth
    return draft.padded(drafter.steps([draft.depth])) if draft.is_chain else draft


def accept_and_append(
    state: State, p: Tensor, draft: Draft, verifier: "Verifier", executor: "Executor"
) -> tuple[Verdict, Tensor]:
    """Judges a draft and commits its tokens; returns the verdict and the tokens kept [B]. p [B, N + 1, V]."""
    if state.stop_strings is None:
        verdict, kept, summary = executor.compiled(accept_and_commit)(verifier, p, draft, state.rows)
    else:  # stop strings are searched on the host, outside the compiled function
        verdict, kept, summary = accept_and_commit(verifier, p, draft, state.rows, state.find_stop_strings)
    state.read_round(summary)
    return verdict, kept


def accept_and_commit(
    verifier: "Verifier", p: Tensor, draft: Draft, rows: Rows, find_cuts: Callable[[Verdict], Tensor] | None = None
) -> tuple[Verdict, Tensor, Tensor]:
    """`Verifier.accept` and `commit_tokens` as one function of tensors, for executors: returns the verdict, the number
    of tokens kept [B], and `summary_of` the round [3 + D + 1, B]. p [B, N + 1, V]; `find_cuts` finds stop strings."""
    verdict = verifier.accept(p, draft, Noise(rows.noise, rows.length, draft.levels))
    kept = commit_tokens(rows, verdict, None if find_cuts is None else find_cuts(verdict))
    if verifier.looks_ahead:
        renew(rows.noise, rows.done)
    return verdict, kept, summary_of(rows, verdict, draft)


def decode_autoregressive(
    state: State, target: "Target", verifier: "Verifier", clock: Clock, after_round: RoundHook = ignore,
    admit: Admit = any_active,
) -> State:  # fmt: skip
    """Plain decoding, the baseline of every speedup, through the same model, cache, executor, sampler and clock.

    Decodes one token per active row and step until `admit`, which may give rows to requests, returns False; returns the
    state. For every active row the target's cache must hold all committed tokens but the last."""
    no_draft = Draft.empty(state.batch_size, state.tokens.device)
    state.drawn = 0
    clock.start()
    while admit(state, clock):
        scores = target.score(state, no_draft)
        clock.end(Stage.VERIFY)
        verdict, kept = accept_and_append(state, scores.p, no_draft, verifier.under(state), target.executor)
        target.rollback(state, no_draft, verdict, scores, state.length - kept - 1)
        clock.end(Stage.ACCEPT)
        after_round(state, scores, no_draft, verdict, kept)
        clock.end(Stage.RECORD)
        clock.start()
    return state
