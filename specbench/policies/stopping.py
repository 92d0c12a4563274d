"""Policies that may stop a draft: after any guess, by the q that it was drawn from, or before it, by an estimate."""

import math
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from specbench.decoding.state import State
from specbench.policies.base import Costs, VaryingGamma

BINS = 12
PRIOR_GUESSES = 4.0  # weight of the mean beta at the start, in guesses per bin


def probability(q: Tensor, x: Tensor) -> Tensor:
    """q(x) [B] of the guesses x [B]; q [B, V]."""
    return q.gather(-1, x[:, None])[:, 0]


class ConfidenceGamma(VaryingGamma):
    """Drafts up to a guess with q(x) below `threshold`, as transformers' assisted generation does."""

    class Settings(VaryingGamma.Settings):
        threshold: float = Field(ge=0, le=1)

    watches = True

    def __init__(self, largest: int, threshold: float):
        super().__init__(largest)
        self.threshold = threshold
        self.signal = probability

    def go_on(self, state: State, count: list[int], signals: list[float]) -> list[bool]:
        return [signal >= self.threshold for signal in signals]


class EstimateGamma(ConfidenceGamma):
    """Drafts until the drafter's estimate that the next guess will be accepted is below `threshold` (DSpark, section
    3.2.1); that guess is not drafted. Texts keep the target's distribution, since the estimate is made before the guess
    is drawn. Its logit is divided by the temperature of the guess's place, beyond the list by the last one."""

    class Settings(ConfidenceGamma.Settings):
        temperatures: list[Annotated[float, Field(gt=0, le=100)]] = Field(min_length=1)

    watches = False
    asks = True

    def __init__(self, largest: int, threshold: float, temperatures: list[float]):
        super().__init__(largest, threshold)
        self.signal, self.temperatures = (lambda logit, before: logit), temperatures

    def go_on(self, state: State, count: list[int], signals: list[float]) -> list[bool]:
        last = len(self.temperatures) - 1
        scale = [self.temperatures[min(n, last)] for n in count]
        return super().go_on(state, count, (torch.tensor(signals) / torch.tensor(scale)).sigmoid().tolist())


def root_entropy(q: Tensor, x: Tensor) -> Tensor:
    """sqrt(H(q) / log V) [B], from q [B, V]: H enters bounds of beta as a square root. x [B] is not used."""
    H: Tensor = torch.special.entr(q).sum(-1)
    return (H.clamp(min=0) / math.log(q.shape[-1])).sqrt()


class EntropyGamma(VaryingGamma):
    """Drafts another guess while its expected tokens are worth its time (section 3.5).

    The beta of a guess is estimated from the entropy of the q that it was drawn from: the share of guesses with an
    entropy in the same bin that were accepted so far. Another guess brings (product of the betas of the draft) x
    (mean beta) tokens. Its time is what it adds to a round, and is worth the tokens that decoding has yielded in such a
    time on average.
    """

    calibrated = True
    watches = True

    def __init__(self, largest: int):
        super().__init__(largest)
        self.signal = root_entropy
        self.bins: list[list[int]] = []  # by row, those of this round's guesses

    def calibrate(self, costs: Costs) -> None:
        """Sets every bin to the mean beta, and fits the seconds of a round by a straight line in gamma."""
        seconds = costs.seconds(self.largest)
        self.step_seconds, self.round_seconds = np.polyfit(np.arange(self.largest + 1), seconds, 1)
        self.tested = np.full(BINS, PRIOR_GUESSES)
        self.accepted = self.tested * costs.alpha
        self.tokens, self.seconds = 1.0, float(seconds[0])

    def next_gamma(self, state: State) -> list[int]:
        self.bins = [[] for _ in range(state.batch_size)]
        return super().next_gamma(state)

    def go_on(self, state: State, count: list[int], signals: list[float]) -> list[bool]:
        betas = self.accepted / self.tested
        mean = self.accepted.sum() / self.tested.sum()
        worth = self.step_seconds * self.tokens / self.seconds
        answers = []
        for bins, drafted, signal in zip(self.bins, count, signals, strict=True):
            if len(bins) < drafted:
                bins.append(min(int(signal * BINS), BINS - 1))
            answers.append(bool(betas[bins].prod() * mean >= worth))
        return answers

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        for bins, guesses, new in zip(self.bins, drafted, kept, strict=True):
            if not new:
                continue
            tested = bins[: min(new, guesses)]
            np.add.at(self.tested, tested, 1)
            np.add.at(self.accepted, tested[: new - 1], 1)
            self.tokens += new
            self.seconds += self.round_seconds + self.step_seconds * guesses
