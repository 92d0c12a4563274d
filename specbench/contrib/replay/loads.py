"""Gamma policies under loads: for each batch size and context the tokens per second of every constant gamma, of each
policy and of the oracle, and how far they are below it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from specbench.config.compose import compose
from specbench.config.validate import choose
from specbench.contrib.replay.batched import (
    BatchLoad,
    RoundSeconds,
    SimulatedRate,
    Traced,
    foreseen,
    simulate,
    traced_texts,
)
from specbench.contrib.replay.policies import refuse_drawn
from specbench.contrib.replay.trace import load_trace
from specbench.contrib.replay.trace_file import load_file
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.errors import ConfigError, shown
from specbench.policies.gamma.fixed import FixedGamma
from specbench.policies.gamma.goodput import GoodputGamma
from specbench.results.table import Table

LARGEST = 10  # gamma
ALL = "optimal,adaptive,goodput,heuristic"
COST = "cost=START,STEP,TOKEN,CONTEXT (seconds of a round, drafter step, token that is read, token of context)"


@dataclass(frozen=True)
class Asked:
    """The loads that were asked for."""

    rows: Sequence[int]
    contexts: Sequence[int]
    cost: RoundSeconds
    by_row: bool
    tokens: int  # a row


def asked_loads(overrides: Sequence[str]) -> Asked:
    """What the overrides of a load (LOAD_KEYS of the command) say. Raises ConfigError."""
    given = dict(override.split("=", 1) for override in overrides)
    cost = given_numbers(given, "cost", "", 0.0, 1e6, COST)
    if len(cost) != 4 or not sum(cost[:1]):
        raise ConfigError(f"cost={shown(given.get('cost', ''))} is not allowed: give {COST}; START must be above 0")
    if (by_row := given.get("by_row", "false")) not in ("true", "false"):
        raise ConfigError(f"by_row={shown(by_row)} is not allowed: it must be true or false")
    whole = [
        [int(value) for value in given_numbers(given, key, default, low, 1e6, "whole numbers", whole=True)]
        for key, default, low in (("batch_size", "1", 1), ("context", "256", 0), ("tokens", "2000", 1))
    ]
    if len(whole[2]) > 1:
        raise ConfigError(f"tokens={shown(given['tokens'])} is not allowed: give one whole number")
    return Asked(whole[0], whole[1], RoundSeconds(*cost), by_row == "true", whole[2][0])


def given_numbers(
    given: Mapping[str, str], key: str, default: str, low: float, high: float, what: str, whole: bool = False
) -> list[float]:
    """The numbers that a key has, with commas between them. Raises ConfigError."""
    try:
        values = [float(part) for part in given.get(key, default).split(",") if part]
    except ValueError:
        values = [-1.0]
    if not values or not all(low <= value <= high and (not whole or value == int(value)) for value in values):
        raise ConfigError(
            f"{key}={shown(given.get(key, ''))} is not allowed: give {what}, {low:g} to {int(high):,} each"
        )
    return values


def load_texts(path: Path) -> list[Traced]:
    """The texts of a run's folder, or of a file. Raises ConfigError."""
    if not path.is_dir():
        return load_file(path)
    trace = load_trace(path)
    return traced_texts(trace.texts, trace.greedy)


def built(load: BatchLoad, names: Sequence[str], overrides: Sequence[str]) -> Iterator[tuple[str, GammaPolicy]]:
    """The named policies, for a load. Raises ConfigError if one needs what the traces do not have."""
    confident = all(np.isfinite(text.confidence).all() for text in load.texts)
    for name in names:
        choice = choose(compose([f"gamma_policy={name}", *overrides]), "gamma_policy", None)
        settings = choice.settings
        if isinstance(settings, GoodputGamma.Settings):
            settings = replace(settings, by_row=load.by_row, signal=settings.signal if confident else "none")
        policy: GammaPolicy = choice.kind.from_settings(settings)
        refuse_drawn(policy, all(text.greedy for text in load.texts))
        if policy.replay_only or (policy.signal is not None and (policy.traced_as != "confidence" or not confident)):
            raise ConfigError(f"gamma_policy={name} is not possible: these traces do not have what it looks at")
        yield name, policy


def rates_on(load: BatchLoad, names: Sequence[str], overrides: Sequence[str], each: int) -> dict[str, SimulatedRate]:
    """What constant gammas, policies and oracles give on a load, for so many tokens a row. An oracle that knows the
    outcomes chooses the best round, and a constant gamma may be better in the long run: the better of both counts."""
    found = {f"gamma {gamma}": simulate(load, FixedGamma(gamma), each) for gamma in range(LARGEST + 1)}
    found |= {name: simulate(load, policy, each) for name, policy in built(load, names, overrides)}
    if all(text.beta is not None for text in load.texts):
        found["known_betas"] = foreseen(load, LARGEST, each, betas=True)
    constant = [rate for name, rate in found.items() if name.startswith("gamma ")]
    return found | {"oracle": max(foreseen(load, LARGEST, each), *constant, key=lambda rate: rate.per_second)}


def table_of_loads(texts: Sequence[Traced], wanted: Asked, names: Sequence[str], overrides: Sequence[str]) -> Table:
    """A row for each load and way. `best gamma` is the best constant one of the load, known afterwards."""
    rows, loads = [], list(product(wanted.rows, wanted.contexts))
    for size, context in track(loads, "simulating", console=Console(stderr=True)):
        load = BatchLoad(texts, wanted.cost, size, context, wanted.by_row)
        found = rates_on(load, names, overrides, wanted.tokens)
        constant = [name for name in found if name.startswith("gamma ")]
        best = max(constant, key=lambda name: found[name].per_second)
        kept = {f"best gamma ({best[6:]})": found[best], "gamma 0": found["gamma 0"]}
        kept |= {name: rate for name, rate in found.items() if name not in constant}
        for name, rate in kept.items():
            rows.append({
                "batch_size": str(size), "context": str(context), "policy": name,
                "tokens a second": f"{rate.per_second:.4g}",
                "over gamma 0": f"{rate.per_second / found['gamma 0'].per_second:.3f}x",
                "below the oracle": f"{1 - rate.per_second / found['oracle'].per_second:.1%}",
                "drafted a row": f"{rate.drafted / rate.rounds / size:.2f}",
            })  # fmt: skip
    return Table.of(rows, "simulated, over a linear cost of rounds", ["batch_size", "context", "policy"])
