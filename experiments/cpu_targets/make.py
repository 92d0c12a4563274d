"""The targets of a CPU that need no other engine, on the CPU at hand: each as a ratio of ways that took turns.

python experiments/cpu_targets/make.py

measures what is not there yet (some 20 minutes in all, kept in outputs/cpu_targets) and writes the table. With names of
parts it measures these alone, in at most three minutes each, and with the word `table` nothing:

    python experiments/cpu_targets/make.py programs_t0 programs_t1
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, make, measured, text
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from parts import FOLDER, PARTS, measure

from specbench.errors import ConfigError
from specbench.results.parquet import load_sums
from specbench.results.reader import StoredRun, load_runs
from specbench.results.report.style import MEASURED, OTHER, THEORY
from specbench.stats.bootstrap import student
from specbench.stats.comparison import TOKENS_PER_SECOND, compare

BOUNDS: Mapping[str, Callable[[float, float], bool]] = {">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b}
Interval = Sequence[float] | None


def row(name: str, value: float, ci95: Interval, sign: str, target: float, part: str) -> Row:
    """A line of the table; `sign` and `target` are the target, this project's own."""
    low, high = ci95 or (None, None)
    word = "met" if BOUNDS[sign](value, target) else "missed"
    if low is not None and high is not None and low < target < high:
        word += ", within the error"
    return {"quantity": name, "value": value, "low": low, "high": high, "sign": sign, "target": target,
            "verdict": word, "part": part}  # fmt: skip


def over(name: str, first: StoredRun, second: StoredRun, target: float, part: str) -> Row:
    """Tokens per second of the first run over the second's, on the same prompts, which they decoded in turn."""
    sums = {"first": load_sums(first.folder), "second": load_sums(second.folder)}
    found = next(way for way in compare(sums, TOKENS_PER_SECOND, "second").runs if way.label == "first")
    return row(name, found.ratio, found.ratio_ci95, ">=", target, part)


def ways(part: str, key: Callable[[dict[str, Any]], Any]) -> dict[Any, StoredRun]:
    """The runs of a part by what tells them apart."""
    return {key(run.result): run for run in load_runs(FOLDER / part)}


def executor(result: dict[str, Any]) -> str:
    """An executor's name; the default without programs is "bare"."""
    bare = result["config"]["executor"].get("programs") is False and result["choices"]["executor"] == "auto"
    return "bare" if bare else str(result["choices"]["executor"])


def rows_of_executors(temperature: int) -> list[Row]:
    """The default beside the best other executor, and its alpha and texts beside eager's."""
    part = f"executors_t{temperature}"
    found = ways(part, executor)
    auto, bare, eager = found.pop("auto"), found.pop("bare"), found["eager"]
    if not auto.result["executor"]["programs"]["used"]:
        raise ConfigError(f"{part}: auto found no stored programs; delete {FOLDER / part} and its programs, run again")
    best = max(found, key=lambda name: found[name].result["throughput"]["speculative_tokens_per_second"])
    where = f"T={temperature}, over {best}"
    rows = [
        over(f"default with stored programs, {where}", auto, found[best], 0.97, part),
        over(f"default without any program, {where}", bare, found[best], 0.97, part),
    ]
    others = [auto, bare, *found.values()]
    alphas = [way.result["alpha"]["mean"] for way in others]
    apart = max(abs(alpha - eager.result["alpha"]["mean"]) for alpha in alphas)
    texts = sum(output_of(way) != output_of(eager) for way in others)
    rows.append(row(f"largest difference of an alpha from eager's, T={temperature}", apart, None, "<=", 1e-6, part))
    rows.append(row(f"executors whose texts are not eager's, T={temperature}", texts, None, "<=", 0, part))
    return rows


def output_of(run: StoredRun) -> dict[str, Any]:
    """The texts of a run, by request."""
    return {record["id"]: record["output"] for record in run.prompts}


def rows_of_peers(temperature: int, vendor: str) -> list[Row]:
    """The default beside transformers."""
    part = f"peers_t{temperature}"
    [run] = load_runs(FOLDER / part)
    result, intel = run.result, vendor == "GenuineIntel"
    wanted = {0: (2.5, 2.5) if intel else (4.0, 3.5), 1: (2.0, 2.5) if intel else (3.0, 3.0)}[temperature]
    rows = []
    for peer, target in zip(("generate", "assisted"), wanted, strict=True):
        found = result["speedup_over"][peer]
        rows.append(row(f"over {peer}, T={temperature}", found["measured"], found["ci95"], ">=", target, part))
    return rows


def rows_of_cost(temperature: int) -> list[Row]:
    """The terms of a round's cost with compiled programs, and the one-token step beside the memory's roof."""
    part, rows = f"programs_t{temperature}", []
    [run] = load_runs(FOLDER / part)
    result = run.result
    for name, target in (("v", 1.15), ("c", 0.10), ("o", 0.06)):
        cost = result["cost"]
        rows.append(row(f"{name} at gamma 4, T={temperature}", cost[name], cost["ci95"][name], "<=", target, part))
    band = result["bandwidth"]
    roof, ends = band["measured_peak_bytes_per_second"], band["ci95"]["target_bytes_per_second"]
    share = [end / roof for end in ends] if ends else None
    name = f"bytes/s of a one-token step over the roof ({roof / 1e9:.1f} GB/s), T={temperature}"
    return [*rows, row(name, band["target_share_of_peak"], share, ">=", 0.9, part)]


def rows_of_batch() -> list[Row]:
    """Eight rows beside one."""
    found = ways("batch", lambda result: result["config"]["batch_size"])
    one, eight = output_of(found[1]), output_of(found[8])
    differ = sum(eight[key] != text for key, text in one.items())
    return [
        over("batch 8 over batch 1, gamma 4, T=0", found[8], found[1], 3, "batch"),
        row("texts of batch 8 that are not those of batch 1", differ, None, "<=", 0, "batch"),
    ]


def row_of_bfloat16(flags: str) -> Row:
    """bfloat16 beside float32."""
    found = ways("bfloat16", lambda result: result["config"]["dtype"])
    made = over("bfloat16 over float32, speculative, T=0", found["bfloat16"], found["float32"], 1.4, "bfloat16")
    return made if "amx_bf16" in flags else made | {"verdict": "no AMX here"}


def row_of_start() -> Row:
    """How much longer a run of a few tokens takes with the default than with eager."""
    seconds = json.loads((FOLDER / "start" / "seconds.json").read_text(encoding="utf-8"))
    differences = np.array(seconds["auto"]) - np.array(seconds["eager"])
    half = student(len(differences) - 1) * differences.std(ddof=1) / len(differences) ** 0.5
    mean = float(differences.mean())
    return row("start of the default after eager's, s", mean, (mean - half, mean + half), "<=", 2, "start")


def processor() -> dict[str, str]:
    """The lines of the first processor in /proc/cpuinfo, empty where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def collect(inputs: list[str]) -> Measured:
    """Measures what is missing, and makes the rows."""
    if unknown := [name for name in inputs if name not in (*PARTS, "table")]:
        raise ConfigError(f"{unknown[0]} is no part: choose among {', '.join(PARTS)}")
    for name in inputs or PARTS:
        if name in PARTS:
            measure(name)
    if inputs and "table" not in inputs:
        sys.exit()
    there = {name for name in PARTS if (FOLDER / name / "seconds.json").is_file()}
    if missing := [name for name in PARTS if name not in there]:
        print(f"not measured: {', '.join(missing)}; run this again when the machine is idle")
    cpu = processor()
    vendor, flags = (cpu.get(key, "") for key in ("vendor_id", "flags"))
    makers: Mapping[str, Callable[[], list[Row]]] = {
        "programs_t0": lambda: rows_of_cost(0),
        "programs_t1": lambda: rows_of_cost(1),
        "executors_t0": lambda: rows_of_executors(0),
        "executors_t1": lambda: rows_of_executors(1),
        "peers_t0": lambda: rows_of_peers(0, vendor),
        "peers_t1": lambda: rows_of_peers(1, vendor),
        "batch": rows_of_batch,
        "bfloat16": lambda: [row_of_bfloat16(flags)],
        "start": lambda: [row_of_start()],
    }
    rows = [made for name, maker in makers.items() if name in there for made in maker()]
    if not rows:
        raise ConfigError("nothing is measured yet")
    found = measured(rows, [run.result for name in makers if name in there for run in load_runs(FOLDER / name)])
    names = ", ".join(f"{key} {cpu[key]}" for key in ("cpu family", "model") if key in cpu)
    return Measured(rows, f"{found.machine} ({names})" if names else found.machine, found.commit)


def value(row: Row) -> str:
    """A number with its interval."""
    form = ".1e" if 0 < abs(row["value"]) < 1e-3 else ".3g"
    found = format(row["value"], form)
    return found + (f" ({row['low']:.3g} to {row['high']:.3g})" if "low" in row else "")


TABLE = {
    "quantity": text("quantity"),
    "measured": value,
    "target": lambda row: f"{row['sign']} {row['target']:g}",
    "": text("verdict"),
    "part": text("part"),
}


def draw(rows: list[Row]) -> Figure:
    """Every quantity over its target, where that is not 0 or a rounding: below 1 is missed, or met where less is
    better."""
    shown = [row for row in rows if row["target"] > 1e-3]
    figure, axes = plt.subplots(figsize=(8.4, 1 + 0.27 * len(shown)))
    for place, row in enumerate(shown):
        ends = [row.get(name, row["value"]) / row["target"] for name in ("low", "high")]
        colour = MEASURED if row["verdict"].startswith("met") else THEORY
        axes.plot(ends, [place, place], color=colour)
        axes.plot(row["value"] / row["target"], place, "o", color=colour)
    axes.axvline(1, color=OTHER, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(shown)), [f"{row['quantity']}  {row['sign']} {row['target']:g}" for row in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel("measured / target, 95 % interval")
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
