"""Trees of 16 guesses: what dynamic ones accept beside fixed ones, and what traversal verification accepts of them.

python experiments/trees/make.py

Finished settings are kept in outputs/trees, so that it goes on where it was stopped.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Row, commit, machine, number, read_rows, text, to_markdown, write_rows

from specbench.config.build import Targets, build
from specbench.config.paths import conf_dir
from specbench.config.validate import check
from specbench.data.prompts import render
from specbench.decoding.noise import prompt_key
from specbench.decoding.state import Job
from specbench.results.provenance import provenance
from specbench.run.decoder import Session

FOLDER, KEPT = Path(__file__).resolve().parent, Path("outputs/trees")
NODES, PROMPTS, NEW_TOKENS, ROWS, SAMPLES = 16, 32, 64, 8, 10_000
# Children of each guess by depth, and gamma: at most 16 guesses.
FIXED = [([1], 16), ([1], 8), ([2, 1], 8), ([3, 1], 5), ([4, 1], 4), ([2, 2, 1], 4), ([3, 2], 3), ([2, 2, 2], 3),
         ([4, 3], 2)]  # fmt: skip
BEST = ([3, 1], [4, 3])  # those whose children are the likeliest tokens at temperature 1 too
# By temperature: width, gamma, and the temperature of the drafter, whose q says how good a guess is.
DYNAMIC = {0: [(2, 8, None), (4, 8, None), (3, 10, 0.6), (3, 12, 0.4)], 1: [(4, 6, None), (8, 4, None)]}
DRAWN = [(2, 16), (3, 12), (4, 8)]  # width and gamma of dynamic trees whose guesses are drawn, at temperature 1


def cases() -> Iterator[Row]:
    """What is measured. At temperature 0 children are the likeliest tokens, and all verifiers judge alike."""
    for temperature in (0, 1):
        for width, gamma, own in DYNAMIC[temperature]:
            sharp = "" if own is None else f", q at {own}"
            words = ["drafter=dynamic_tree", f"drafter.nodes={NODES}", f"drafter.width={width}",
                     "drafter.children=best", f"drafter.temperature={'null' if own is None else own}"]  # fmt: skip
            yield {"temperature": temperature, "tree": f"dynamic, width {width}{sharp}", "children": "best",
                   "verifier": "iterative", "gamma": gamma, "nodes": NODES, "words": words}  # fmt: skip
        for width, gamma in DRAWN if temperature else ():
            words = ["drafter=dynamic_tree", f"drafter.nodes={NODES}", f"drafter.width={width}"]
            for verifier in ("iterative", "traversal"):
                yield {"temperature": temperature, "tree": f"dynamic, width {width}", "children": "distinct",
                       "verifier": verifier, "gamma": gamma, "nodes": NODES, "words": words}  # fmt: skip
        for branching, gamma in FIXED:
            width = [*branching, *[1] * gamma][:gamma]
            nodes = sum(accumulate(width, int.__mul__))
            for children, verifier in [("best", "iterative"), ("distinct", "iterative"), ("distinct", "traversal")]:
                if (children == "best") == (not temperature) or (temperature and branching in BEST):
                    shape = str(branching).replace(" ", "")
                    words = ["drafter=tree", f"drafter.branching={shape}", f"drafter.children={children}"]
                    yield {"temperature": temperature, "tree": shape, "children": children, "verifier": verifier,
                           "gamma": gamma, "nodes": nodes, "words": words}  # fmt: skip


@torch.inference_mode()
def measured(case: Row, targets: Targets) -> dict[str, Any]:
    """New tokens and target calls of each prompt, which do not depend on the batch or on the machine's speed."""
    words = [*case["words"], f"verifier={case['verifier']}", f"gamma={case['gamma']}", f"batch_size={ROWS}",
             f"temperature={case['temperature']}", f"data.limit={PROMPTS}", f"max_new_tokens={NEW_TOKENS}",
             "executor=eager", "logger=none", "verdict_tokens=0"]  # fmt: skip
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        parts = build(check(compose("config", overrides=words, return_hydra_config=True)), lambda _: None, targets)
    texts = [render(prompt, [], parts.target.tokenizer, parts.target.chat_template) for prompt in parts.prompts]
    jobs = [Job(t.tokens, len(t.tokens) + NEW_TOKENS, prompt_key(parts.seed, t.id)) for t in texts]
    found = Session(parts).decode(jobs, True, max(job.limit for job in jobs) + parts.spare)
    return {"tokens": [len(r.tokens) for r in found.requests], "calls": [len(r.rounds) for r in found.requests],
            "provenance": provenance(parts.target.device), "dtype": str(parts.target.dtype)}  # fmt: skip


def ratio(above: dict[str, Any], below: dict[str, Any]) -> Row:
    """Ratio of two taus, and its 95 % interval from a paired bootstrap over prompts."""
    sums = [np.array([own["tokens"], own["calls"]], float) for own in (above, below)]  # [2, prompts] each
    drawn = np.random.default_rng(0).integers(PROMPTS, size=(SAMPLES, PROMPTS))
    taus = [tokens[drawn].sum(1) / calls[drawn].sum(1) for tokens, calls in sums]
    low, high = np.quantile(taus[0] / taus[1], [0.025, 0.975])
    return {"ratio": tau(above) / tau(below), "low": low, "high": high}


def tau(found: dict[str, Any]) -> float:
    """Tokens per target call, of all calls."""
    return sum(found["tokens"]) / sum(found["calls"])


def rows(every: list[tuple[Row, dict[str, Any]]]) -> list[Row]:
    """One row for each setting: dynamic trees beside the best fixed one of their verifier, traversal beside
    iterative on its tree."""
    found = []
    for case, own in every:
        row = {name: value for name, value in case.items() if name != "words"} | {"tau": tau(own)}
        same = [(c, o) for c, o in every if c["temperature"] == case["temperature"]]
        if case["tree"].startswith("dynamic"):
            fixed = [pair for pair in same if not pair[0]["tree"].startswith("dynamic")]
            alike = [(c, o) for c, o in fixed if c["verifier"] == case["verifier"]]
            best, other = max(alike, key=lambda pair: tau(pair[1]))
            row |= {"beside": f"{best['tree']}, {best['children']}, {best['verifier']}"} | ratio(own, other)
        elif case["verifier"] == "traversal":
            like = ("tree", "gamma", "children")
            other = next(o for c, o in same if c["verifier"] != "traversal" and all(c[k] == case[k] for k in like))
            row |= {"beside": "iterative"} | ratio(own, other)
        found.append(row)
    return sorted(found, key=lambda row: (row["temperature"], -row["tau"]))


def interval(row: Row) -> str:
    return f"{row['ratio']:.3f} ({row['low']:.3f}-{row['high']:.3f})" if "ratio" in row else "-"


TABLE = {
    "T": text("temperature"),
    "tree": text("tree"),
    "children": text("children"),
    "verifier": text("verifier"),
    "gamma": text("gamma"),
    "guesses": text("nodes"),
    "tau": number("tau", ".3f"),
    "beside": text("beside"),
    "ratio": interval,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", action="store_true", help="make table.md again from results.csv")
    if not parser.parse_args().stored:
        targets, every = Targets(), []
        KEPT.mkdir(parents=True, exist_ok=True)
        for case in cases():
            names = ("temperature", "tree", "children", "verifier", "gamma")
            path = KEPT / ("-".join(str(case[name]) for name in names).replace(" ", "_") + ".json")
            if not path.exists():
                path.write_text(json.dumps(measured(case, targets)))
                print(path.stem, f"{tau(json.loads(path.read_text())):.3f}", flush=True)
            every.append((case, json.loads(path.read_text())))
        write_rows(FOLDER / "results.csv", rows(every))
        where = [(machine(own["provenance"], own["dtype"]), commit(own["provenance"])) for _, own in every]
        print(*dict.fromkeys(where), sep="\n")
    (FOLDER / "table.md").write_text(to_markdown(read_rows(FOLDER / "results.csv"), TABLE), encoding="utf-8")


if __name__ == "__main__":
    main()
