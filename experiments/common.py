"""Table and plot of an engine experiment, from the results that its multirun left.

    python -m specbench experiment=NAME
    python experiments/engine.py NAME outputs/NAME

NAME is vs_transformers, executors, cache_backends or batch_scaling.
Writes experiments/NAME/table.md, results.csv and plot.png.
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from specbench.report.tables import at

KEYS = {  # what each experiment sweeps: heading, path in results.json
    "vs_transformers": {"executor": "config/executor/_target_", "temperature": "config/temperature"},
    "executors": {"executor": "config/executor/_target_", "temperature": "config/temperature"},
    "cache_backends": {"cache": "config/cache/_target_", "batch": "config/batch_size"},
    "batch_scaling": {"gamma": "config/gamma", "batch": "config/batch_size"},
}
WAYS = {"speculative": "specbench, speculative", "baseline": "specbench, plain", "generate": "generate()",
        "assisted": "assisted generation", "prompt_lookup": "prompt lookup"}  # fmt: skip
COLOURS = {"speculative": "#1b6ca8", "baseline": "#8bbbd9", "generate": "#b5651d", "assisted": "#d99b5f",
           "prompt_lookup": "#e8c9a5"}  # fmt: skip


def label(value: Any) -> Any:
    """The module's name of a class: specbench.cache.paged.PagedCache is paged."""
    return value.split(".")[-2] if isinstance(value, str) and value.startswith("specbench.") else value


def load(name: str, folder: Path) -> list[dict[str, Any]]:
    """One record per finished job: its keys, and the whole result."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*/results.json"))]
    rows = [{"keys": {k: label(at(r, path)) for k, path in KEYS[name].items()}, "result": r} for r in results]
    order = {"eager": 0, "prepacked": 1, "compiled": 2, "cudagraph": 3}
    return sorted(rows, key=lambda row: [order.get(v, v) if isinstance(v, str) else v for v in row["keys"].values()])


def cells(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table, with what is there."""
    r = row["result"]
    low, high = r["speedup"]["ci95"]
    found = dict(row["keys"])
    found |= {"alpha": f"{r['alpha']['mean']:.3f}", "tau": f"{r['block_efficiency']['mean']:.2f}"}
    found |= {name: f"{r['cost'][name]:.3f}" for name in ("c", "v", "o")}
    found["step, ms"] = f"{r['cost']['target_step_seconds'] * 1e3:.2f}"
    found["speedup"] = f"{r['speedup']['measured']:.2f}x ({low:.2f}-{high:.2f})"
    found["measured / corrected"] = f"{r['speedup']['measured'] / r['speedup']['corrected']:.3f}"
    for way in WAYS:
        if rate := r["throughput"].get(f"{way}_tokens_per_second"):
            found[f"{WAYS[way]}, tokens/s"] = f"{rate:.0f}"
    for peer, over in r["speedup_over"].items():
        found[f"over {WAYS[peer]}"] = "{:.2f}x ({:.2f}-{:.2f})".format(over["measured"], *over["ci95"])
    found["share of read peak"] = f"{r['bandwidth']['target_share_of_peak']:.2f}"
    found["recording"] = f"{r['recording']:.1%}"
    found["lossless"] = "yes" if r["lossless"]["passed"] else "FAILED"
    return found


def to_markdown(rows: list[dict[str, Any]]) -> str:
    headings = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(str(row.get(h, "-")) for h in headings) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def bars(rows: list[dict[str, Any]], title: str) -> plt.Figure:
    """Tokens a second by job and way of decoding, each with its multiple of the job's generate()."""
    figure, axes = plt.subplots(figsize=(9, 0.4 + 0.95 * len(rows)), layout="constrained")
    ways = [way for way in WAYS if f"{way}_tokens_per_second" in rows[0]["result"]["throughput"]]
    height = 0.82 / len(ways)
    for place, way in enumerate(ways):
        rates = [row["result"]["throughput"][f"{way}_tokens_per_second"] for row in rows]
        yardstick = [row["result"]["throughput"].get("generate_tokens_per_second") for row in rows]
        y = [i + (place - (len(ways) - 1) / 2) * height for i in range(len(rows))]
        drawn = axes.barh(y, rates, height * 0.92, color=COLOURS[way], label=WAYS[way])
        axes.bar_label(
            drawn, [f"{a:.0f}  ({a / b:.2f}x)" for a, b in zip(rates, yardstick, strict=True)], padding=3, fontsize=8
        )
    names = ["\n".join(f"{key} {value}" for key, value in row["keys"].items()) for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second of decoding (and the multiple of generate() in the same run)")
    axes.margins(x=0.14)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(ways), frameon=False, fontsize=8)
    return figure


def scaling(rows: list[dict[str, Any]], title: str) -> plt.Figure:
    """Total tokens a second by rows."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for gamma in sorted({row["keys"]["gamma"] for row in rows}):
        here = [row for row in rows if row["keys"]["gamma"] == gamma]
        sizes = [row["keys"]["batch"] for row in here]
        rates = [row["result"]["throughput"]["speculative_tokens_per_second"] for row in here]
        axes.plot(sizes, rates, marker="o", label=f"speculative, gamma {gamma}")
    plain = [row["result"]["throughput"]["baseline_tokens_per_second"] for row in here]
    axes.plot(sizes, plain, marker="s", color="grey", label="plain decoding")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(s) for s in sizes])
    axes.set_ylim(0)
    axes.set_xlabel("rows decoded together")
    axes.set_ylabel("tokens per second, all rows")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def different_texts(folder: Path) -> int:
    """How many prompts have an output, speculative or plain, that is not the same in every job."""
    outputs: dict[str, set[str]] = {}
    for path in folder.glob("*/prompts.jsonl"):
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            outputs.setdefault(record["id"], set()).update((record["output"], record["baseline_output"]))
    return sum(len(found) > 1 for found in outputs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=KEYS)
    parser.add_argument("outputs", type=Path)
    args = parser.parse_args()
    rows = load(args.name, args.outputs)
    if not rows:
        parser.error(f"{args.outputs} holds no results.json: run python -m specbench experiment={args.name} first")
    folder = Path(__file__).parent / args.name
    folder.mkdir(exist_ok=True)
    table = [cells(row) for row in rows]
    (folder / "table.md").write_text(to_markdown(table), encoding="utf-8")
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in table for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    first = rows[0]["result"]
    where = first["provenance"]
    title = f"{where['device']}, {where['threads']} threads, commit {(where['git_sha'] or 'unknown')[:7]}"
    figure = scaling(rows, title) if args.name == "batch_scaling" else bars(rows, title)
    figure.savefig(folder / "plot.png", dpi=130)
    print(to_markdown(table))
    if args.name == "batch_scaling":
        print(f"different texts among {len(rows)} jobs, over all prompts: {different_texts(args.outputs)}")


if __name__ == "__main__":
    main()
