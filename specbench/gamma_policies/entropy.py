"""Stops drafting when q, by past acceptance at similar entropy, makes another guess not worth its time."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.draft import Draft
from specbench.decoding.gamma_policy import Costs, GammaPolicy, RowsSeen
from specbench.settings import BaseSettings, setting

BINS = 12
PRIOR_GUESSES = 4.0  # that the overall mean counts for in each bin


def entropy(q: Tensor, x: Tensor) -> Tensor:
    """sqrt(H(q)) as a share of its largest value [B]: the form that bounds of beta by H take."""
    H: Tensor = torch.special.entr(q).sum(-1)
    return (H.clamp(min=0) / math.log(q.shape[-1])).sqrt()


def confidence(q: Tensor, x: Tensor) -> Tensor:
    """max q [B]."""
    return q.amax(-1)


class EntropyGamma(GammaPolicy):
    """Drafts on while another guess is worth its time.

    The beta of a guess is estimated from a `signal` of the q it was drawn from: the share of guesses
    with such a signal that were accepted so far. Another guess brings (product of the betas of the
    draft) x (mean beta) tokens, and takes the time by which a round grows; time is worth the tokens
    that decoding yields in it on average. So the threshold follows from measured costs.
    """

    @dataclass
    class Settings(BaseSettings):
        largest: int = setting(ge=1)
        signal: str = setting(choices=("entropy", "confidence"))

    calibrated = True
    watches = True

    def __init__(self, largest: int, signal: str):
        self.largest = largest
        self.signal = {"entropy": entropy, "confidence": confidence}[signal]
        self.traced_as = {"entropy": "root_entropy", "confidence": "confidence"}[signal]
        self.widths = tuple(range(1, largest + 1))
        self.draft: dict[int, list[int]] = {}  # the bins of this round's guesses, by row

    def calibrate(self, costs: Costs) -> None:
        """Begins at the mean beta; a round's time is a straight line in gamma."""
        seconds = costs.seconds(self.largest)
        self.step, self.round = np.polyfit(np.arange(self.largest + 1), seconds, 1)
        self.tested = np.full(BINS, PRIOR_GUESSES)
        self.accepted = self.tested * costs.alpha
        self.tokens, self.time = 1.0, float(seconds[0])

    def next_gamma(self, state: RowsSeen) -> list[int]:
        self.draft = {row: [] for row in range(state.batch_size)}
        return [self.largest] * state.batch_size

    def go_on(self, state: RowsSeen, count: list[int], signals: list[float]) -> list[bool]:
        betas, mean = self.accepted / self.tested, self.accepted.sum() / self.tested.sum()
        worth = self.step * self.tokens / self.time
        answers = []
        for row, (drafted, signal) in enumerate(zip(count, signals, strict=True)):
            bins = self.draft[row]
            if len(bins) < drafted:
                bins.append(min(int(signal * BINS), BINS - 1))
            answers.append(bool(betas[bins].prod() * mean >= worth))
        return answers

    def observe(self, draft: Draft, kept: list[int]) -> None:
        for row, (drafted, new) in enumerate(zip(draft.count.tolist(), kept, strict=True)):
            if not new:
                continue
            tested = self.draft[row][: min(new, drafted)]
            np.add.at(self.tested, tested, 1)
            np.add.at(self.accepted, tested[: new - 1], 1)
            self.tokens += new
            self.time += self.round + self.step * drafted
