"""Plain decoding, one token per target call: what speculative decoding is measured against.

It runs through the same model, cache, executor, sampler and clock as the speculative loop.
"""

from dataclasses import dataclass

from specbench.decoding.speculative import Noise, RoundHook, Verifier, ignore
from specbench.decoding.state import Draft, State
from specbench.measure.timers import Stopwatch
from specbench.models.language_model import LanguageModel


class AutoregressiveBaseline:
    """`baseline=autoregressive`: nothing beside our own plain decoding, which every run has."""

    @dataclass
    class Settings:
        pass


def decode_autoregressive(
    state: State,
    target: LanguageModel,
    verifier: Verifier,
    clock: Stopwatch,
    after_round: RoundHook = ignore,
) -> State:
    """Decodes every row of the state to its stop or limit; the cache must be prefilled."""
    no_draft = Draft.empty(state.batch_size, state.tokens.device)
    while any(state.active):
        clock.start()
        p = target.score(state, no_draft)
        clock.lap("verify")
        verdict = verifier.accept(p, no_draft, Noise.of(state, 0))
        clock.lap("accept")
        kept = state.append(verdict)
        state.synchronise()
        clock.lap("host")
        after_round(state, p, no_draft, verdict, kept)
    return state
