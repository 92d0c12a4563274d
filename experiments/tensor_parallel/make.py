"""Are the tokens of two processes that share a target those of one, and what do collectives take?

    python experiments/tensor_parallel/make.py

The shipped pair on 8 prompts of 32 tokens at both temperatures: in one process with one thread, in one with two, and in
two ranks (gloo) with one thread each. Texts are compared with those of one process with one thread.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, lossless, make, measured, number, text

from specbench.errors import ConfigError
from specbench.results.reader import read_result
from specbench.results.report.style import MEASURED, OTHER

WAYS = {"one process, one thread": (1, 1), "one process, two threads": (1, 2), "two processes": (2, 1)}
RUN = ("executor=eager", "device=cpu", "logger=none", "data.limit=8", "max_new_tokens=32", "verdict_tokens=1000")


def run(processes: int, threads: int, temperature: int, folder: Path) -> tuple[dict[str, Any], list[list[str]]]:
    """The results of a run, and the text of each prompt both ways."""
    words = [f"target.tensor_parallel={processes}", f"temperature={temperature}", f"hydra.run.dir={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-m", "specbench", *RUN, *words], check=True, env=environment, stdout=-3)
    lines = map(json.loads, (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines())
    return read_result(folder), [[line["output"], line["baseline_output"]] for line in lines]


def collect(inputs: list[str]) -> Measured:
    """A row for each way and temperature."""
    if inputs:
        raise ConfigError("it takes no arguments: the runs are its own")
    rows, results = [], []
    with tempfile.TemporaryDirectory() as folder:
        for temperature in (0, 1):
            first: list[list[str]] = []
            for number_of, (way, (processes, threads)) in enumerate(WAYS.items()):
                where = Path(folder) / f"{temperature}-{number_of}"
                result, texts = run(processes, threads, temperature, where)
                first = first or texts
                rows.append(row(way, temperature, result, sum(a == b for a, b in zip(texts, first, strict=True))))
                results.append(result)
    return measured(rows, results)


def row(way: str, temperature: int, result: dict[str, Any], equal: int) -> Row:
    """The numbers of a run."""
    cost, told = result["cost"], result["cost"]["communication"] or {}
    parts = {f"collectives_{name}": told.get(name) for name in ("share", "plain_share", "step", "v", "o")}
    return {
        "way": way,
        "temperature": temperature,
        "equal": equal,
        "prompts": result["counts"]["prompts"],
        "alpha": result["alpha"]["mean"],
        "tau": result["block_efficiency"]["mean"],
        "step_ms": cost["target_step_seconds"] * 1e3,
        **{name: cost[name] for name in ("c", "v", "o")},
        **parts,
        "speedup": result["speedup"]["measured"],
        "tokens_per_second": result["throughput"]["speculative_tokens_per_second"],
        "lossless": lossless(result),
    }


TABLE = {
    "T": text("temperature"),
    "": text("way"),
    "equal texts": number("equal", ".0f"),
    "alpha": number("alpha", ".6f"),
    "tau": number("tau"),
    "step, ms": number("step_ms"),
    "c": number("c", ".3f"),
    "v": number("v"),
    "o": number("o", ".3f"),
    "collectives": number("collectives_share", ".0%"),
    "of a plain step": number("collectives_step", ".0%"),
    "of v": number("collectives_v"),
    "of o": number("collectives_o", ".3f"),
    "speedup": number("speedup", ".2f", "x"),
    "tokens/s": number("tokens_per_second", ".0f"),
    "lossless": text("lossless"),
}


def draw(rows: list[Row]) -> Figure:
    """The plain step of each way, and what collectives take of it."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    names = [f"T={row['temperature']:g}, {row['way']}" for row in rows]
    steps = [row["step_ms"] for row in rows]
    axes.barh(names, steps, color=OTHER, label="plain step")
    within = [row["step_ms"] * row.get("collectives_step", 0) for row in rows]
    axes.barh(names, within, color=MEASURED, label="of it in collectives")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.legend()
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
