"""Policies that choose gamma in front of a round: the one that maximises Theorem 3.8 with measured costs (section 3.5),
for the whole run or anew in each round; and a schedule of transformers."""

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.policies.base import Costs, VaryingGamma
from specbench.settings import LARGEST_GAMMA
from specbench.theory import expected_tokens


class OptimalGamma(VaryingGamma):
    """One gamma for the whole run, which maximises E(tokens) / (gamma c + v(gamma) + o) (section 3.5), with alpha and
    all costs from a calibration pass that decodes some of the run's own prompts with every gamma up to `largest`."""

    calibrated = whole = True

    def calibrate(self, costs: Costs) -> None:
        """Chooses gamma, before the first prompt: it maximises equation 1 over the seconds of such a round."""
        tokens = expected_tokens(costs.alpha, np.arange(self.largest + 1))
        self.constant = int(np.argmax(tokens / costs.seconds(self.largest)))

    def next_gamma(self, state: State) -> list[int]:
        assert self.constant is not None, "calibrate comes first"
        return [self.constant] * state.batch_size


@dataclass
class Acceptance:
    """Of one request, older guesses counting less."""

    accepted: float
    tested: float


class AdaptiveGamma(VaryingGamma):
    """Chooses the gamma that maximises equation 1, summed over the active rows at each request's own estimate of beta,
    over the measured seconds of a round (Theorem 3.8 with measured costs). All rows get the same: a round takes as long
    as its longest draft, so a row that drafted less would save nothing.

    A request's estimate is its accepted over its tested guesses. It starts from the mean of all requests so far, which
    counts as `prior` guesses; each tested guess takes the share `forget` off the weight of those before it. Rounds
    without a draft teach nothing: after `probe` of them one guess is drafted.
    """

    class Settings(VaryingGamma.Settings):
        prior: float = Field(ge=1e-3, le=1e9)
        forget: float = Field(ge=0, le=1)
        probe: int = Field(ge=1, le=10**9)

    calibrated = True

    def __init__(self, largest: int, prior: float, forget: float, probe: int):
        super().__init__(largest)
        self.prior, self.forget, self.probe = prior, forget, probe
        self.requests: dict[Sequence, Acceptance] = {}  # of those that have rows
        self.accepted, self.tested = 0.0, 0  # of all requests
        self.idle = 0  # rounds without a draft since the last one with

    def calibrate(self, costs: Costs) -> None:
        self.accepted, self.tested = costs.acceptance
        self.seconds = costs.seconds(self.largest)

    def next_gamma(self, state: State) -> list[int]:
        mean = (self.accepted + 0.5) / (self.tested + 1)  # 1/2 before anything was tested
        self.sequences, gammas = list(state.sequences), np.arange(self.largest + 1)
        self.requests = {sequence: own for sequence, own in self.requests.items() if sequence in self.sequences}
        tokens = np.zeros(len(gammas))
        for sequence, active in zip(self.sequences, state.active, strict=True):
            if sequence is not None and active:
                own = self.requests.setdefault(sequence, Acceptance(mean * self.prior, self.prior))
                tokens += expected_tokens(own.accepted / own.tested, gammas)
        gamma = int(np.argmax(tokens / self.seconds))
        if gamma == 0 and self.idle >= self.probe:
            gamma = 1
        return [gamma] * state.batch_size

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        self.idle += 1
        for sequence, guesses, new in zip(self.sequences, drafted, kept, strict=True):
            if sequence is None or not new or not guesses:
                continue
            self.idle = 0
            accepted, tested = new - 1, min(new, guesses)
            own, keep = self.requests[sequence], (1 - self.forget) ** tested
            own.accepted = own.accepted * keep + accepted
            own.tested = own.tested * keep + tested
            self.accepted += accepted
            self.tested += tested


class HeuristicGamma(VaryingGamma):
    """`heuristic_transient` of transformers' assisted generation: each request begins at `gamma`, which rises by 2
    after a round in which every guess was accepted and falls by 1 after any other, between 1 and `largest`."""

    class Settings(VaryingGamma.Settings):
        gamma: int = Field(ge=1, le=LARGEST_GAMMA)

    def __init__(self, gamma: int, largest: int):
        super().__init__(largest)
        self.first = min(gamma, largest)
        self.gammas: dict[Sequence | None, int] = {}  # of the requests that have rows

    def next_gamma(self, state: State) -> list[int]:
        self.sequences = list(state.sequences)
        self.gammas = {sequence: self.gammas.get(sequence, self.first) for sequence in self.sequences}
        return [self.gammas[sequence] for sequence in self.sequences]

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        for sequence, guesses, new in zip(self.sequences, drafted, kept, strict=True):
            if new:
                wanted = self.gammas[sequence] + (2 if new == guesses + 1 else -1)
                self.gammas[sequence] = min(max(wanted, 1), self.largest)
