"""Every drafter, or every verifier, on each prompt in turn in one process.

    python experiments/drafters/compare.py drafters
    python experiments/drafters/compare.py verifiers [data.count=32 ...]

The jobs of `experiment=drafters` stand minutes apart, and a shared machine drifts by more than drafters
differ. Here each prompt is decoded in all ways, in an order that turns, before the next one is begun.
Writes NAME_compared.md, .csv and .png beside this file: the speedup over plain decoding with a 95 %
interval (paired bootstrap over prompts).
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from hydra import compose, initialize_config_dir
from matplotlib import pyplot as plt
from rich.progress import track
from specbench.batch import Decoded

from specbench.config import build, check
from specbench.data.prompts import render
from specbench.decoding.noise import prompt_key
from specbench.decoding.queue import Job
from specbench.measure.estimators import speedup_interval
from specbench.paths import conf_dir
from specbench.results import provenance
from specbench.run import Parts, decode

HERE = Path(__file__).parent
PLAIN = "plain"


def configuration(*overrides: str) -> Any:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=True)


def ways(name: str) -> dict[int, dict[str, list[str]]]:
    """By temperature, the choices of the experiment of that name."""
    swept = configuration(f"experiment={name}").hydra.sweeper.params
    key = name.removesuffix("s")
    choices = {choice: [f"{key}={choice}"] for choice in str(swept[key]).split(",")}
    return {int(t): choices for t in str(swept.get("temperature", 1)).split(",")}


def measure(temperature: int, choices: dict[str, list[str]], others: list[str]) -> list[dict[str, str]]:
    """One row per choice, fastest first."""
    asked = [f"temperature={temperature}", "logger=none", *others]
    made = {
        name: build(check(configuration(*overrides, *asked)), announce=lambda text: None)
        for name, overrides in track(choices.items(), f"loading, temperature {temperature}")
    }
    some = next(iter(made.values()))
    requests = [render(prompt, [], some.target.tokenizer, some.target.chat_template) for prompt in some.prompts]
    jobs = [Job(r.tokens, len(r.tokens) + some.max_new_tokens, prompt_key(some.seed, r.id)) for r in requests]
    columns = max(job.limit for job in jobs) + max(parts.spare for parts in made.values())
    parts_of = made | {PLAIN: some}
    found: dict[str, list[Decoded]] = {name: [] for name in parts_of}
    for name, parts in parts_of.items():
        decode_one(name, parts, jobs[0], columns)  # first calls pay for much that others do not
    for index, job in track(list(enumerate(jobs)), f"temperature {temperature}"):
        turned = [*found][index % len(found) :] + [*found][: index % len(found)]
        for name in turned:
            found[name].append(decode_one(name, parts_of[name], job, columns))
    rows = [row(name, temperature, found) for name in choices]
    return sorted(rows, key=lambda found: -float(found["speedup"]))


def decode_one(name: str, parts: Parts, job: Job, columns: int) -> Decoded:
    return decode(parts, [job], name != PLAIN, columns)


def row(name: str, temperature: int, found: dict[str, list[Decoded]]) -> dict[str, str]:
    times = {way: ([d.seconds_of(0) for d in found[way]], [len(d.tokens[0]) for d in found[way]])
             for way in (PLAIN, name)}  # fmt: skip
    measured, (low, high) = speedup_interval(*times[PLAIN], *times[name])
    rounds = [r for d in found[name] for r in d.rounds]
    return {
        "T": str(temperature),
        "choice": name,
        "tau": f"{sum(r.tokens for r in rounds) / len(rounds):.2f}",
        "speedup": f"{measured:.3f}",
        "low": f"{low:.3f}",
        "high": f"{high:.3f}",
    }


def plot(rows: list[dict[str, str]], title: str) -> plt.Figure:
    temperatures = sorted({row["T"] for row in rows})
    longest = max(sum(row["T"] == t for row in rows) for t in temperatures)
    size = (5.2 * len(temperatures), 0.9 + 0.3 * longest)
    figure, panels = plt.subplots(1, len(temperatures), figsize=size, layout="constrained", squeeze=False)
    for axes, temperature in zip(panels[0], temperatures, strict=True):
        here = [row for row in rows if row["T"] == temperature]
        measured, low, high = ([float(row[key]) for row in here] for key in ("speedup", "low", "high"))
        ends = [
            [m - v for m, v in zip(measured, low, strict=True)],
            [v - m for m, v in zip(measured, high, strict=True)],
        ]
        axes.errorbar(measured, range(len(here)), xerr=ends, fmt="o", color="#1b6ca8", capsize=3)
        axes.axvline(1, color="#888888", lw=1)
        axes.set_yticks(range(len(here)), [row["choice"] for row in here])
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        axes.set_xlabel("tokens per second over plain decoding, 95 % interval")
        axes.set_title(f"temperature {temperature}", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["drafters", "verifiers"])
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    others = args.overrides or (["data.count=96"] if args.name == "verifiers" else [])
    with torch.inference_mode():
        rows = [row for t, choices in ways(args.name).items() for row in measure(t, choices, others)]
    headings = list(rows[0])
    table = "\n".join(["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings),
                       *("| " + " | ".join(row.values()) + " |" for row in rows)]) + "\n"  # fmt: skip
    out = HERE / f"{args.name}_compared"
    out.with_suffix(".md").write_text(table, encoding="utf-8")
    with out.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, headings, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    where = provenance(torch.device("cpu"))
    title = f"{where['device']}, {where['threads']} threads, commit {(where['git_sha'] or 'unknown')[:7]}"
    plot(rows, title).savefig(out.with_suffix(".png"), dpi=130)
    print(table)


if __name__ == "__main__":
    main()
