"""Readable tables for the terminal: one run, and the jobs of a multirun."""

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

COLUMNS = {  # of a multirun's table: heading, path in results.json
    "alpha": "alpha/mean",
    "stderr": "alpha/stderr",
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
    "plain tokens/s": "throughput/baseline_tokens_per_second",
    "of peak": "bandwidth/target_share_of_peak",
    "lossless": "lossless/verdict",
}
OVER = "over "  # a peer: how much faster speculative decoding is
ENGINE = ("tokens/s", "plain tokens/s", "of peak")
TWO_DIGITS = ("speedup", "Thm 3.8", "corrected", "of peak")
ONE_DIGIT = ("tokens/s", "plain tokens/s")
WIDTH = 140  # characters, where the output is not a terminal


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
        f"\n{_path(result, 'drafter')} drafts for {_path(result, 'target')}\n"
        f"{_policy(result)}, temperature {config['temperature']:g}, "
        f"lenience {config['lenience']:g}, batch {config['batch_size']}"
    )
    table = Table(title=title, title_style="bold", header_style="dim", title_justify="left",
                  box=SIMPLE_HEAD)  # fmt: skip
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("")
    alpha, counted = result["alpha"], result["alpha_counted"]
    table.add_row("alpha (mean beta)", _pm(alpha), f"over {counts['tested']:,} tested guesses")
    table.add_row("alpha (accepted / tested)", _pm(counted), "cross-check")
    own_text = result["alpha_on_target_text"]
    if own_text["mean"] is not None:
        table.add_row("alpha (target's own text)", _pm(own_text), f"over {own_text['n']:,} positions of plain decoding")
    table.add_row("block efficiency", _pm(result["block_efficiency"]), "tokens per target call")
    step = cost["target_step_seconds"] * 1e3
    table.add_row("c", _number(cost["c"], 3), f"drafter step / target step of {step:.2f} ms")
    table.add_row("v", _number(cost["v"], 3), "verify call / target step; 3.8 assumes 1")
    table.add_row("o", _number(cost["o"], 3), "rest of a round / target step; 3.8 assumes 0")
    table.add_section()
    low, high = speedup["ci95"]
    table.add_row("speedup", f"{speedup['measured']:.2f}x", f"95 % interval {low:.2f} to {high:.2f}")
    table.add_row("  predicted, Theorem 3.8", _times(speedup["theorem_3_8"]), "from alpha, gamma and c")
    table.add_row("  predicted, corrected", _times(speedup["corrected"]), "from tokens per call, c, v and o")
    table.add_row("  end to end", f"{speedup['end_to_end']:.2f}x", "with prefill")
    ours, baseline = (result["throughput"][f"{who}_tokens_per_second"] for who in ("speculative", "baseline"))
    table.add_row("tokens/s", f"{ours:.1f}", f"autoregressive {baseline:.1f}")
    for peer, over in result["speedup_over"].items():
        low, high = over["ci95"]
        theirs = result["throughput"][f"{peer}_tokens_per_second"]
        told = f"95 % interval {low:.2f} to {high:.2f}; {theirs:.1f} tokens/s"
        table.add_row(f"  over {peer}", f"{over['measured']:.2f}x", told)
    rate, peak = (result["bandwidth"][f"{name}_bytes_per_second"] / 1e9 for name in ("target", "measured_peak"))
    table.add_row("GB/s read", f"{rate:.1f}", f"by a target step; {rate / peak:.0%} of {peak:.1f} measured")
    if result["operations_factor"] is not None:
        table.add_row("operations", _times(result["operations_factor"]), "of plain decoding's (Theorem 3.11)")
    gamma = result["optimal_gamma"]
    table.add_row("gamma*", "-" if gamma is None else str(gamma), "best by Theorem 3.8, this alpha and c")
    drift = result["drift"]
    if not result["lossless"]["expected"] and drift["tv"] is not None:
        table.add_row("drift (total variation)", f"{drift['tv']:.3f}", f"a tested position; KL {drift['kl']:.3f} nats")
    for way, latency in result["latency"].items():
        for what, seconds in latency.items():
            told = f"{what.replace('_', ' ')}, {way}; p90 {seconds['p90']:.3f}, p99 {seconds['p99']:.3f}"
            table.add_row("seconds (p50)", f"{seconds['p50']:.3f}", told)
    if sweep := result["gamma_sweep"]:
        best = max(sweep, key=lambda entry: entry["speedup"])
        regret = "" if result["regret"] is None else f"; {result['regret']:.1%} more than gamma {result['gamma']}"
        table.add_row("gamma, best by replay", str(best["gamma"]), f"expected {best['speedup']:.2f}x{regret}")
    for name, numbers in result["metrics"].items():
        for what, value in numbers.items():
            table.add_row(name, _number(value, 3), what.replace("_", " "))
    lines: list[Any] = [table]
    if speedup["accounting"]:
        lines.append(Text(account(result)))
    sentence, style = verdict(result["lossless"])
    lines.append(Text("lossless: ", style="bold").append(sentence, style=style))
    if speedup["measured"] < 1:
        lines.append(Text("speculative decoding was slower than plain decoding here", style="yellow"))
    notes = list(result["notes"])
    for key, what in (("too_long", "prompts do not fit the context"), ("failed", "prompts failed")):
        notes += [f"{counts[key]} {what}"] if counts[key] else []
    if result["status"] != "complete":
        notes.append(f"{result['status']}: these are the prompts that were finished")
    lines += [Text(f"note: {note}", style="yellow") for note in notes]
    lines.append(Text(f"{counts['prompts']} prompts, {counts['tokens']:,} tokens; written to", style="dim"))
    lines.append(Text(str(out_dir), style="dim", overflow="fold"))
    return Group(*lines)


def account(result: dict[str, Any]) -> str:
    """The accounting as a sentence whose numbers multiply to the measured speedup."""
    factors = {name: entry["factor"] for name, entry in result["speedup"]["accounting"].items()}
    counts, cost = result["counts"], result["cost"]
    tokens = counts["verified"] / counts["rounds"]
    return (
        f"3.8 says {factors['theorem_3_8']:.2f}x; betas are not i.i.d. x{factors['not_iid']:.2f}; verifying "
        f"{tokens:.1f} tokens costs {cost['v']:.2f} steps x{factors['verify']:.2f}; overhead "
        f"x{factors['overhead']:.2f} -> {result['speedup']['measured']:.2f}x measured"
    )


def multirun_rows(jobs: Sequence[tuple[list[str], dict[str, Any] | None]]) -> list[dict[str, Any]]:
    """One row per job: the overrides in which jobs differ, then the columns; a job without result
    has none of those."""
    common = set.intersection(*(set(overrides) for overrides, _ in jobs)) if len(jobs) > 1 else set()
    rows = []
    for overrides, result in jobs:
        row: dict[str, Any] = dict(entry.split("=", 1) for entry in overrides if entry not in common)
        if result is not None:
            result["lossless"]["verdict"] = _word(result["lossless"])
            row |= {heading: at(result, path) for heading, path in COLUMNS.items()}
            row |= {f"{OVER}{peer}": over["measured"] for peer, over in result["speedup_over"].items()}
        else:
            row["lossless"] = "no result"
        rows.append(row)
    return rows


def multirun_tables(rows: Sequence[dict[str, Any]], title: str) -> list[Table]:
    """The rows for a terminal: the interval in one column, without the standard errors. Where
    peers were run, the engines have a table of their own, since both in one would not fit."""
    shown = [_for_terminal(row) for row in rows]
    headings = list(dict.fromkeys(key for row in shown for key, cell in row.items() if cell != "-"))
    peers = [heading for heading in headings if heading.startswith(OVER)]
    if not peers:
        return [_grid(shown, headings, title)]
    engine = [heading for heading in ENGINE if heading in headings] + peers
    named = [heading for heading in headings if heading not in (*COLUMNS, *engine, "95 %")]
    return [
        _grid(shown, [heading for heading in headings if heading not in engine], title),
        _grid(shown, named + engine, "engines, tokens per second"),
    ]


def _grid(rows: Sequence[dict[str, str]], headings: Sequence[str], title: str) -> Table:
    table = Table(title=title, title_style="bold", title_justify="left", header_style="dim", box=SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for heading in headings:
        name = heading.replace(" ", "\n") if heading != "95 %" else heading
        table.add_column(name, justify="right", vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(*(row.get(heading, "-") for heading in headings))
    return table


def _for_terminal(row: dict[str, Any]) -> dict[str, str]:
    cells = {}
    for heading, value in row.items():
        if heading == "low":
            cells["95 %"] = f"{value:.2f}-{row['high']:.2f}"
        elif heading not in ("high", "stderr"):
            two = heading in TWO_DIGITS or heading.startswith(OVER)
            digits = 1 if heading in ONE_DIGIT else 2 if two else 3
            cells[heading] = _number(value, digits) if isinstance(value, float | None) else str(value)
    return cells


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV, with a column for every key that some row has."""
    text = StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def show(*renderables: Any) -> None:
    """Prints to the terminal, or as wide as `WIDTH` where the output is none."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for renderable in renderables:
        console.print(renderable)


def _word(lossless: dict[str, Any]) -> str:
    if not lossless["expected"]:
        return "no"
    return "yes" if lossless["passed"] else "FAILED"


def at(tree: Any, path: str) -> Any:
    """The value at a path like "speedup/ci95/0", or None where there is none."""
    for key in path.split("/"):
        tree = tree[int(key)] if isinstance(tree, list) else tree.get(key)
        if tree is None:
            return None
    return tree


def _policy(result: dict[str, Any]) -> str:
    if result["gamma"] is not None:
        return f"gamma {result['gamma']}"
    policy = result["choices"].get("gamma_policy", "a policy")
    return f"gamma by {policy}"


def _path(result: dict[str, Any], role: str) -> str:
    """The checkpoint, or where there is none the option that was chosen."""
    return str(result["config"][role].get("path") or result["choices"][role])


def _pm(estimate: dict[str, Any]) -> str:
    if estimate["mean"] is None:
        return "-"
    error = "" if estimate["stderr"] is None else f" +- {estimate['stderr']:.3f}"
    return f"{estimate['mean']:.3f}{error}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
