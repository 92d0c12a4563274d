"""Table and plot of `experiment=drafters` or `experiment=verifiers`.

    python -m specbench experiment=drafters
    python experiments/drafters/table.py drafters outputs/drafters

Writes NAME.md, NAME.csv and NAME.png beside this file, and prints the table.
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

import specbench.models

HERE = Path(__file__).parent
SHIPPED = Path(specbench.models.__file__).parent / "stdlib"
TRAINED = {  # drafter: what was trained for it
    "stdlib_kl": ["drafter_kl"], "stdlib_tv": ["drafter_tv"], "medusa": ["medusa"], "blockwise": ["blockwise"],
    "pass_lookahead": ["lookahead"], "non_autoregressive": ["drafter_lookahead"], "early_exit": ["early_exit"],
}  # fmt: skip


def load(folder: Path) -> list[dict[str, Any]]:
    """One record per finished job, with what was asked of it."""
    rows = []
    for path in sorted(folder.glob("*/results.json")):
        asked = dict(part.split("=", 1) for part in path.parent.name.split(",") if "=" in part)
        rows.append({"asked": asked, "result": json.loads(path.read_text(encoding="utf-8"))})
    return rows


def training(drafter: str) -> str:
    """Tokens and seconds, from the recipe's own record."""
    records = [json.loads((SHIPPED / name / "metrics.json").read_text()) for name in TRAINED.get(drafter, [])]
    return "; ".join(f"{r['training']['tokens'] / 1e6:.1f} M tokens, {r['training']['seconds']:.0f} s" for r in records)


def cells(row: dict[str, Any], key: str) -> dict[str, Any]:
    r, counts = row["result"], row["result"]["counts"]
    low, high = r["speedup"]["ci95"]
    name = row["asked"].get(key, "stdlib")
    predicted = r["speedup"]["theorem_3_8"]
    found = {
        key: name,
        "T": f"{r['config']['temperature']:g}",
        "alpha": f"{r['alpha']['mean']:.3f} ± {r['alpha']['stderr']:.3f}",
        "accepted / tested": f"{r['alpha_counted']['mean']:.3f}",
        "tau": f"{r['block_efficiency']['mean']:.2f} ± {r['block_efficiency']['stderr']:.2f}",
        "target tokens a round": f"{counts['verified'] / counts['rounds']:.1f}",
        "c": f"{r['cost']['c']:.3f}",
        "v": f"{r['cost']['v']:.2f}",
        "o": f"{r['cost']['o']:.2f}",
        "speedup": f"{r['speedup']['measured']:.2f}x ({low:.2f}-{high:.2f})",
        "Theorem 3.8": "-" if predicted is None else f"{predicted:.2f}x",
        "corrected": f"{r['speedup']['corrected']:.2f}x",
        "lossless": ("yes" if r["lossless"]["passed"] else "FAILED") if r["lossless"]["expected"] else "by choice not",
    }
    return found | ({"training": training(name) or "-"} if key == "drafter" else {})


def plot(rows: list[dict[str, Any]], key: str, title: str) -> plt.Figure:
    """Measured speedup with its interval, beside the corrected prediction and Theorem 3.8's."""
    temperatures = sorted({row["result"]["config"]["temperature"] for row in rows})
    figure, panels = plt.subplots(1, len(temperatures), figsize=(5.2 * len(temperatures), 0.9 + 0.33 * len(rows) /
                                  len(temperatures)), layout="constrained", squeeze=False)  # fmt: skip
    for axes, temperature in zip(panels[0], temperatures, strict=True):
        here = [row for row in rows if row["result"]["config"]["temperature"] == temperature]
        here.sort(key=lambda row: row["result"]["speedup"]["measured"])
        y = range(len(here))
        speedups = [row["result"]["speedup"] for row in here]
        measured = [s["measured"] for s in speedups]
        ends = [[s["measured"] - s["ci95"][0] for s in speedups], [s["ci95"][1] - s["measured"] for s in speedups]]
        axes.barh(y, measured, xerr=ends, color="#1b6ca8", ecolor="#333333", height=0.6, label="measured, 95 %")
        axes.plot([s["corrected"] for s in speedups], y, "D", color="#b5651d", ms=5, label="tokens per call / cost")
        axes.plot([s["theorem_3_8"] for s in speedups], y, "o", mfc="none", color="#b5651d", ms=6, label="Theorem 3.8")
        axes.axvline(1, color="#888888", lw=1)
        axes.set_yticks(y, [row["asked"].get(key, "stdlib") for row in here])
        axes.set_xlabel("speedup over plain decoding")
        axes.set_title(f"temperature {temperature:g}", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["drafters", "verifiers"])
    parser.add_argument("outputs", type=Path, help="the multirun's folder")
    args = parser.parse_args()
    key, rows = args.name.removesuffix("s"), load(args.outputs)
    rows.sort(key=lambda row: (row["result"]["config"]["temperature"], -row["result"]["speedup"]["measured"]))
    found = [cells(row, key) for row in rows]
    headings = list(found[0])
    table = "\n".join(["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings),
                       *("| " + " | ".join(row.values()) + " |" for row in found)]) + "\n"  # fmt: skip
    (HERE / f"{args.name}.md").write_text(table, encoding="utf-8")
    with (HERE / f"{args.name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, headings)
        writer.writeheader()
        writer.writerows(found)
    gamma = rows[0]["result"]["config"]["gamma"]
    plot(rows, key, f"Every {key}, gamma {gamma}").savefig(HERE / f"{args.name}.png", dpi=130)
    print(table)


if __name__ == "__main__":
    main()
