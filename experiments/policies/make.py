"""Regret of gamma policies under loads: simulated on acceptance, over a linear cost of rounds.

    python experiments/policies/make.py
    python experiments/policies/make.py outputs/RUN          # the texts of a finished run
    python experiments/policies/make.py traces.jsonl         # traces of another engine (docs/gamma.md has the columns)
    python experiments/policies/make.py --stored             # table and figure again, from results.csv

No time is measured here. The cost is one that others have fitted to an 8 B target with an EAGLE-3 head on an H100
(2601.11580): 5.886 ms a call, 21 us a token, 39 ns a token of context, 2.135 ms a drafter step. Of a load, `best gamma`
is the constant gamma that was best on it, known afterwards; `one gamma` the one that is best over all loads, which is
what a server is started with. `known_betas` knows the probability of every coming guess, `oracle` the outcome.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, commit, here, machine, make, number, text

from specbench.contrib.replay.batched import BatchLoad, RoundSeconds, SimulatedRate, Traced, runs_of
from specbench.contrib.replay.loads import ALL, load_texts, rates_on
from specbench.results.report.style import MEASURED, OTHER

COST = RoundSeconds(5.886e-3, 2.135e-3, 21e-6, 39e-9)
ROWS, CONTEXTS = (1, 8, 64), (256, 2048, 8192)
EACH, TOKENS = 300, 3000  # tokens of a row, and of all rows, at least
TEXTS, LENGTH = 48, 256


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


def collect(inputs: list[str]) -> Measured:
    """A row for each load and way."""
    where = here()
    texts = load_texts(Path(inputs[0])) if inputs else simulated()
    loads = {(rows, context): BatchLoad(texts, COST, rows, context) for rows in ROWS for context in CONTEXTS}
    found: dict[tuple[int, int], dict[str, SimulatedRate]] = {}
    for place, load in loads.items():
        print(f"batch {place[0]}, context {place[1]}", file=sys.stderr)
        found[place] = rates_on(load, ALL.split(","), [], max(EACH, TOKENS // load.rows))
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
                    for bound in ("oracle", "known_betas") if bound in own}  # fmt: skip
            rows.append(row | {"below_best": 1 - rate.per_second / ways["best gamma"].per_second})
    return Measured(rows, machine(where, "no model"), commit(where))


TABLE = {
    "batch": number("batch", ".0f"),
    "context": number("context", ".0f"),
    "policy": text("policy"),
    "gamma": text("gamma"),
    "tokens a second": number("per_second", ".0f"),
    "below the oracle": number("below_oracle", ".1%"),
    "below known betas": number("below_known_betas", ".1%"),
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
