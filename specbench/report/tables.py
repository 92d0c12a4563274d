"""Readable tables for the terminal: one run, and the jobs of a multirun."""

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

COLUMNS = {  # of a multirun's table: heading, path in results.json
    "alpha": "alpha/mean",
    "+-": "alpha/stderr",
    "tau": "block_efficiency/mean",
    "c": "cost/c",
    "v": "cost/v",
    "o": "cost/o",
    "speedup": "speedup/measured",
    "low": "speedup/ci95/0",
    "high": "speedup/ci95/1",
    "Thm 3.8": "speedup/theorem_3_8",
    "corrected": "speedup/corrected",
    "tokens/s": "throughput/speculative_tokens_per_second",
    "lossless": "lossless/verdict",
}


def verdict(lossless: dict[str, Any]) -> tuple[str, str]:
    """(sentence, colour) for the losslessness gate of a result."""
    if lossless["method"] == "token_equality":
        detail = lossless["detail"]
        told = f"{detail['equal']} of {detail['requests']} outputs equal the baseline's, token by token"
        if detail["ties"]:
            told += f"; {detail['ties']} differ first at a tie of the two best logits"
    else:
        told = f"largest |z| {lossless['statistic']:.2f}, limit {lossless['threshold']:g}"
    if not lossless["expected"]:
        return f"not lossless by choice ({told})", "yellow"
    return (f"passed: {told}", "green") if lossless["passed"] else (f"FAILED: {told}", "bold red")


def run_table(result: dict[str, Any], out_dir: Path) -> Group:
    """What one run found: prediction beside measurement, and the verdict."""
    config, cost, speedup = result["config"], result["cost"], result["speedup"]
    counts = result["counts"]
    title = (
        f"{_path(config['drafter'])} drafts for {_path(config['target'])}: gamma {config['gamma']}, "
        f"temperature {config['temperature']:g}, lenience {config['lenience']:g}, batch {config['batch_size']}"
    )
    table = Table(title=title, title_style="bold", show_header=True, header_style="dim", title_justify="left")
    for heading, justify in (("", "left"), ("measured", "right"), ("", "left")):
        table.add_column(heading, justify=justify)
    alpha, counted = result["alpha"], result["alpha_counted"]
    table.add_row("alpha (mean beta)", _pm(alpha), f"over {counts['tested']:,} tested guesses")
    table.add_row("alpha (accepted / tested)", _pm(counted), "cross-check")
    table.add_row("block efficiency", _pm(result["block_efficiency"]), "tokens per target call")
    step = cost["target_step_seconds"] * 1e3
    table.add_row("c", _number(cost["c"], 3), f"drafter step / target step ({step:.2f} ms)")
    table.add_row("v", _number(cost["v"], 3), "verify call / target step (Theorem 3.8 assumes 1)")
    table.add_row("o", _number(cost["o"], 3), "rest of a round / target step (Theorem 3.8 assumes 0)")
    table.add_section()
    low, high = speedup["ci95"]
    table.add_row("speedup", f"{speedup['measured']:.2f}x", f"95 % interval {low:.2f} to {high:.2f}")
    table.add_row("  predicted, Theorem 3.8", _times(speedup["theorem_3_8"]), "from alpha, gamma and c")
    table.add_row("  predicted, corrected", _times(speedup["corrected"]), "from block efficiency, c, v and o")
    table.add_row("  end to end", f"{speedup['end_to_end']:.2f}x", "with prefill")
    ours, baseline = (result["throughput"][f"{who}_tokens_per_second"] for who in ("speculative", "baseline"))
    table.add_row("tokens/s", f"{ours:.1f}", f"autoregressive {baseline:.1f}")
    table.add_row("operations", _times(result["operations_factor"]), "of autoregressive decoding (Theorem 3.11)")
    gamma = result["optimal_gamma"]
    table.add_row("gamma*", "-" if gamma is None else str(gamma), "best by Theorem 3.8 for this alpha and c")
    lines: list[Any] = [table]
    sentence, style = verdict(result["lossless"])
    lines.append(Text("lossless: ", style="bold").append(sentence, style=style))
    if speedup["measured"] < 1:
        lines.append(Text("speculative decoding was slower than plain decoding here", style="yellow"))
    left_out = [f"{counts[key]} {what}" for key, what in
                (("too_long", "prompts do not fit the context"), ("failed", "prompts failed")) if counts[key]]  # fmt: skip
    for warning in [*result["notes"], *left_out, *([result["status"]] if result["status"] != "complete" else [])]:
        lines.append(Text(f"note: {warning}", style="yellow"))
    lines.append(Text(f"{counts['prompts']} prompts, {counts['tokens']:,} tokens; written to {out_dir}", style="dim"))
    return Group(*lines)


def multirun_rows(jobs: Sequence[tuple[list[str], dict[str, Any] | None]]) -> list[dict[str, Any]]:
    """One row per job: the overrides in which jobs differ, then the columns; a job without result
    has none of those."""
    common = set.intersection(*(set(overrides) for overrides, _ in jobs)) if len(jobs) > 1 else set()
    rows = []
    for overrides, result in jobs:
        row: dict[str, Any] = dict(entry.split("=", 1) for entry in overrides if entry not in common)
        if result is not None:
            result["lossless"]["verdict"] = _word(result["lossless"])
            row |= {heading: _at(result, path) for heading, path in COLUMNS.items()}
        else:
            row["lossless"] = "no result"
        rows.append(row)
    return rows


def multirun_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_style="bold", title_justify="left", header_style="dim")
    headings = list(dict.fromkeys(key for row in rows for key in row))
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(_number(row.get(h), 3) if isinstance(row.get(h), float) else str(row.get(h) if row.get(h)
                        is not None else "-") for h in headings))  # fmt: skip
    return table


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    text = StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def show(*renderables: Any) -> None:
    console = Console()
    for renderable in renderables:
        console.print(renderable)


def show_error(sentence: str) -> None:
    Console(stderr=True).print(Panel.fit(Text(sentence), title="specbench", border_style="red"))


def _word(lossless: dict[str, Any]) -> str:
    if not lossless["expected"]:
        return "no"
    return "yes" if lossless["passed"] else "FAILED"


def _at(tree: Any, path: str) -> Any:
    for key in path.split("/"):
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    return tree


def _path(node: dict[str, Any]) -> str:
    return str(node.get("path") or node["_target_"].rsplit(".", 1)[-1].removesuffix("Drafter").lower())


def _pm(estimate: dict[str, Any]) -> str:
    if estimate["mean"] is None:
        return "-"
    error = "" if estimate["stderr"] is None else f" +- {estimate['stderr']:.3f}"
    return f"{estimate['mean']:.3f}{error}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
