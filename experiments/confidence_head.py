"""How well does a DSpark checkpoint's confidence head know what will be accepted, and which temperatures mend it?

python experiments/confidence_head.py drafter=dflash drafter.path=Q target=model target.path=P gamma_policy.largest=7

Decodes the prompts of a run without ending a draft. Temperatures are fitted place by place on every other round
(DSpark, section 3.2.1). Printed is the expected calibration error of the estimate that all guesses up to a place are
accepted, on the other rounds, before and after, and the setting that a run takes.
"""

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.config.build import build
from specbench.config.check import check
from specbench.config.compose import compose
from specbench.decoding.state import State
from specbench.policies.stopping import EstimateGamma
from specbench.run.batching import Requests
from specbench.run.session import Session


def calibration_error(said: Tensor, happened: Tensor, bins: int = 20) -> float:
    """Expected calibration error of probabilities said [n], given what happened [n] bool: the difference of their means
    in each bin of `said`, weighted by the bin's share."""
    number = (said * bins).long().clamp(max=bins - 1)
    return float(torch.bincount(number, said - happened.float()).abs().sum() / len(said))


def sequential_temperatures(logits: Tensor, accepted: Tensor) -> list[float]:
    """DSpark's sequential temperature scaling: from left to right, the temperature of each place with the least
    calibration error of the product of estimates up to it, those before being fixed. logits [n, gamma] of n rounds, in
    which the first accepted [n] guesses were accepted."""
    found, product, grid = [], torch.ones(len(logits)), np.geomspace(0.1, 10, 201).tolist()
    for k, own in enumerate(logits.T):
        errors = [calibration_error(product * (own / each).sigmoid(), accepted > k) for each in grid]
        found.append(grid[int(np.argmin(errors))])
        product = product * (own / found[-1]).sigmoid()
    return found


class Noting(EstimateGamma):
    """Never ends a draft, and keeps the logits and the number of accepted guesses of every full one."""

    def __init__(self, largest: int):
        super().__init__(largest, 0.0, [1.0])
        self.own: list[list[float]] = []
        self.rounds: list[tuple[list[float], int]] = []

    def next_gamma(self, state: State) -> list[int]:
        self.own = []
        return super().next_gamma(state)

    def go_on(self, state: State, count: list[int], signals: list[float]) -> list[bool]:
        self.own.append(signals)
        return super().go_on(state, count, signals)

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        for row, (guesses, new) in enumerate(zip(drafted, kept, strict=True)):
            if new and guesses == self.largest:
                self.rounds.append(([signals[row] for signals in self.own], new - 1))


@torch.inference_mode()
def main(words: list[str]) -> None:
    parts = build(check(compose(["gamma_policy=confidence_head", "executor=eager", "logger=none", *words])))
    policy, session = Noting(parts.policy.largest), Session(parts)
    for batch in Requests(parts, parts.spare).batches():
        session.decode([session.job(request) for request in batch.requests], True, batch.columns, policy=policy)
    if len(policy.rounds) < 100:
        sys.exit(f"{len(policy.rounds)} full drafts are too few: give more prompts or tokens")
    logits, accepted = torch.tensor([own for own, _ in policy.rounds]), torch.tensor([n for _, n in policy.rounds])
    found = sequential_temperatures(logits[::2], accepted[::2])
    print(f"{len(logits)} rounds of {policy.largest} guesses\nplace  before  after")
    before, after = (errors(logits[1::2], accepted[1::2], own) for own in ([1.0] * policy.largest, found))
    for place, (old, new) in enumerate(zip(before, after, strict=True), 1):
        print(f"{place:5}  {old:6.3f}  {new:5.3f}")
    print(f"gamma_policy.temperatures=[{','.join(f'{each:.2f}' for each in found)}]")


def errors(logits: Any, accepted: Any, temperatures: list[float]) -> list[float]:
    """The calibration error of the product of estimates up to each place."""
    said = (logits / torch.tensor(temperatures)).sigmoid().cumprod(1)
    return [calibration_error(own, accepted > k) for k, own in enumerate(said.T)]


if __name__ == "__main__":
    main(sys.argv[1:])
