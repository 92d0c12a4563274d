"""specbench beside llama.cpp's server, from the run that run.py leaves.

OMP_NUM_THREADS=1 python experiments/server/run.py data.limit=16 executor=prepacked
python experiments/server/make.py outputs/server
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, interval, make, measured, number, runs_in, text
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

OURS = {"speculative": "specbench, speculative", "baseline": "specbench, plain"}
COLOURS = {"specbench": "#3b82c4", "llama_cpp": "#d99b5f"}
TABLE = {
    "way": text("way"),
    "tokens/s": number("tokens_per_second", ".0f"),
    "by its own clock": number("own_tokens_per_second", ".0f"),
    "specbench, speculative, over it": interval("over", "over_low", "over_high"),
    "first token, ms, p50": number("first_token_ms", ".1f"),
    "between rounds, ms, p50": number("p50_ms", ".2f"),
    "p99": number("p99_ms", ".2f"),
    "alpha, accepted / tested": number("alpha", ".3f"),
    "accepted / drafted": number("draft_acceptance_rate", ".3f"),
    "block efficiency": number("block_efficiency"),
    "texts equal": text("texts"),
}


def collect(inputs: list[str]) -> Measured:
    """A row for each of our ways of decoding and each server. Raises ConfigError."""
    results = [run.result for run in runs_in(inputs)]
    return measured([row for result in results for row in rows_of(result)], results)


def rows_of(result: dict) -> list[Row]:
    """The rows of a run, with those numbers that there are."""
    rows: list[Row] = []
    for way, name in OURS.items():
        rate = result["throughput"][f"{way}_tokens_per_second"]
        rows.append({"way": name, "engine": "specbench", "tokens_per_second": rate, **waits(result["latency"][way])})
    rows[0] |= {
        "alpha": result["alpha_counted"]["mean"],
        "draft_acceptance_rate": result["draft_acceptance_rate"],
        "block_efficiency": result["block_efficiency"]["mean"],
    }
    for peer, found in result["servers"].items():
        over, texts = result["speedup_over"][peer], found["texts"]
        low, high = over["ci95"] or (None, None)
        rows.append(
            {
                "way": f"{found['dialect']} {found['version']}, {peer.removeprefix('server_')}",
                "engine": found["dialect"],
                "tokens_per_second": result["throughput"][f"{peer}_tokens_per_second"],
                "own_tokens_per_second": found["own_tokens_per_second"],
                "over": over["measured"],
                "over_low": low,
                "over_high": high,
                **waits(found["latency"]),
                "alpha": found["alpha"]["mean"],
                "draft_acceptance_rate": found["draft_acceptance_rate"],
                "block_efficiency": found["block_efficiency"]["mean"],
                "texts": f"{texts['equal']} of {texts['compared']}",
            }
        )
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def waits(latency: dict) -> Row:
    """Milliseconds until the first token, and between rounds."""
    first, gaps = latency["first_token"], latency["inter_token"]
    found = {"first_token_ms": first["p50"], "p50_ms": gaps["p50"], "p99_ms": gaps["p99"]}
    return {name: None if value is None else value * 1e3 for name, value in found.items()}


def draw(rows: list[Row]) -> Figure:
    """Tokens a second of every way."""
    figure, axes = plt.subplots(figsize=(7, 1 + 0.45 * len(rows)))
    rates = [row["tokens_per_second"] for row in rows]
    bars = axes.barh([row["way"] for row in rows], rates, color=[COLOURS[row["engine"]] for row in rows])
    axes.bar_label(bars, [f"{rate:.0f}" for rate in rates], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("tokens per second of decoding, as the client sees them")
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
