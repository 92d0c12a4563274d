"""specbench beside other engines, from the runs that run.py has left.

python experiments/peers/run.py
python experiments/peers/make.py outputs/peers/runs
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Cell, Measured, Row, interval, make, measured, number, runs_in, text
from figures import by_temperature, legend
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specbench.decoding.noise import prompt_key
from specbench.errors import ConfigError
from specbench.results.reader import StoredRun
from specbench.stats.bootstrap import speedup_interval

MODES = {"plain": "plain", "plain_sdpa": "plain (SDPA)", "draft": "draft model", "lookup": "lookup"}
TRANSFORMERS = {"generate": "plain", "assisted": "draft", "prompt_lookup": "lookup"}
OURS = "specbench"
COLOURS = {"plain": "#9cc3e4", "plain_sdpa": "#c9d3dc", "draft": "#3b82c4", "lookup": "#d99b5f"}
Outputs = Mapping[int, dict[str, Any]]  # what a way of decoding made of each prompt, by the prompt's key


@dataclass(frozen=True)
class Way:
    """A peer's name in results.json, in parts."""

    engine: str
    precision: str  # "" is the run's own
    mode: str

    @classmethod
    def of(cls, name: str) -> "Way":
        if name in TRANSFORMERS:
            return cls("transformers", "", TRANSFORMERS[name])
        mode = next(mode for mode in sorted(MODES, key=len, reverse=True) if name.endswith(f"_{mode}"))
        engine, _, precision = name.removesuffix(f"_{mode}").partition("_")
        return cls(engine, precision or "f32", mode)


class Run:
    """A finished run, with what every way of decoding made of its prompts."""

    def __init__(self, run: StoredRun):
        self.result, seed = run.result, run.result["config"]["seed"]
        self.lines = {prompt_key(seed, line["id"]): line for line in run.prompts if "error" not in line}
        self.outputs: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in self.result["speedup_over"]}
        self.versions = {"transformers": f"transformers {self.result['provenance']['versions']['transformers']}"}
        for line in map(json.loads, (run.folder / "texts.jsonl").read_text(encoding="utf-8").splitlines()):
            if "engine" in line:
                self.versions[line["engine"].partition(":")[0]] = line["version"]
            elif line["key"] in self.lines:
                self.outputs[line["peer"]][line["key"]] = line

    @property
    def exact(self) -> bool:
        """Whether `generate` gave the texts that all others are to give, too."""
        config = self.result["config"]
        return config["temperature"] == 0 and config["dtype"] == "float32" and "generate" in self.outputs

    def own(self, field: str) -> dict[int, str]:
        """Our own texts: `output`, or `baseline_output` of plain decoding."""
        return {key: line[field] for key, line in self.lines.items()}

    def plain_over(self, outputs: Outputs) -> dict[str, float]:
        """Our plain decoding over theirs."""
        ours = [(line["baseline_decode_seconds"], line["baseline_tokens"]) for line in self.lines.values()]
        theirs = [(outputs[key]["seconds"], outputs[key]["decoded"]) for key in self.lines]
        ratio, ci95 = speedup_interval(*zip(*theirs, strict=True), *zip(*ours, strict=True))
        low, high = ci95 or (None, None)
        return {"plain_over_plain": ratio, "plain_low": low, "plain_high": high}


def collect(inputs: list[str]) -> Measured:
    """A row for each engine, precision and run. Raises ConfigError."""
    found = runs_in(inputs)
    runs = [Run(run) for run in found if (run.folder / "texts.jsonl").is_file()]
    if not runs:
        raise ConfigError(f"{inputs[0]} holds no run of run.py: there is no texts.jsonl")
    exact = next((run for run in runs if run.exact), None)
    texts = {key: line["output"] for key, line in exact.outputs["generate"].items()} if exact else {}
    rows = [row for run in sorted(runs, key=order) for row in rows_of(run, texts)]
    return measured(rows, [run.result for run in runs])


def order(run: Run) -> tuple[bool, float, str]:
    """Float32 first, then by temperature."""
    config = run.result["config"]
    return config["dtype"] != "float32", config["temperature"], run.result["choices"]["executor"]


def rows_of(run: Run, texts: Mapping[int, str]) -> list[Row]:
    """Our own row, then one for each engine and precision; `texts` are what all should give at temperature 0."""
    result, config = run.result, run.result["config"]
    dtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(config["dtype"], config["dtype"])
    facts = {
        "temperature": config["temperature"],
        "ours": f"{result['choices']['executor']}, {dtype}",
        "gamma": config["gamma"],
        "prompts": len(run.lines),
        "date": result["provenance"]["started"][:10],
    }
    greedy = config["temperature"] == 0
    own = facts | {"engine": OURS, "precision": dtype, "version": f"drafter {result['choices']['drafter']}"}
    rows: dict[tuple[str, str], Row] = {(OURS, dtype): own}
    for mode, way, field in (("plain", "baseline", "baseline_output"), ("draft", "speculative", "output")):
        own[mode] = result["throughput"][f"{way}_tokens_per_second"]
        own |= equal(mode, run.own(field), texts, greedy)
    for name, over in result["speedup_over"].items():
        way, outputs = Way.of(name), run.outputs[name]
        precision = way.precision or dtype
        row = rows.setdefault((way.engine, precision), facts | {
            "engine": way.engine, "precision": precision, "version": run.versions[way.engine]})  # fmt: skip
        row[way.mode] = result["throughput"][f"{name}_tokens_per_second"]
        row |= equal(way.mode, {key: line["output"] for key, line in outputs.items()}, texts, greedy)
        if row[way.mode] > row.get("best", 0):
            low, high = over["ci95"] or (None, None)
            row |= {"best": row[way.mode], "over_best": over["measured"], "low": low, "high": high}
        if way.mode == "plain":
            row |= run.plain_over(outputs)
    return [*rows.values()]


def equal(mode: str, found: Mapping[int, str], texts: Mapping[int, str], greedy: bool) -> Row:
    """How many texts are the expected ones."""
    if not (greedy and texts):
        return {}
    return {f"{mode}_equal": sum(found[key] == text for key, text in texts.items() if key in found)}


def rate(mode: str) -> Cell:
    """Tokens a second, and how many texts differ."""

    def cell(row: Row) -> str:
        differ = row["prompts"] - row.get(f"{mode}_equal", row["prompts"])
        return number(mode, ".0f")(row) + (f" ({differ:.0f} texts differ)" if mode in row and differ else "")

    return cell


TABLE = {
    "T": text("temperature"),
    "specbench's executor": text("ours"),
    "engine": text("engine"),
    "precision": text("precision"),
    **{f"{name}, tokens/s": rate(mode) for mode, name in MODES.items()},
    "specbench, drafting, over its best": interval("over_best", "low", "high"),
    "specbench, plain, over its plain": interval("plain_over_plain", "plain_low", "plain_high"),
    "prompts": text("prompts"),
    "version": text("version"),
    "date": text("date"),
}


def draw(rows: list[Row]) -> Figure:
    """Tokens a second of every engine's modes, a panel for each temperature."""
    longest = max(sum(row["temperature"] == t for row in rows) for t in {row["temperature"] for row in rows})
    figure = by_temperature(rows, bars, (5.6, 1.4 + 0.62 * longest))
    legend(figure, len(MODES))
    return figure


def bars(axes: Axes, rows: list[Row]) -> None:
    """A group of bars for each engine."""
    height = 0.86 / len(MODES)
    for place, (mode, name) in enumerate(MODES.items()):
        y = [i + (place - (len(MODES) - 1) / 2) * height for i in range(len(rows))]
        drawn = axes.barh(y, [row.get(mode, 0) for row in rows], height, color=COLOURS[mode], label=name)
        axes.bar_label(drawn, [f"{row[mode]:.0f}" if mode in row else "" for row in rows], padding=2, fontsize=7)
    names = [f"{row['engine']} {row['ours'] if row['engine'] == OURS else row['precision']}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second of decoding")
    axes.margins(x=0.12, y=0.01)


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
