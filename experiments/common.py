"""What the makers share: numbers of finished runs, results.csv, table.md, and a README's header.

A folder's `make.py` collects rows of numbers under plain names, and says how to show them. They are written to
results.csv; table.md and figure.png are made from that file alone, so `make.py --stored` makes both again.
"""

import argparse
import csv
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

from specbench.errors import ConfigError
from specbench.results.fields import at
from specbench.results.provenance import provenance
from specbench.results.reader import StoredRun, load_runs
from specbench.results.report.style import INK, style
from specbench.results.wording import word

Row = dict[str, Any]
Columns = Mapping[str, str | Callable[[dict[str, Any]], Any]]  # a path in results.json, or what finds the value
Cell = Callable[[Row], str]
DPI, COLOURS = 110, 32  # of a figure
STORED = ("results.csv", "table.md", "figure.png", "README.md")  # what a maker writes
Table = Mapping[str, Cell]  # by heading


@dataclass(frozen=True)
class Measured:
    """Rows, and where they were measured, as a README's header says it."""

    rows: list[Row]
    machine: str
    commit: str


# What the folders' makers pass to `make`.
Collect = Callable[[list[str]], Measured]
Draw = Callable[[list[Row]], Figure]


def make(script: str, about: str | None, collect: Collect, table: Table, draw: Draw) -> None:
    """A maker's command: writes results.csv, table.md and figure.png beside the script, and the README's header."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", help="a multirun's folder, or settings of a comparison that runs here")
    parser.add_argument("--stored", action="store_true", help="make table.md and figure.png again from results.csv")
    args = parser.parse_args()
    folder = Path(script).resolve().parent
    stored = folder / "results.csv"
    if not args.stored:
        try:
            found = collect(args.inputs)
        except ConfigError as error:
            parser.error(str(error))
        write_rows(stored, found.rows)
        write_header(folder / "README.md", found)
    elif not stored.is_file():
        parser.error(f"{stored} is not there: run the command of the README")
    rows = read_rows(stored)
    shown = to_markdown(rows, table)
    (folder / "table.md").write_text(shown, encoding="utf-8")
    with plt.rc_context(style(INK)):
        figure = draw(rows)
        figure.suptitle(title(folder / "README.md"), x=0.01, ha="left", fontsize=9)
        figure.savefig(folder / "figure.png", dpi=DPI)
    with Image.open(folder / "figure.png") as drawn:  # a fifth of the bytes
        few = drawn.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(folder / "figure.png", optimize=True)
    print(shown)


# Numbers of finished runs


def multirun(columns: Columns, order: Callable[[Row], Any]) -> Collect:
    """Collects a row of these columns from each run in the folders of sweeps and comparisons."""

    def collect(inputs: list[str]) -> Measured:
        results = [run.result for run in load_runs(*map(Path, inputs))]
        rows = [
            {
                name: at(result, source) if isinstance(source, str) else source(result)
                for name, source in columns.items()
            }
            for result in results
        ]
        return measured(sorted(rows, key=order), results)

    return collect


def runs_in(inputs: list[str]) -> list[StoredRun]:
    """The jobs in the one folder that a maker was given. Raises ConfigError."""
    if len(inputs) != 1:
        raise ConfigError("give one folder, the one that the multirun has written: outputs/NAME")
    return load_runs(Path(inputs[0]))


def measured(rows: list[Row], results: Sequence[dict[str, Any]]) -> Measured:
    """Rows, with the machines and commits of the runs that they come from."""
    machines = dict.fromkeys(machine(result["provenance"], result["config"]["dtype"]) for result in results)
    peaks = [peak / 1e9 for r in results if (peak := r["bandwidth"]["measured_peak_bytes_per_second"])]
    read = [f"reads {min(peaks):.1f} to {max(peaks):.1f} GB/s"] if peaks else []
    commits = dict.fromkeys(commit(result["provenance"]) for result in results)
    return Measured(rows, "; ".join([*machines, *read]), ", ".join(commits))


def option(group: str) -> Callable[[dict[str, Any]], str]:
    """The option that a run chose in a group; of results that do not name it, the module of its class."""

    def find(result: dict[str, Any]) -> str:
        named = result.get("choices", {}).get(group)
        return named or result["config"][group]["_target_"].split(".")[-2]

    return find


def lossless(result: dict[str, Any]) -> str:
    """The verdict of a run, in a word."""
    found = word(result["lossless"])
    return {"passed": "yes", "lossy": "by choice not", "failed": "FAILED"}.get(found, found)


def ratio(above: str, below: str) -> Callable[[dict[str, Any]], float | None]:
    """One number of a run over another, where it has both."""

    def find(result: dict[str, Any]) -> float | None:
        a, b = at(result, above), at(result, below)
        return a / b if a is not None and b else None

    return find


ACCEPTED: Columns = {  # of a run, whatever it was made for: no times
    "alpha": "alpha/mean",
    "alpha_stderr": "alpha/stderr",
    "accepted_of_tested": "alpha_counted/mean",
    "on_text": "alpha_on_target_text/mean",
    "on_text_stderr": "alpha_on_target_text/stderr",
    "tau": "block_efficiency/mean",
    "tau_stderr": "block_efficiency/stderr",
    "read_a_round": ratio("counts/verified", "counts/rounds"),
    "lossless": lossless,
}
TIMES: Columns = {
    "c": "cost/c",
    "v": "cost/v",
    "o": "cost/o",
    "target_step_ms": lambda result: (step := at(result, "cost/target_step_seconds")) and step * 1e3,
    "speedup": "speedup/measured",
    "low": "speedup/ci95/0",
    "high": "speedup/ci95/1",
    "theorem_3_8": "speedup/theorem_3_8",
    "tokens_per_second": "throughput/speculative_tokens_per_second",
    "plain_tokens_per_second": "throughput/baseline_tokens_per_second",
}


# Files


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """results.csv: every column that some row has a value in."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*names], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_rows(path: Path) -> list[Row]:
    """results.csv: numbers as numbers, and nothing where there is none."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: _value(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def _value(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def to_markdown(rows: Sequence[Row], table: Table) -> str:
    """The table, without headings that no row has a cell for."""
    cells = [{heading: cell(row) for heading, cell in table.items()} for row in rows]
    headings = [heading for heading in table if any(row[heading] != "-" for row in cells)]
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(row[h] for h in headings) + " |" for row in cells)]) + "\n"


def text(name: str) -> Cell:
    """A word, or a number as short as it is."""
    return lambda row: f"{row[name]:g}" if isinstance(row.get(name), float) else row.get(name, "-")


def number(name: str, form: str = ".2f", unit: str = "") -> Cell:
    """A number in this form."""
    return lambda row: f"{row[name]:{form}}{unit}" if row.get(name) is not None else "-"


def plus_minus(name: str, digits: int) -> Cell:
    """A number and its standard error, where it has one."""

    def cell(row: Row) -> str:
        found = [row[key] for key in (name, f"{name}_stderr") if key in row]
        return " ± ".join(f"{value:.{digits}f}" for value in found) or "-"

    return cell


def interval(name: str, low: str, high: str) -> Cell:
    """A multiple and its 95 % interval, where there were enough prompts for one."""

    def cell(row: Row) -> str:
        found = f" ({row[low]:.2f}-{row[high]:.2f})" if row.get(low) is not None else ""
        return f"{row[name]:.2f}x{found}" if name in row else "-"

    return cell


WITHOUT_TIMES: Table = {
    "T": text("temperature"),
    "alpha": plus_minus("alpha", 3),
    "accepted / tested": number("accepted_of_tested", ".3f"),
    "alpha on the target's text": plus_minus("on_text", 3),
    "tau": plus_minus("tau", 2),
    "target tokens a round": number("read_a_round", ".1f"),
    "lossless": text("lossless"),
}
OF_TIMES: Table = {
    "step, ms": number("target_step_ms"),
    "c": number("c", ".3f"),
    "v": number("v"),
    "o": number("o", ".3f"),
    "Theorem 3.8": number("theorem_3_8", unit="x"),
    "speedup": interval("speedup", "low", "high"),
    "tokens/s": number("tokens_per_second", ".0f"),
    "plain tokens/s": number("plain_tokens_per_second", ".0f"),
}


# Machine and commit: the README's header is the one place that says them


def machine(provenance: dict[str, Any], dtype: str) -> str:
    """A header's `Machine:`."""
    family, threads = provenance.get("cpu_family"), provenance["threads"]
    where = provenance["device"] + (f" ({family})" if family else "")
    versions = [f"{name} {provenance['versions'][name]}" for name in ("torch", "transformers")]
    parts = [where, f"{threads} thread{'s' * (threads > 1)}", f"Python {provenance['versions']['python']}", *versions]
    return ", ".join([*parts, "dtype auto" if dtype == "auto" else dtype])


def commit(provenance: dict[str, Any]) -> str:
    """A header's `Commit:`."""
    return (provenance["git_sha"] or "unknown")[:7] + (" with changes" if provenance["dirty"] else "")


def here() -> dict[str, Any]:
    """Provenance of what a maker measures itself. Stored results, which other makers may have written before it, are no
    changes of the code. Call it before measuring."""
    words = ["git", "-C", str(Path(__file__).parent), "status", "--porcelain"]
    changed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return provenance(torch.device("cpu")) | {"dirty": any(not line.endswith(STORED) for line in changed)}


def write_header(readme: Path, found: Measured) -> None:
    """Puts machine and commit of new numbers into a folder's README and the commit into the list of folders.
    Sentences stay as they are: whoever measured reads them again."""
    folder, index = readme.parent.name, readme.parents[1] / "README.md"
    _replace(readme, r"^(Machine: ).*$", found.machine)
    _replace(readme, r"^(Commit: ).*$", found.commit)
    _replace(index, rf"^(\| \[{folder}\]\(.*\| ).*\|$", f"{found.commit} |")
    print(f"{readme} has this machine and commit now; its sentences are about the numbers before\n")


def _replace(path: Path, pattern: str, by: str) -> None:
    """What follows the pattern's group in the first line that has this form."""
    words = path.read_text(encoding="utf-8")
    path.write_text(re.sub(pattern, lambda found: found[1] + by, words, count=1, flags=re.M), encoding="utf-8")


def title(readme: Path) -> str:
    """What a figure is headed with: machine and commit, as the README has them."""
    header = dict(re.findall(r"^(Machine|Commit): (.*)$", readme.read_text(encoding="utf-8"), re.M))
    return f"{header['Machine'].split(', Python')[0]}, commit {header['Commit']}"
