"""Algorithm 1 of Leviathan, Kalman, Matias 2023, for a batch of ragged rows.

M_p is the target, M_q the drafter. A round samples gamma guesses from M_q, runs M_p once on all
of them, keeps the n that the verifier accepts and adds one token t of the target's own.
"""

from collections.abc import Callable

from torch import Tensor

from specbench.decoding.noise import renew
from specbench.decoding.protocols import Drafter, GammaPolicy, Noise, Verifier
from specbench.decoding.state import Draft, Rows, State, Verdict, commit_tokens
from specbench.executors.eager import EagerExecutor
from specbench.measure.timers import Stopwatch
from specbench.models.language_model import LanguageModel

RoundHook = Callable[[State, Tensor, Draft, Verdict, Tensor], None]


def ignore(*round_: object) -> None:
    """The round hook of a run that records nothing."""


def these_rows(state: State, clock: Stopwatch) -> bool:
    """The feed of a batch that nobody joins: decoding goes on while a row is active."""
    return any(state.active)


def decode_speculative(
    state: State,
    target: LanguageModel,
    drafter: Drafter,
    policy: GammaPolicy,
    verifier: Verifier,
    clock: Stopwatch,
    after_round: RoundHook = ignore,
    feed: Callable[[State, Stopwatch], bool] = these_rows,
    begin: bool = True,
) -> State:
    """Decodes until `feed`, which may admit new rows before each round, says that there is none. Without
    `begin` the drafter goes on with rows that it knows.

    The caches of the target, for every active row, must hold all committed tokens but the last.
    """
    if begin:
        drafter.begin(state)
    clock.start()
    while feed(state, clock):
        gamma = shrink(policy.next_gamma(state), state, drafter)

        # Sample gamma guesses x_1 .. x_gamma from M_q autoregressively.
        draft = drafter.propose(state, gamma)
        draft = draft.padded(pad_to(policy, draft)) if target.executor.fixed_shapes else draft
        clock.lap("draft")

        # Run M_p in parallel: p_1(x) .. p_{gamma+1}(x).
        p = target.score(state, draft)
        clock.lap("verify")

        # Determine the number of accepted guesses n; adjust p_{n+1} if needed; t ~ p'(x).
        # Return one token from M_p, and n tokens from M_q.
        before = state.lengths
        verdict, kept = accept_and_append(state, p, draft, verifier.under(state), target.executor)
        settle(state, draft, verdict, kept, target, drafter)
        clock.lap("accept")
        policy.observe(draft, [now - then for now, then in zip(state.lengths, before, strict=True)])
        clock.lap("host")
        after_round(state, p, draft, verdict, kept)
        clock.lap("record")
        clock.start()
    return state


def accept_and_append(
    state: State, p: Tensor, draft: Draft, verifier: Verifier, executor: EagerExecutor
) -> tuple[Verdict, Tensor]:
    """The verdict on a draft, and [B], how many tokens of it each row kept."""
    if state.stop_strings is not None:  # these are found on the host
        verdict = verifier.accept(p, draft, Noise.of(state.rows, draft))
        kept = state.append(verdict)
        if verifier.looks_ahead:
            renew(state.noise, state.rows.done)
        return verdict, kept
    verdict, kept, summary = executor.leaf(accept_and_commit)(verifier, p, draft, state.rows)
    state.synchronise(summary)
    return verdict, kept


def accept_and_commit(verifier: Verifier, p: Tensor, draft: Draft, rows: Rows) -> tuple[Verdict, Tensor, Tensor]:
    """`Verifier.accept` and `commit_tokens` as one function of tensors."""
    verdict = verifier.accept(p, draft, Noise.of(rows, draft))
    kept, summary = commit_tokens(rows, verdict)
    if verifier.looks_ahead:
        renew(rows.noise, rows.done)
    return verdict, kept, summary


def settle(state: State, draft: Draft, verdict: Verdict, kept: Tensor, target: LanguageModel, drafter: Drafter) -> None:
    """Puts the accepted path of a tree where a chain's would be, and tells a drafter that wants to know."""
    if not draft.is_chain:
        target.keep_path(verdict.path, state.length - kept)
    if hasattr(drafter, "settle"):
        drafter.settle(state, draft, verdict, state.length - kept)


def shrink(gamma: list[int], state: State, drafter: Drafter) -> list[int]:
    """gamma, cut to what max_new_tokens and the contexts of both models still hold."""
    return [min(wanted, room) for wanted, room in zip(gamma, state.room(drafter.context), strict=True)]


def pad_to(policy: GammaPolicy, draft: Draft) -> int:
    """The next of the policy's widths."""
    drafted = draft.tokens.shape[1]
    return next((width for width in policy.widths if width >= drafted), drafted)
