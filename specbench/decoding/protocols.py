"""The seams of the decoding loop: what a drafter, a gamma policy and a verifier are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specbench.decoding.noise import ACCEPTANCE, RESIDUAL, uniforms
from specbench.decoding.state import Draft, Rows, State, Verdict, window


@dataclass(frozen=True)
class Noise:
    """The verifier's randomness for one round, cut out of the table when it is asked for."""

    table: Tensor  # [3, B, T]
    length: Tensor  # [B]
    guesses: int

    @staticmethod
    def of(rows: Rows, draft: Draft) -> "Noise":
        return Noise(rows.noise, rows.length, draft.tokens.shape[1])

    @property
    def r(self) -> Tensor:
        """[B, N] uniforms for the acceptance of each guess."""
        return uniforms(window(self.table[ACCEPTANCE], self.length, self.guesses))

    @property
    def bits(self) -> Tensor:
        """[B, N + 1], to draw the token after n accepted guesses."""
        return window(self.table[RESIDUAL], self.length, self.guesses + 1)


class Drafter(Protocol):
    """Guesses from M_q. `context` is the longest text it can read, in tokens. One that has a
    language model shows it as `model`, so that prompts are read into its cache too."""

    context: int

    def begin(self, state: State) -> None:
        """A new batch of rows; whatever was remembered of the last one is dropped."""

    def propose(self, state: State, gamma: list[int]) -> Draft:
        """At most gamma[b] guesses for row b, with the q that they were drawn from; where no row
        has a guess, the round is a plain one-token step."""


class GammaPolicy(Protocol):
    """How many tokens to draft next, at most `largest`. `widths` are the lengths of draft that it
    uses, which executors with fixed shapes pad to; `constant` is gamma where it never changes."""

    largest: int
    widths: tuple[int, ...]
    constant: int | None

    def next_gamma(self, state: State) -> list[int]: ...

    def observe(self, draft: Draft, kept: list[int]) -> None:
        """What became of the round: `kept` tokens per row, its own one included, 0 in idle rows."""


Signal = Callable[[Tensor, Tensor], Tensor]


class DraftStop(Protocol):
    """Ends a row's draft while it is being drawn, for policies that look at the drafter's own law."""

    signal: Signal  # q [B, V] (before argmax at temperature 0) and the guess [B] to a number [B]

    def go_on(self, state: State, count: list[int], signals: list[float]) -> list[bool]:
        """Whether to draft another guess, given how many there are and the signal of the last one."""


class Verifier(Protocol):
    """Which guesses to keep."""

    lossless: bool
    lenience: float
    judges_by_law: bool  # whether acceptance follows from p, q and lenience alone (A.5)

    def under(self, state: State) -> "Verifier":
        """The verifier for this round: itself, unless its lenience depends on the load."""

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict: ...

    def beta(self, p: Tensor, draft: Draft) -> Tensor: ...
