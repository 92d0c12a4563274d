"""Plain decoding, one token per target call: what speculative decoding is measured against.

It runs through the same model, cache, executor, sampler and clock as the speculative loop.
"""

from collections.abc import Callable

from specbench.decoding.protocols import Verifier
from specbench.decoding.speculative import RoundHook, accept_and_append, ignore, these_rows
from specbench.decoding.state import Draft, State
from specbench.measure.timers import Stopwatch
from specbench.models.language_model import LanguageModel


def decode_autoregressive(
    state: State,
    target: LanguageModel,
    verifier: Verifier,
    clock: Stopwatch,
    after_round: RoundHook = ignore,
    feed: Callable[[State, Stopwatch], bool] = these_rows,
) -> State:
    """Decodes until `feed`, which may admit new rows before each step, says that there is none."""
    no_draft = Draft.empty(state.batch_size, state.tokens.device)
    clock.start()
    while feed(state, clock):
        p = target.score(state, no_draft)
        clock.lap("verify")
        verdict, kept = accept_and_append(state, p, no_draft, verifier.under(state), target.executor)
        clock.lap("accept")
        after_round(state, p, no_draft, verdict, kept)
        clock.lap("record")
        clock.start()
    return state
