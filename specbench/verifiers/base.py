"""Base class of verifiers, and the paper's own for chains: speculative sampling (2.3) with lenience (A.5)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from specbench.decoding import verify
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import State
from specbench.settings import Component


class Verifier(Component, ABC):
    """A rule that accepts or rejects guesses. `lossless` says whether its output distribution is the target's."""

    trees: ClassVar[bool] = False  # whether it can judge trees, not only chains
    takes_lenience: ClassVar[bool] = False  # whether lenience below 1 is possible (A.5)
    needs_q: ClassVar[bool] = False  # whether it cannot judge guesses whose q is a point mass
    only_greedy: ClassVar[bool] = False  # whether the temperature must be 0
    judges_by_position: bool = False  # whether acceptance at a position depends only on p, q and lenience there
    # The probability that the first guess x of a step stands there: min(1, p(x) / q(x)), p(x), or None if it depends on
    # more. The losslessness test compares it with what happened.
    keeps_guess: Literal["p / q", "p"] | None = None
    rule: str = "sum min(p, q)"  # `beta` of a guess that was drawn from q
    looks_ahead: bool = False  # whether a verdict depends on guesses after the first rejected one

    judged: ClassVar[bool] = True  # whether texts are read again for the verdict
    lossless: bool = True
    lenience: float = 1.0
    note: str | None = None  # a warning to print with the results

    def __init__(self, greedy: bool):
        """`greedy` means temperature 0."""
        self.greedy = greedy
        self.levels: Sequence[Verifier] = (self,)  # those that `under` picks from
        self.step = 1  # of requests that wait, for which the next one is picked

    @classmethod
    def from_settings(cls, settings: Any, sampling: Sampling, lenience: float) -> "Verifier":
        """Builds the verifier for a target with this sampling; by default its settings are further arguments."""
        return cls(sampling.greedy, **vars(settings))

    @classmethod
    def refuse_gamma(cls, settings: Any, largest: int) -> None:
        """Raises ConfigError if these settings cannot judge drafts of at most `largest` guesses."""

    def under(self, state: State) -> "Verifier":
        """The verifier of this round, by the number of requests that wait; it is this one unless there are others."""
        return self.levels[min(state.waiting // self.step, len(self.levels) - 1)]

    def acceptance_rule(self, drafter: type[Any], settings: Any) -> str:
        """What `beta` is, in words, for drafters of a class with these settings."""
        if self.greedy:
            return "1 if the target takes the guess, else 0"
        if drafter.branches(settings):
            return "the probability that a guess of the step is accepted"
        if drafter.point_masses(settings):
            return "p(x) of the guess x" if self.lenience == 1 else "p(x) / l of the guess x"
        return self.rule

    @abstractmethod
    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        """Judges a draft by p [B, N + 1, V] and the round's noise: the part of Algorithm 1 after M_p has run."""

    @abstractmethod
    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        """[B, D]: the probability that a guess is accepted at each step; alpha is its mean over tested ones."""


class SpeculativeVerifier(Verifier):
    """Algorithm 1's acceptance rule for chains; exact for lenience 1."""

    takes_lenience = True
    judges_by_position = True  # beta is sum_x min(p / l, q)
    keeps_guess = "p / q"

    def __init__(self, sampling: Sampling, lenience: float = 1.0):
        super().__init__(sampling.greedy)
        self.lenience, self.lossless = lenience, lenience == 1
        self.rule = self.rule if lenience == 1 else "sum min(p / l, q)"

    @classmethod
    def from_settings(cls, settings: Any, sampling: Sampling, lenience: float) -> "SpeculativeVerifier":
        return cls(sampling, lenience)

    def accept(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if self.greedy:
            return verify.greedy_matching(p, draft, self.lenience)
        return verify.speculative_sampling(p, draft, noise.r, noise.bits, self.lenience)

    def beta(self, p: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
        return verify.acceptance_probability(p[:, :-1], draft, self.lenience, self.greedy)
