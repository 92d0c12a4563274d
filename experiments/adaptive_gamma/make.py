"""Gamma policies against every fixed gamma, on each prompt in turn, in one process. Overrides may follow the command.

    python experiments/adaptive_gamma/make.py

A multirun puts minutes between policies, and a shared machine drifts by more than they differ. Measured tokens
per second are given over the best fixed gamma's, with a 95 % interval (paired bootstrap over prompts), beside
what replay of the rounds of gamma 10 predicts for each policy.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, make, number, text
from figures import distances, named
from interleaved import PLAIN, built, configuration, in_turn, jobs_of, place, seconds_and_tokens

from specbench.config.checks import choose
from specbench.data.prompts import Request
from specbench.decoded import Decoded, Result
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.decoding.state import Job
from specbench.gamma_policies.fixed import FixedGamma
from specbench.measure.costs import CostTable
from specbench.measure.estimators import speedup_interval
from specbench.measure.simulate import Trace, replay, trace_of
from specbench.measure.text_laws import read_text
from specbench.report.style import MEASURED, OTHER, THEORY
from specbench.run.session import Session

LARGEST = 10
FIXED = {f"gamma {gamma}": gamma for gamma in (1, 2, 3, 4, 5, 6, LARGEST)}
ONLINE = {
    "optimal": ["gamma_policy=optimal"],
    "adaptive": ["gamma_policy=adaptive"],
    "entropy": ["gamma_policy=entropy"],
    "entropy, signal confidence": ["gamma_policy=entropy", "gamma_policy.signal=confidence"],
    "heuristic": ["gamma_policy=heuristic"],
    "confidence, threshold .4": ["gamma_policy=confidence"],
}
BOUNDS = {"known betas": ["gamma_policy=known_betas"], "oracle": ["gamma_policy=oracle"]}
BEST, REPLAYED = " (best fixed)", " (replay only)"
DRAWS, WARM_UP, CALIBRATION_TOKENS = 6, 1, 32
TABLE = {
    "temperature": text("temperature"),
    "policy": text("policy"),
    "tokens a round": number("tau"),
    "drafted a round": number("drafted_a_round"),
    "speedup": number("speedup", ".3f"),
    "replay predicts": number("replayed", ".3f"),
    "predicted / measured": number("replayed_of_measured", ".3f"),
    "over the best fixed gamma": number("over_best", ".3f"),
    "low": number("low", ".3f"),
    "high": number("high", ".3f"),
}


def policy(name: str, costs: CostTable) -> GammaPolicy:
    """A policy as it begins, with what is known of costs."""
    if name in FIXED:
        return FixedGamma(FIXED[name])
    overrides = [*(ONLINE | BOUNDS)[name], f"gamma_policy.largest={LARGEST}"]
    choice = choose(configuration(*overrides), "gamma_policy", None)
    made: GammaPolicy = choice.kind.from_settings(choice.settings)
    made.calibrate(costs)
    return made


def calibrate(session: Session, jobs: Sequence[Job], columns: int) -> CostTable:
    """Every gamma on some prompts, after a first pass that only warms up."""
    costs = CostTable()
    for again in range(WARM_UP + 2):
        for gamma in range(LARGEST + 1):
            job = jobs[(again * (LARGEST + 1) + gamma) % len(jobs)]
            short = Job(job.tokens, min(job.limit, len(job.tokens) + CALIBRATION_TOKENS), job.key)
            rounds = session.decode([short], True, columns, policy=FixedGamma(gamma)).rounds
            costs.add(rounds if again >= WARM_UP else [])
    return costs


def collect(overrides: list[str]) -> Measured:
    """A row for each policy and bound, at both temperatures."""
    rows, where = [], ("", "")
    for temperature in (0, 1):
        asked = ["data.kind=mixed", "data.count=62", f"gamma={LARGEST}", f"temperature={temperature}"]
        session = Session(built(*asked, *overrides))
        where = place(session.parts)
        with torch.inference_mode():
            rows += [
                {"temperature": float(temperature)} | row for row in compare(session, f"temperature {temperature}")
            ]
    return Measured(rows, *where)


def compare(session: Session, what: str) -> list[Row]:
    """A row for each policy and bound."""
    requests, jobs = jobs_of(session.parts)
    columns = max(job.limit for job in jobs) + session.parts.spare
    costs = calibrate(session, jobs, columns)
    ways = {name: partial(decode, session, columns, policy(name, costs)) for name in (*FIXED, *ONLINE)}
    found = in_turn(ways | {PLAIN: partial(decode, session, columns, None)}, jobs, what)
    for name in ways:
        for decoded in found[name]:
            costs.add(decoded.rounds)
    return rows_of(found, trace(session, requests, jobs, found, costs), costs)


def decode(session: Session, columns: int, chosen: GammaPolicy | None, job: Job) -> Decoded:
    """One prompt; without a policy plainly."""
    return session.decode([job], chosen is not None, columns, policy=chosen)


def trace(
    session: Session,
    requests: Sequence[Request],
    jobs: Sequence[Job],
    found: Mapping[str, Sequence[Decoded]],
    costs: CostTable,
) -> Trace:
    """The rounds of the largest gamma, for replay."""
    results = []
    for request, job, plain, widest in zip(requests, jobs, found[PLAIN], found[f"gamma {LARGEST}"], strict=True):
        ours = widest.requests[0]
        laws = read_text(session.parts.target, session.parts.drafter, job.tokens, ours.tokens, ours.lenience())
        limit = job.limit - len(job.tokens)
        results.append(Result(request, limit, ours, plain.requests[0], speculative_laws=laws))
    return trace_of(results, costs.summary(), 1.0)


def rows_of(found: Mapping[str, Sequence[Decoded]], traced: Trace, costs: CostTable) -> list[Row]:
    """What was measured of every policy, beside what replay says; and the bounds, which replay alone knows."""
    times = {name: seconds_and_tokens(decoded) for name, decoded in found.items()}
    rate = {name: sum(tokens) / sum(seconds) for name, (seconds, tokens) in times.items()}
    best = max(FIXED, key=lambda name: rate[name])
    rows: list[Row] = []
    for name in (*FIXED, *ONLINE):
        over, ci95 = speedup_interval(*times[best], *times[name])
        low, high = ci95 or (None, None)
        rounds = [r for decoded in found[name] for r in decoded.rounds]
        expected, speedup = replay(traced, policy(name, costs), DRAWS).speedup, rate[name] / rate[PLAIN]
        rows.append(
            {
                "policy": name + (BEST if name == best else ""),
                "tau": sum(r.tokens for r in rounds) / len(rounds),
                "drafted_a_round": sum(r.gamma for r in rounds) / len(rounds),
                "speedup": speedup,
                "replayed": expected,
                "replayed_of_measured": expected / speedup,
                "over_best": over,
                "low": low,
                "high": high,
            }
        )
    reference = replay(traced, policy(best, costs), DRAWS).speedup
    for name in BOUNDS:
        expected = replay(traced, policy(name, costs), DRAWS).speedup
        rows.append({"policy": name + REPLAYED, "replayed": expected, "over_best": expected / reference})
    return rows


def draw(rows: Sequence[Row]) -> Figure:
    """Every policy's tokens a second over the best fixed gamma's; bounds as diamonds."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 5.4), sharey=True)
    for axes, temperature in zip(panels, (0, 1), strict=True):
        here = [row for row in rows if row["temperature"] == temperature]
        for y, row in enumerate(here):
            if "low" in row:
                colour = OTHER if row["policy"].startswith("gamma") else MEASURED
                ends = distances([row], "over_best")
                axes.errorbar([row["over_best"]], [y], xerr=ends, fmt="o", color=colour, capsize=3)
            else:
                axes.plot([row["over_best"]], [y], "D", color=THEORY)
        names = [row["policy"].replace(BEST, "") for row in here]
        named(axes, names, "tokens per second, over the best fixed gamma's")
        axes.set_title(f"temperature {temperature}")
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
