"""Gamma policies against every fixed gamma, prompt by prompt in one process.

    python experiments/adaptive_gamma/compare.py [data.count=62 ...]

A multirun puts minutes between policies, and a shared machine drifts by more than they differ. Here
each prompt is decoded by all of them, in an order that turns, before the next prompt is begun. Writes
table.md, results.csv and plot.png beside this file: measured tokens per second over the best fixed
gamma's with a 95 % interval (paired bootstrap over prompts), and what replay of the gamma 10 rounds
predicted for each.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra import compose, initialize_config_dir
from matplotlib import pyplot as plt
from rich.progress import track
from specbench.batch import Batch
from specbench.measure.replay import replay, trace_of
from specbench.measure.text import read_text

from specbench.config import build, check
from specbench.data.prompts import render
from specbench.decoding.noise import prompt_key
from specbench.decoding.queue import Job
from specbench.gamma_policies.fixed import FixedGamma
from specbench.measure.costs import CostTable
from specbench.measure.estimators import speedup_interval
from specbench.paths import conf_dir
from specbench.results import provenance
from specbench.run import Parts, decode

LARGEST = 10
FIXED = (1, 2, 3, 4, 5, 6, LARGEST)
ONLINE = {
    "optimal": ["gamma_policy=optimal"],
    "adaptive": ["gamma_policy=adaptive"],
    "entropy": ["gamma_policy=entropy"],
    "entropy, signal confidence": ["gamma_policy=entropy", "gamma_policy.signal=confidence"],
    "heuristic": ["gamma_policy=heuristic"],
    "confidence, threshold .4": ["gamma_policy=confidence"],
}
BOUNDS = {"known betas": ["gamma_policy=known_betas"], "oracle": ["gamma_policy=oracle"]}
HERE = Path(__file__).parent


def configuration(*overrides: str) -> Any:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def policy(overrides: list[str], costs: CostTable) -> Any:
    node = configuration(*overrides, f"gamma_policy.largest={LARGEST}").gamma_policy
    kind = hydra.utils.get_class(node._target_)
    made = kind(kind.Settings(**{key: value for key, value in node.items() if key != "_target_"}), None)
    if hasattr(made, "calibrate"):
        made.calibrate(costs)
    return made


def fixed(gamma: int) -> FixedGamma:
    return FixedGamma(FixedGamma.Settings(gamma), None)


def calibrate(parts: Parts, jobs: list[Job], columns: int) -> CostTable:
    """Every gamma on some prompts, after a first pass that only warms up."""
    costs = CostTable()
    for again in range(3):
        for gamma in range(LARGEST + 1):
            job = jobs[(again * (LARGEST + 1) + gamma) % len(jobs)]
            short = Job(job.tokens, min(job.limit, len(job.tokens) + 32), job.key)
            rounds = decode(parts, [short], True, columns, policy=fixed(gamma)).rounds
            costs.add(rounds if again else [])
    return costs


def measure(temperature: int, others: list[str]) -> list[dict[str, Any]]:
    """One row per policy."""
    asked = ["data.kind=mixed", "data.count=62", f"gamma={LARGEST}", f"temperature={temperature}", "logger=none"]
    parts = build(check(configuration(*asked, *others)))
    tokenizer = parts.target.tokenizer
    requests = [render(prompt, [], tokenizer, parts.target.chat_template) for prompt in parts.prompts]
    jobs = [Job(r.tokens, len(r.tokens) + parts.max_new_tokens, prompt_key(parts.seed, r.id)) for r in requests]
    columns = max(job.limit for job in jobs) + LARGEST + 1
    costs = calibrate(parts, jobs, columns)
    ways = {f"gamma {g}": fixed(g) for g in FIXED} | {name: policy(o, costs) for name, o in ONLINE.items()}
    found = {name: [] for name in (*ways, "plain")}
    batches = []
    for index, job in track(list(enumerate(jobs)), f"temperature {temperature}"):
        order = [*found][index % len(found) :] + [*found][: index % len(found)]
        for name in order:
            found[name].append(decode(parts, [job], name != "plain", columns, policy=ways.get(name)))
        widest, plain = found[f"gamma {LARGEST}"][-1], found["plain"][-1]
        batch = Batch([requests[index]], [parts.max_new_tokens], plain, widest)
        tokens = widest.tokens[0]
        batch.texts["speculative"] = [read_text(parts, job.tokens, tokens, [1.0] * len(tokens))]
        batches.append(batch)
    for decoded in (d for name in ways for d in found[name]):
        costs.add(decoded.rounds)
    return rows(found, ways, batches, costs, temperature)


def rows(found: dict[str, Any], ways: dict[str, Any], batches: list[Batch], costs: CostTable, temperature: int) -> list:
    trace = trace_of(batches, costs.summary(), 1.0)
    times = {name: ([d.seconds_of(0) for d in ds], [len(d.tokens[0]) for d in ds]) for name, ds in found.items()}
    rate = {name: sum(tokens) / sum(seconds) for name, (seconds, tokens) in times.items()}
    best = max((name for name in rate if name.startswith("gamma ")), key=rate.get)
    table = []
    for name in ways:
        over, (low, high) = speedup_interval(*times[best], *times[name])
        rounds = [r for d in found[name] for r in d.rounds]
        again = fixed(int(name.split()[1])) if name.startswith("gamma ") else policy(ONLINE[name], costs)
        expected = replay(trace, again, draws=6).speedup
        measured = rate[name] / rate["plain"]
        table.append(
            {
                "temperature": temperature,
                "policy": name + (" (best fixed)" if name == best else ""),
                "tokens a round": f"{sum(r.tokens for r in rounds) / len(rounds):.2f}",
                "drafted a round": f"{sum(r.gamma for r in rounds) / len(rounds):.2f}",
                "speedup": f"{measured:.3f}",
                "replay predicts": f"{expected:.3f}",
                "predicted / measured": f"{expected / measured:.3f}",
                "over the best fixed gamma": f"{over:.3f}",
                "low": f"{low:.3f}",
                "high": f"{high:.3f}",
            }
        )
    for name, overrides in BOUNDS.items():
        expected = replay(trace, policy(overrides, costs), draws=6).speedup
        reference = replay(trace, fixed(int(best.split()[1])), draws=6).speedup
        bound = {"replay predicts": f"{expected:.3f}", "over the best fixed gamma": f"{expected / reference:.3f}"}
        table.append({"temperature": temperature, "policy": f"{name} (replay only)"} | bound)
    return table


def plot(table: list[dict[str, Any]], title: str) -> None:
    figure, both = plt.subplots(1, 2, figsize=(11, 5.4), sharey=True, layout="constrained")
    for axes, temperature in zip(both, (0, 1), strict=True):
        here = [row for row in table if row["temperature"] == temperature]
        for y, row in enumerate(here):
            value = float(row["over the best fixed gamma"])
            if "low" in row:
                error = [[value - float(row["low"])], [float(row["high"]) - value]]
                colour = "#8a8f98" if row["policy"].startswith("gamma") else "#3b82c4"
                axes.errorbar([value], [y], xerr=error, fmt="o", color=colour, capsize=3)
            else:
                axes.plot([value], [y], "D", color="#d9822b")
        axes.set_yticks(range(len(here)), [row["policy"].replace(" (best fixed)", "") for row in here])
        axes.axvline(1, color="#8a8f98", linewidth=1, linestyle=":")
        axes.set_title(f"temperature {temperature}", loc="left")
        axes.set_xlabel("tokens per second, over the best fixed gamma's")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.savefig(HERE / "plot.png", dpi=130)


def main() -> None:
    with torch.inference_mode():
        table = [row for temperature in (0, 1) for row in measure(temperature, sys.argv[1:])]
    headings = list(table[0])
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(str(row.get(h, "-")) for h in headings) + " |" for row in table]
    (HERE / "table.md").write_text("\n".join(lines) + "\n")
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, headings, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    where = provenance(torch.device("cpu"))
    plot(table, f"{where['device']}, {where['threads']} threads, commit {(where['git_sha'] or 'unknown')[:7]}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
