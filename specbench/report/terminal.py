"""What a command prints: the answer of a run in a few lines, tables of sweeps and comparisons, and progress."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from specbench.errors import visible
from specbench.report.tables import TEXT_COLUMNS, bandwidth_share, mean, number, ratio, verdict

WIDTH = 140  # characters, where the output is not a terminal


def show(content: Table | str, style: str = "") -> None:
    """Prints a table or a text, which reaches the terminal without control characters."""
    wide = None if "COLUMNS" in os.environ or Console().is_terminal else WIDTH
    console = Console(markup=False, emoji=False, highlight=False, width=wide)
    console.print(visible(content) if isinstance(content, str) else content, style=style)


def headline(results: Mapping[str, Any]) -> str:
    """One sentence: whether speculative decoding was faster, with the interval, and how good plain decoding was."""
    speedup = results["speedup"]
    measured, interval = speedup["measured"], speedup["ci95"]
    if measured is None:
        return "No speedup was measured"
    share = bandwidth_share(results)
    plain = "plain decoding" + (f" at {share} of the measured bandwidth" if share else "")
    if interval is None:
        return f"{ratio(measured, None)} the speed of {plain}, from too few prompts for an interval"
    if interval[0] > 1:
        return f"Faster than {plain}: {ratio(measured, interval)}"
    if interval[1] < 1:
        return f"Slower than {plain}: {ratio(measured, interval)}"
    return f"Not shown to be faster or slower than {plain}: {ratio(measured, interval)}"


def verdict_and_prediction(results: Mapping[str, Any]) -> str:
    """What stands beside the speedup: Theorem 3.8's prediction and whether the output distribution is the target's."""
    predicted = results["speedup"]["theorem_3_8"]
    theorem = f"Theorem 3.8 predicts {ratio(predicted, None)}" if predicted else "Theorem 3.8 predicts nothing here"
    return f"{theorem}; lossless: {verdict_with_reason(results['lossless'])}"


def verdict_with_reason(lossless: Mapping[str, Any]) -> str:
    """The verdict in a word or two, and why."""
    return verdict(lossless) + (f" ({lossless['reason']})" if lossless["reason"] else "")


def summary(results: Mapping[str, Any], folder: Path) -> None:
    """Prints the answer of a run: at most twelve lines."""
    cost, speedup = results["cost"], results["speedup"]
    peers = [f"{ratio(own['measured'], own['ci95'])} over {name}" for name, own in results["speedup_over"].items()]
    rates = results["throughput"]
    lines = {
        "alpha": f"{mean(results['alpha'])}   block efficiency {mean(results['block_efficiency'])} tokens per call",
        "costs": f"c {number(cost['c'])}   v {number(cost['v'])}   o {number(cost['o'])}   in target steps of "
        f"{number(1e3 * (cost['target_step_seconds'] or 0))} ms",
        "Theorem 3.8": f"{ratio(speedup['theorem_3_8'], None)} predicted, {ratio(speedup['measured'], None)} measured, "
        f"{ratio(speedup['end_to_end'], speedup['end_to_end_ci95'])} with prefill",
        "tokens/s": f"{number(rates.get('speculative_tokens_per_second'))}, plain decoding "
        f"{number(rates.get('baseline_tokens_per_second'))}",
        "lossless": verdict_with_reason(results["lossless"]),
    }
    if peers:
        lines["peers"] = ", ".join(peers)
    show(headline(results), "bold")
    for name, line in lines.items():
        show(f"  {name:12} {line}")
    for note in results["notes"][:3]:
        show(f"  note         {note}", "dim")
    show(f"  files        {folder}", "dim")


def one_line(results: Mapping[str, Any]) -> str:
    """The results of a job of a sweep in a few words."""
    speedup = results["speedup"]
    sentence = f"{ratio(speedup['measured'], speedup['ci95'])}, alpha {mean(results['alpha'])}"
    found = verdict(results["lossless"])
    return sentence if found == "passed" else f"{sentence}, lossless: {found}"


def table(frame: Any) -> Table:
    """A DataFrame for the terminal."""
    found = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for head in frame.columns:
        side: JustifyMethod = "left" if head in TEXT_COLUMNS else "right"
        found.add_column(Text(visible(str(head)).replace(" ", "\n")), justify=side, no_wrap=head not in TEXT_COLUMNS)
    for row in frame.itertuples(index=False):
        found.add_row(*(Text(visible(str(cell))) for cell in row))
    return found


def answer(sentence: str, frame: Any, folder: Path) -> None:
    """Prints the answer of several runs: a sentence, their table, and where the files are."""
    show(sentence, "bold")
    show(table(frame))
    show(f"files: {folder}", "dim")


def compared_headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """The fastest method, whether it gains on plain decoding, and from which methods it is not distinguished."""
    first = rows[0]
    alike = [row["method"] for row in rows[1:] if row["rank"] == 1]
    gain = f"{ratio(first['speedup'], first['speedup_ci95'])} over plain decoding"
    sentence = f"{first['method']} is the fastest of {len(rows)}: {gain}"
    if first["speedup_ci95"] is None or first["speedup_ci95"][0] <= 1:
        sentence = f"No method is shown to gain; the fastest of {len(rows)} is {first['method']}: {gain}"
    return sentence + (f"; not distinguished from {', '.join(alike)}" if alike else "")


@contextmanager
def progress(place: str = "") -> Iterator[Callable[[int, int | None, str], None]]:
    """A bar of prompts while a terminal shows it: what is yielded takes how many are done, how many there are, and what
    is going on. `place` says of which job."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(f"{place}loading", total=None)

        def report(done: int, total: int | None, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{place}{what}")

        yield report
