"""Algorithm 1 of Leviathan, Kalman, Matias 2023, for a batch of ragged rows.

M_p is the target, M_q the drafter. A round samples gamma guesses from M_q, runs M_p once on all
of them, keeps the n that the verifier accepts and adds one token t of the target's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specbench.decoding.noise import ACCEPTANCE, RESIDUAL, uniforms
from specbench.decoding.state import Draft, State, Verdict
from specbench.measure.timers import Stopwatch
from specbench.models.language_model import LanguageModel


@dataclass(frozen=True)
class Noise:
    """The verifier's randomness for one round."""

    r: Tensor  # [B, N], uniforms for the acceptance of each guess
    bits: Tensor  # [B, N + 1], to draw the token after n accepted guesses

    @staticmethod
    def of(state: State, guesses: int) -> "Noise":
        return Noise(
            r=uniforms(state.window(state.noise[ACCEPTANCE], 0, guesses)),
            bits=state.window(state.noise[RESIDUAL], 0, guesses + 1),
        )


class Drafter(Protocol):
    """Guesses from M_q. `context` is the longest text it can read, in tokens."""

    context: int

    def begin(self, state: State, clock: Stopwatch) -> None:
        """A new batch of prompts; whatever was remembered of the last one is dropped. A drafter
        that reads the prompt laps `clock` with "prefill" after it, which is not decoding time."""

    def propose(self, state: State, gamma: list[int]) -> Draft:
        """At most gamma[b] guesses for row b, with the q that they were drawn from; where no row
        has a guess, the round is a plain one-token step."""


class GammaPolicy(Protocol):
    """How many tokens to draft next, at most `largest`."""

    largest: int

    def next_gamma(self, state: State) -> list[int]: ...

    def observe(self, draft: Draft, verdict: Verdict) -> None: ...


class Verifier(Protocol):
    """Which guesses to keep."""

    lossless: bool

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict: ...


RoundHook = Callable[[State, Tensor, Draft, Verdict, Tensor], None]


def ignore(*round_: object) -> None:
    """The round hook of a run that records nothing."""


def decode_speculative(
    state: State,
    target: LanguageModel,
    drafter: Drafter,
    policy: GammaPolicy,
    verifier: Verifier,
    clock: Stopwatch,
    after_round: RoundHook = ignore,
) -> State:
    """Decodes every row of the state to its stop or limit; the target's cache must be prefilled."""
    drafter.begin(state, clock)
    while any(state.active):
        clock.start()
        gamma = shrink(policy.next_gamma(state), state, drafter)

        # Sample gamma guesses x_1 .. x_gamma from M_q autoregressively.
        draft = drafter.propose(state, gamma)
        clock.lap("draft")

        # Run M_p in parallel: p_1(x) .. p_{gamma+1}(x).
        p = target.score(state, draft)
        clock.lap("verify")

        # Determine the number of accepted guesses n; adjust p_{n+1} if needed; t ~ p'(x).
        verdict = verifier.accept(p, draft, Noise.of(state, draft.tokens.shape[1]))
        clock.lap("accept")

        # Return one token from M_p, and n tokens from M_q.
        kept = state.append(verdict)
        state.synchronise()
        policy.observe(draft, verdict)
        clock.lap("host")
        after_round(state, p, draft, verdict, kept)
    return state


def shrink(gamma: list[int], state: State, drafter: Drafter) -> list[int]:
    """gamma, cut to what max_new_tokens and the contexts of both models still hold."""
    return [min(wanted, room) for wanted, room in zip(gamma, state.room(drafter.context), strict=True)]
