"""Plain (autoregressive) decoding, one token per target call: the baseline of every speedup.

It runs through the same model, cache, executor, sampler and clock as the speculative loop.
"""

from typing import TYPE_CHECKING

from specbench.decoding.draft import Draft
from specbench.decoding.speculative import Admit, RoundHook, accept_and_append, any_active, ignore
from specbench.decoding.state import State
from specbench.decoding.timer import Clock, Stage

if TYPE_CHECKING:
    from specbench.decoding.protocols import Target, Verifier


def decode_autoregressive(
    state: State,
    target: "Target",
    verifier: "Verifier",
    clock: Clock,
    after_round: RoundHook = ignore,
    admit: Admit = any_active,
) -> State:
    """Decodes one token per active row and step until `admit` returns False; returns the state. `admit` may give
    rows to requests before each step. For every active row, the target's cache must hold all committed tokens but the
    last."""
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
