"""Regret of gamma policies under loads: simulated on acceptance, over a linear cost of rounds.

    python experiments/policies/make.py
    python experiments/policies/make.py outputs/RUN          # the texts of a finished run
    python experiments/policies/make.py traces.jsonl         # traces of another engine (docs/gamma.md has the columns)
    python experiments/policies/make.py --stored             # table and figure again, from results.csv

No time is measured here. The cost is one that others have fitted to an 8 B target with an EAGLE-3 head on an H100
(2601.11580): 5.886 ms a call, 21 us a token, 39 ns a token of context, 2.135 ms a drafter step. Of a load, `best gamma`
is the constant gamma that was best on it, known afterwards; `one gamma` the one that is best over all loads, which is
what a server is started with. `known_betas` knows the probability of every coming guess, `oracle` the outcome. With
one row also: `planned_betas` knows them and plans the whole text, and `seen_betas` knows that of a guess once it is
drafted, and each text's mean and pace, which is all that a policy could learn.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Cell, Measured, Row, commit, here, machine, make, number, text

from specbench.contrib.replay.batched import (
    PASSES,
    BatchLoad,
    RoundSeconds,
    SimulatedRate,
    SimulatedRows,
    Traced,
    runs_of,
    simulate,
)
from specbench.contrib.replay.loads import ALL, LARGEST, load_texts, rates_on
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.policies.gamma.entropy import confidence
from specbench.results.report.style import MEASURED, OTHER

COST = RoundSeconds(5.886e-3, 2.135e-3, 21e-6, 39e-9)
ROWS, CONTEXTS = (1, 8, 64), (256, 2048, 8192)
TEXTS, LENGTH, SEEDS = 48, 256, 8
EACH, TOKENS = 300, TEXTS * LENGTH  # tokens of a row, and of all rows, at least: each text once


def simulated(seed: int = 0) -> list[Traced]:
    """Texts of three kinds, of mean acceptance .85, .7 and .45, whose guesses differ: the acceptance of each is drawn
    (Beta), and max q says it as a wrong logistic would."""
    generator, found = np.random.default_rng(seed), []
    for number_of in range(TEXTS):
        mean = (0.85, 0.7, 0.45)[number_of % 3]
        beta = generator.beta(3 * mean, 3 * (1 - mean), LENGTH).clip(1e-6, 1 - 1e-6)
        logit = 0.7 * np.log(beta / (1 - beta)) + 0.5
        found.append(Traced(runs_of(generator.random(LENGTH) < beta), 1 / (1 + np.exp(-logit)), beta))
    return found


class PlannedBetas(GammaPolicy):
    """One row: the gammas that make the expected seconds of each text least."""

    def __init__(self, load: BatchLoad):
        self.largest, self.widths = LARGEST, tuple(range(1, LARGEST + 1))
        self.plans = {id(text): self.plan(text, load) for text in load.texts}

    def plan(self, text: Traced, load: BatchLoad) -> list[int]:
        """gamma at each place, from the end of the text to its beginning."""
        count, gammas = len(text.lengths), [0] * len(text.lengths)
        left = np.zeros(count + 1)
        for place in reversed(range(count)):
            most = min(self.largest, count - place - 1)
            survival = np.r_[1.0, np.cumprod(text.beta[place : place + most])]
            ended = np.r_[0.0, np.cumsum((survival[:-1] - survival[1:]) * left[place + 1 : place + most + 1])]
            cost = [load.seconds(g, [g], load.context) for g in range(most + 1)]
            cost += ended + survival * left[place + 1 : place + most + 2]
            gammas[place] = int(cost.argmin())
            left[place] = cost[gammas[place]]
        return gammas

    def next_gamma(self, state: SimulatedRows) -> list[int]:
        return [self.plans[id(text)][at] for text, at in zip(state.texts, state.at, strict=True)]


class SeenBetas(GammaPolicy):
    """One row: drafts while what the next guess promises is worth its time at the text's own pace, which the pass
    before has found."""

    signal = staticmethod(confidence)

    def __init__(self):
        self.largest, self.widths, self.pace, self.past = LARGEST, tuple(range(1, LARGEST + 1)), {}, {}

    def next_gamma(self, state: SimulatedRows) -> list[int]:
        self.text, self.began = state.texts[0], self.now()
        return [self.largest]

    def go_on(self, state: SimulatedRows, count: list[int], signals: list[float]) -> list[bool]:
        ahead = self.text.beta[state.at[0] : state.at[0] + count[0]]
        price = self.past.get(id(self.text), 0.0) * (COST.step + COST.token)
        return [bool(ahead.prod() * self.text.beta.mean() >= price)]

    def observe(self, drafted: list[int], kept: list[int]) -> None:
        tokens, seconds = self.pace.get(id(self.text), (0, 0.0))
        self.pace[id(self.text)] = tokens + kept[0], seconds + self.now() - self.began

    def best(self, load: BatchLoad, each: int) -> SimulatedRate:
        """What it gives after some passes."""
        for _ in range(PASSES):
            found = simulate(load, self, each)
            self.past = {text: tokens / seconds for text, (tokens, seconds) in self.pace.items()}
            self.pace = {}
        return found


def collect(inputs: list[str]) -> Measured:
    """A row for each load and way: means over SEEDS draws of the texts, with standard errors, or of one run's texts."""
    where = here()
    every = [load_texts(Path(inputs[0]))] if inputs else map(simulated, range(SEEDS))
    rows = [pooled(same) for same in zip(*map(rows_of, every), strict=True)]
    return Measured(rows, machine(where, "no model"), commit(where))


def pooled(same: Sequence[Row]) -> Row:
    """The mean over draws of each number, its standard error, and every gamma."""
    row: Row = same[0] | {"gamma": ", ".join(sorted({own["gamma"] for own in same}))}
    for name in (name for name, value in same[0].items() if isinstance(value, float)):
        values = [own[name] for own in same]
        row[name] = float(f"{np.mean(values):.5g}")
        if len(values) > 1:
            row[f"{name}_stderr"] = float(f"{np.std(values, ddof=1) / len(values) ** 0.5:.2g}")
    return row


def rows_of(texts: Sequence[Traced]) -> list[Row]:
    """A row for each load and way, on these texts."""
    loads = {(rows, context): BatchLoad(texts, COST, rows, context) for rows in ROWS for context in CONTEXTS}
    found: dict[tuple[int, int], dict[str, SimulatedRate]] = {}
    for place, load in loads.items():
        print(f"batch {place[0]}, context {place[1]}", file=sys.stderr)
        each = max(EACH, TOKENS // load.rows)
        found[place] = rates_on(load, ALL.split(","), [], each)
        if load.rows == 1 and "known_betas" in found[place]:
            found[place] |= {"planned_betas": simulate(load, PlannedBetas(load), each),
                             "seen_betas": SeenBetas().best(load, each)}  # fmt: skip
    constant = [name for name in next(iter(found.values())) if name.startswith("gamma ")]
    share = {name: np.mean([own[name].per_second / own["oracle"].per_second for own in found.values()])
             for name in constant}  # fmt: skip
    one = max(constant, key=lambda name: share[name])
    rows: list[Row] = []
    for (size, context), own in found.items():
        best = max(constant, key=lambda name: own[name].per_second)
        ways = {"best gamma": own[best], "one gamma": own[one], "gamma 0": own["gamma 0"]}
        ways |= {name: rate for name, rate in own.items() if name not in constant}
        for name, rate in ways.items():
            row: Row = {"batch": size, "context": context, "policy": name, "per_second": rate.per_second}
            row |= {"gamma": {"best gamma": best, "one gamma": one}.get(name, "-").removeprefix("gamma ")}
            row |= {f"below_{bound}": 1 - rate.per_second / own[bound].per_second
                    for bound in ("oracle", "known_betas", "planned_betas") if bound in own}  # fmt: skip
            rows.append(row | {"below_best": 1 - rate.per_second / ways["best gamma"].per_second})
    return rows


def share(column: str) -> Cell:
    """A share with its standard error."""

    def shown(row: Row) -> str:
        error = row.get(f"{column}_stderr")
        return number(column, ".1%")(row) + (f" ± {error:.1%}" if error else "")

    return shown


TABLE = {
    "batch": number("batch", ".0f"),
    "context": number("context", ".0f"),
    "policy": text("policy"),
    "gamma": text("gamma"),
    "tokens a second": number("per_second", ".0f"),
    "below the oracle": share("below_oracle"),
    "below known betas": share("below_known_betas"),
    "below the best gamma": number("below_best", ".1%"),
}


def draw(rows: Sequence[Row]) -> Figure:
    """Mean regret of each way, against the oracle and against known betas."""
    names = list(dict.fromkeys(row["policy"] for row in rows))
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for shift, (column, color) in enumerate((("below_oracle", OTHER), ("below_known_betas", MEASURED))):
        means = [np.mean([row[column] for row in rows if row["policy"] == name and row.get(column) is not None] or [0])
                 for name in names]  # fmt: skip
        axes.barh(np.arange(len(names)) + 0.4 * shift, means, 0.4, color=color, label=column.replace("_", " "))
    axes.set_yticks(np.arange(len(names)) + 0.2, names)
    axes.set_xlabel("share of tokens per second that is lost, mean over loads")
    axes.legend()
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
