"""Coverage of three intervals for several processes on the same prompts, where the truth is known: simulated times.

python experiments/coverage/simulate.py

Writes simulated.md: the share of 95 % intervals that hold the truth, by the number of processes and by what varies.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from specbench.stats.formulas import speedup_of
from specbench.stats.two_way_bootstrap import TwoWaySums

PROMPTS, TIMES, SAMPLES = 32, 1000, 500
PROCESSES = (3, 5, 10)
SPREADS = ((0.0, 0.2, 0.1), (0.02, 0.1, 0.1), (0.05, 0.05, 0.1), (0.1, 0.02, 0.02))  # of processes, prompts, the rest
SUMS = ("plain_seconds", "plain_tokens", "seconds", "tokens")
Floats = np.ndarray[Any, np.dtype[np.float64]]


def simulated(rng: np.random.Generator, processes: int, spreads: tuple[float, float, float]) -> Floats:
    """Seconds [processes, prompts] whose logarithms have these standard deviations."""
    of_process, of_prompt, rest = spreads
    noise = of_process * rng.standard_normal((processes, 1)) + of_prompt * rng.standard_normal((1, PROMPTS))
    seconds: Floats = np.exp(noise + rest * rng.standard_normal((processes, PROMPTS)))
    return seconds


def crossed(seconds: Floats) -> tuple[float, float]:
    """The interval of `repeats=R`, of the logarithm of the speedup."""
    ones = np.ones_like(seconds)
    table = np.stack([ones, ones, seconds, ones])
    sums = TwoWaySums(dict(zip(SUMS, table.sum((1, 2)), strict=True)), table)

    def speedup(s: Mapping[str, Any]) -> dict[str, Any]:
        return {"speedup": speedup_of(s)}

    low, high = np.log(sums.intervals(speedup)["speedup"] or (np.nan, np.nan))
    return low, high


def bootstrap(rng: np.random.Generator, seconds: Floats, both: bool) -> tuple[float, float]:
    """Percentiles over prompts drawn with replacement, and with `both` over processes too."""
    processes, prompts = seconds.shape
    columns = rng.multinomial(prompts, np.full(prompts, 1 / prompts), SAMPLES)
    rows = np.ones((SAMPLES, processes))
    if both:
        rows = rng.multinomial(processes, np.full(processes, 1 / processes), SAMPLES)
    means = np.einsum("sp,pc,sc->s", rows, seconds, columns) / (rows.sum(1) * prompts)
    low, high = np.percentile(-np.log(means), [2.5, 97.5])
    return float(low), float(high)


def coverage(processes: int, spreads: tuple[float, float, float]) -> list[float]:
    """The shares of the three intervals that hold the truth, the logarithm of the ratio of expectations."""
    rng, truth, hits = np.random.default_rng(0), -np.square(spreads).sum() / 2, np.zeros(3)
    for _ in range(TIMES):
        seconds = simulated(rng, processes, spreads)
        ends = crossed(seconds), bootstrap(rng, seconds, both=True), bootstrap(rng, seconds, both=False)
        hits += [low < truth < high for low, high in ends]
    return list(hits / TIMES)


def main() -> None:
    """Writes and prints the table."""
    headings = ("processes", "sd of processes, prompts, the rest", "repeats=R", "two-way bootstrap", "over prompts")
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    cases = [(processes, spreads) for spreads in SPREADS for processes in PROCESSES]
    for processes, spreads in track(cases, "simulating"):
        shares = " | ".join(f"{share:.3f}" for share in coverage(processes, spreads))
        lines.append(f"| {processes} | {', '.join(f'{spread:g}' for spread in spreads)} | {shares} |")
    text = "\n".join(lines) + "\n"
    (Path(__file__).parent / "simulated.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
