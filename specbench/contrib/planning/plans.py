"""How many prompts, tokens and processes an interval of a given width needs, from the variances that a pilot shows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench.decoding.timer import DECODING
from specbench.stats.bootstrap import fewest, student
from specbench.stats.estimates import Floats
from specbench.stats.two_way_bootstrap import VarianceParts

PROCESSES = (1, 3, 4, 5, 6, 8, 10, 15, 20)  # that are tried; with one the interval is that of this process alone
LONGER = (1, 2, 4)  # times the pilot's tokens a prompt; with fewer, drafts are cut more often
SHOWN = 6  # plans for a target


@dataclass(frozen=True)
class Spread:
    """What a number varies by: the variances of a prompt with the pilot's tokens, and the share of the prompt's that
    is of its tokens, so that a longer text has less of it."""

    of: VarianceParts
    within: float  # from 0 to 1

    def half_width(self, processes: int, prompts: int, longer: float) -> float:
        """Half of the 95 % interval, as `TwoWaySums` makes it, with texts `longer` times as long."""
        shrunk = (1 - self.within) + self.within / longer
        prompt, cell = self.of.prompt * shrunk / prompts, self.of.cell / longer / prompts
        if processes == 1:
            return student(prompts - 1) * math.sqrt(prompt + cell)
        process = (self.of.process or 0.0) / processes + cell / processes
        return math.sqrt(student(processes - 1) ** 2 * process + student(prompts - 1) ** 2 * prompt)


@dataclass(frozen=True)
class Plan:
    """A way to the target, and the seconds that it takes on this machine."""

    processes: int
    prompts: int
    tokens: int  # a prompt
    half_width: float
    seconds: float


def plans(spread: Spread, target: float, tokens: int, seconds: float, longest: float = LONGER[-1]) -> list[Plan]:
    """Plans for a half width of at most `target`, cheapest first. `tokens` and `seconds` are those of the pilot's
    prompts; texts may be made `longest` times as long."""
    found = []
    for processes in PROCESSES:
        for longer in (longer for longer in LONGER if longer <= longest):
            prompts = fewest_prompts(spread, target, processes, longer)
            if prompts is not None:
                width = spread.half_width(processes, prompts, longer)
                taken = processes * prompts * seconds * longer
                found.append(Plan(processes, prompts, max(1, round(tokens * longer)), width, taken))
    return sorted(found, key=lambda plan: plan.seconds)


def fewest_prompts(spread: Spread, target: float, processes: int, longer: float) -> int | None:
    """The fewest prompts that reach the target, if any number does."""
    return fewest(lambda prompts: spread.half_width(processes, prompts, longer), target)


def share_within(halves: tuple[Floats, Floats]) -> float:
    """The share of the variance between prompts that is of their tokens, from what each prompt's even and odd rounds
    add to the number, [prompts] each: what the halves have in common is the prompt's own."""
    first, second = halves
    whole = float(np.var((first + second) / 2, ddof=1))
    common = float(np.cov(first, second)[0, 1])
    return min(1.0, max(0.0, 1 - common / whole)) if whole > 0 else 0.0


def halves_of_alpha(rounds: Sequence[Mapping[str, Any]], prompts: Sequence[str]) -> tuple[Floats, Floats]:
    """What the even and odd rounds of each prompt add to alpha, [prompts] each."""
    return _halves(rounds, prompts, lambda r: (float(sum(r["beta"])), len(r["beta"])))


def halves_of_time(
    rounds: Sequence[Mapping[str, Any]], prompts: Sequence[str], plain: Mapping[str, float]
) -> tuple[Floats, Floats]:
    """The same for the logarithm of the speedup. `plain` is each prompt's seconds of a plain token, which both halves
    have in common."""
    ours = _halves(rounds, prompts, lambda r: (sum(r[f"{lap}_seconds"] for lap in DECODING) / r["rows"], r["tokens"]))
    theirs = np.array([plain[prompt] for prompt in prompts])
    theirs = theirs / theirs.mean() - 1
    return theirs - ours[0], theirs - ours[1]


def _halves(rounds: Sequence[Mapping[str, Any]], prompts: Sequence[str], pair: Any) -> tuple[Floats, Floats]:
    """Deviations of the ratio of two sums, relative to the ratio, by prompt, for even and for odd rounds."""
    place = {prompt: number for number, prompt in enumerate(prompts)}
    sums = np.zeros((2, len(prompts), 2))  # [half, prompt, above and below]
    for r in rounds:
        if r["prompt"] in place:
            sums[r["round"] % 2, place[r["prompt"]]] += pair(r)
    ratio = sums[..., 0].sum() / sums[..., 1].sum()
    deviations = (sums[..., 0] - ratio * sums[..., 1]) / sums[..., 1].mean(1, keepdims=True) / ratio
    return deviations[0], deviations[1]


def shown_plans(found: Sequence[Plan]) -> Iterator[Plan]:
    """The cheapest plan, and the cheapest of each other number of processes."""
    seen: set[int] = set()
    for plan in found:
        if plan.processes not in seen and len(seen) < SHOWN:
            seen.add(plan.processes)
            yield plan
