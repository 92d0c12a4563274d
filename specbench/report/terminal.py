"""What a command prints: the answer of a run in a few lines, tables of sweeps and comparisons, and progress."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from specbench.errors import visible
from specbench.report.tables import TEXT_COLUMNS, bandwidth_share, mean, number, ratio, unchanged, verdict

WIDTH = 140  # characters, where the output is not a terminal
WIDEST_TEXT = 24  # characters of a text in a table, beyond which it is wrapped
BETWEEN = 2  # characters between two columns
ALWAYS = ("speedup", "claimed", "here", "mean")  # columns of numbers that no terminal is too narrow for


def show(content: Table | str, style: str = "") -> None:
    """Prints a table or a text, which reaches the terminal without control characters."""
    console().print(visible(content) if isinstance(content, str) else content, style=style)


def console() -> Console:
    """The terminal, or what its output goes to."""
    wide = None if "COLUMNS" in os.environ or Console().is_terminal else WIDTH
    return Console(markup=False, emoji=False, highlight=False, width=wide)


def headline(results: Mapping[str, Any]) -> str:
    """The answer of a run in one sentence, and how good plain decoding was."""
    return speedup_sentence(results) + baseline_strength(results)


def baseline_strength(results: Mapping[str, Any]) -> str:
    """What stands behind a speedup: plain decoding's share of the measured bandwidth; empty if it is not known."""
    share = bandwidth_share(results)
    return f"; plain decoding at {share} of bandwidth" if share else ""


def speedup_sentence(results: Mapping[str, Any]) -> str:
    """Whether speculative decoding was faster, with the interval, and whether the text is another one by choice."""
    measured, interval = results["speedup"]["measured"], results["speedup"]["ci95"]
    lossy = "" if results["lossless"]["expected"] else ", lossy by choice"
    lossy = ", but lossless failed" if results["lossless"]["passed"] is False else lossy
    if measured is None:
        return f"No speedup was measured{lossy}"
    if interval is None:
        return f"{ratio(measured, None)} the speed of plain decoding, too few prompts for an interval{lossy}"
    what = "Faster than" if interval[0] > 1 else "Slower than" if interval[1] < 1 else "Not shown to differ from"
    return f"{what} plain decoding: {ratio(measured, interval)}{lossy}"


def verdict_with_reason(results: Mapping[str, Any]) -> str:
    """The verdict in a word or two, and what it means or why it is."""
    lossless = results["lossless"]
    why = lossless["reason"] or (unchanged(results) if lossless["expected"] and lossless["passed"] else "")
    return verdict(lossless) + (f" ({why})" if why else "")


def what_ran(results: Mapping[str, Any]) -> str:
    """The drafter, the target and the settings that a result depends on most."""
    config, choices = results["config"], results["details"]["choices"]
    path, policy = config["drafter"].get("path"), choices["gamma_policy"]
    drafter = choices["drafter"] + (f" ({path})" if path else "")
    gamma = f"gamma {config['gamma']}" + ("" if policy == "fixed" else f" ({policy})")
    prompts = f"{results['counts']['prompts']} prompts"
    return f"{drafter} drafts for {config['target']['path']}, {gamma}, temperature {config['temperature']}, {prompts}"


def summary(results: Mapping[str, Any], folder: Path) -> None:
    """Prints the answer of a run: at most twelve lines."""
    cost, speedup = results["cost"], results["speedup"]
    peers = [f"{ratio(own['measured'], own['ci95'])} over {name}" for name, own in results["speedup_over"].items()]
    rates = results["throughput"]
    lines = {
        "run": what_ran(results),
        "alpha": f"{mean(results['alpha'])}   block efficiency {mean(results['block_efficiency'])} tokens per call",
        "costs": f"c {number(cost['c'])}   v {number(cost['v'])}   o {number(cost['o'])}   in target steps of "
        f"{number(1e3 * (cost['target_step_seconds'] or 0))} ms",
        "Theorem 3.8": f"{ratio(speedup['theorem_3_8'], None)} predicted, {ratio(speedup['measured'], None)} measured, "
        f"{ratio(speedup['end_to_end'], speedup['end_to_end_ci95'])} with prefill",
        "tokens/s": f"{number(rates.get('speculative_tokens_per_second'))}, plain decoding "
        f"{number(rates.get('baseline_tokens_per_second'))}",
        "lossless": verdict_with_reason(results),
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
    """A DataFrame for the terminal. On a narrow one the last columns of numbers are left out, which the page has."""
    cells = frame.map(lambda cell: visible(str(cell)))
    widths = {head: max([*map(len, str(head).split()), *map(len, cells[head])]) for head in frame.columns}
    widths |= {head: min(widths[head], WIDEST_TEXT) for head in widths if head in TEXT_COLUMNS}
    while sum(widths.values()) + BETWEEN * len(widths) > console().width and widths.keys() - {*TEXT_COLUMNS, *ALWAYS}:
        del widths[next(head for head in reversed(widths) if head not in TEXT_COLUMNS and head not in ALWAYS)]
    found = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for head, width in widths.items():
        text = head in TEXT_COLUMNS
        side: JustifyMethod = "left" if text else "right"
        heading = Text(visible(str(head)).replace(" ", "\n"))
        found.add_column(heading, justify=side, no_wrap=not text, min_width=width)
    for row in cells[[*widths]].itertuples(index=False):
        found.add_row(*map(Text, row))
    return found


@contextmanager
def progress(place: str = "") -> Iterator[Callable[[int, int | None, str], None]]:
    """A bar of prompts on a terminal: what is yielded takes how many are done, how many there are, and what goes on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(f"{place}loading", total=None)

        def report(done: int, total: int | None, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{place}{what}")

        yield report
