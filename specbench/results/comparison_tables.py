"""A comparison in words and tables: who is fastest, by how much, and why. It is read as comparison.json holds it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specbench.results.fields import CAUSES, UNITS
from specbench.results.table import Cell, CellValue, Column, Table, table_columns
from specbench.results.wording import (
    MOST_NAMES,
    WayNumbers,
    doubts,
    label,
    left_out,
    needs,
    no_gain,
    none_left,
    p_value,
    slower,
    word,
)
from specbench.stats.comparison import LEVEL, Comparison
from specbench.stats.estimates import Interval

MOST_PAIRS = 300  # in a table
NUMBERS = {"speedup": ("speedup", 2), "alpha": ("alpha", 3), "alpha_on_target_text": ("on text", 3),
           "tau": ("block efficiency", 2), "c": ("c", 3), "v": ("v", 2), "o": ("o", 2)}  # fmt: skip
ComparisonDict = Mapping[str, Any]  # one entry of comparison.json; for `ranking` with the `result` of each of its runs
KeysByLabel = Mapping[str, Mapping[str, str | Cell]]  # by label, what tells the run from the others


def ranking(found: ComparisonDict) -> str:
    """Which way is fastest, or that none gains, in a sentence; ways that failed the losslessness test are counted and
    not ranked, and none is where ways did not run alike."""
    results = [run["result"] for run in found["runs"]]
    where = f"At {label(found['task'])}: " if found["task"] else ""
    ranked = [run for run in found["runs"] if word(run["result"]["lossless"]) != "failed"]
    if not ranked:
        return f"{where}{none_left(len(results), 'ways')}."
    (first, *others), failed = ranked, left_out(len(results) - len(ranked))
    numbers = ((run["label"], run["numbers"]["speedup"], run["ci95"].get("speedup"), run["result"]) for run in ranked)
    ways = [WayNumbers(*own, found["clusters"]) for own in numbers]
    of, best = f"{len(ranked)} way{'s' * (len(ranked) > 1)}{failed}", ways[0]
    if found.get("unlike"):
        return f"{where}No way is ranked: {found['unlike']}{doubts(results, first['result'])}."
    if told := no_gain(ways):
        told += failed
    elif not was_tested(found):
        told = f"Too few prompts to say which of {of} is the fastest; {best.name} measured {best.measured}"
    else:
        told = f"{best.name} is the fastest of {of}: {best.measured}"
    if was_tested(found) and (ties := [run["label"] for run in others if run["rank"] <= first["rank"]]):
        names = ", ".join(ties) if len(ties) <= MOST_NAMES else f"{len(ties)} others"
        told += f"; not told apart from {names}"
    return f"{where}{told}{slower(ways)}{doubts(results, first['result'])}."


def was_tested(found: ComparisonDict) -> bool:
    """Whether there were enough prompts for tests of the differences."""
    return any(pair["p_value"] is not None for pair in found["pairs"])


def about(found: ComparisonDict) -> str:
    """What was compared, how it was tested, and what is ranked."""
    tests = f", {len(found['pairs'])} tests corrected by Holm's method" if len(found["pairs"]) > 1 else ""
    first = max(found["runs"], key=lambda run: run["numbers"]["speedup"])
    needed = needs(first["ci95"].get("speedup"), found["requests"], found["clusters"])
    told = f"{found['requests']} requests, {found['clusters']} clusters{tests}; by {UNITS[found['by']]}"
    return f"{told}; {needed} ({first['label']})" if needed else told


def tables(compared: Comparison, names: KeysByLabel, title: str) -> list[Table]:
    """The ranking, and the causes of the distances, for a terminal."""
    found, reference = asdict(compared), compared.reference
    few = "" if compared.runs[0].ci95["speedup"] else "; too few prompts for intervals and tests"
    fastest = reference == compared.runs[0].label and not compared.unlike
    first = ranking_table(found, names, f"of {'the fastest' if fastest else reference}")
    first.title = f"{title}{about(found)}{few}"
    why = causes_table(found, names)
    why.title = f"factors that make up the distance from {reference}"
    return [first, why] if len(why.columns) > why.names + 1 else [first]


def _keys(names: KeysByLabel) -> list[str]:
    """The keys in which the runs differ."""
    return list(dict.fromkeys(key for own in names.values() for key in own))


def ranking_table(found: ComparisonDict, names: KeysByLabel, against: str) -> Table:
    """A row for each run, fastest first; `against` is the heading of its ratio to the reference."""
    keys, tested = _keys(names), was_tested(found)
    columns = table_columns(*((key, "text") for key in ("rank", *keys)), ("tokens/s", 1), (against, 3))
    columns += [Column("95 %", digits=3, ends=True), *table_columns(("p", "text"), *NUMBERS.values())]
    rows: list[list[CellValue]] = []
    for run in found["runs"]:
        own, n = names[run["label"]], run["numbers"]
        rows.append([
            str(run["rank"]) if tested else "-", *(own.get(key) for key in keys), n["tokens_per_second"], run["ratio"],
            run["ratio_ci95"], p_value(run["p_value"]), *(n[name] for name in NUMBERS),
        ])  # fmt: skip
    return Table("", columns, rows, names=1 + len(keys))


def causes_table(found: ComparisonDict, names: KeysByLabel, marked: bool = False) -> Table:
    """The factors of each run's ratio to the reference, without those that are 1.00 for every run. With `marked`, a
    star marks those whose interval excludes 1."""
    others, keys = [run for run in found["runs"] if run["causes"]], _keys(names)
    shown = [name for name in CAUSES if any(abs(run["causes"].get(name, 1.0) - 1) >= 0.005 for run in others)]
    told = [f"factor of {CAUSES[name]}" if CAUSES[name] in keys else CAUSES[name] for name in shown]
    columns = table_columns(*((key, "text") for key in keys), ("ratio", 3), *((head, "text") for head in told))
    rows: list[list[CellValue]] = []
    for run in others:
        stars = {name: "*" * (marked and excludes_1(run["causes_ci95"].get(name))) for name in shown}
        factors = (f"x{run['causes'].get(name, 1.0):.2f}{stars[name]}" for name in shown)
        rows.append([*(names[run["label"]].get(key) for key in keys), run["ratio"], *factors])
    return Table("", columns, rows, names=len(keys))


def excludes_1(ci95: Interval) -> bool:
    """Whether there is an interval, and it lies beside 1."""
    return ci95 is not None and not ci95[0] <= 1 <= ci95[1]


def pairs_table(found: ComparisonDict) -> Table:
    """Every pair of runs, the first over the second."""
    columns = table_columns(("first", "text"), ("second", "text"), ("first / second", 3))
    columns += [Column("95 %", digits=3, ends=True), *table_columns(("p", "text"), ("p, corrected", "text"))]
    rows: list[list[CellValue]] = [
        [pair["first"], pair["second"], pair["ratio"], pair["ci95"], p_value(pair["p_value"]),
         p_value(pair["corrected"])] for pair in found["pairs"][:MOST_PAIRS]
    ]  # fmt: skip
    many = len(found["pairs"])
    title = "Every pair of ways." + f" The first {MOST_PAIRS} of {many}." * (many > MOST_PAIRS)
    return Table(title, columns, rows, names=2, sorts=True)


def sentence(found: Comparison) -> str:
    """The comparison of two runs in words, with the factors whose intervals exclude 1."""
    run = next(run for run in found.runs if run.label != found.reference)
    p, ci95 = found.pairs[0].corrected, run.ratio_ci95
    error = f"{ci95[0]:.3f}-{ci95[1]:.3f}" if ci95 else "too few prompts for an interval"
    told = f"{run.label} has {run.ratio:.2f}x ({error}) the {UNITS[found.by]} of {found.reference}"
    if p is not None:
        told += f", p {p_value(p)}, {'a difference' if p < LEVEL else 'no sure difference'}"
    moved = [name for name in run.causes if excludes_1(run.causes_ci95.get(name))]
    moved.sort(key=lambda name: -abs(run.causes[name] - 1))
    why = ", ".join(f"{CAUSES[name]} x{run.causes[name]:.2f}" for name in moved)
    return (
        told if not ci95 else f"{told}; " + (f"what moved: {why}" if why else "no factor moved by more than its error")
    )


def rows(found: Comparison, names: Mapping[str, Mapping[str, str]], more: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row of comparison.csv for each run, after the columns `more` of the task."""
    table = []
    for run in found.runs:
        row: dict[str, Any] = {**more, **names[run.label], "rank": run.rank, "ranked_by": found.by}
        row |= {"reference": found.reference, "ratio": run.ratio, **_ends("ratio", run.ratio_ci95)}
        row |= {"p_value": run.p_value}
        for name, value in run.numbers.items():
            row |= {name: value, **_ends(name, run.ci95.get(name))}
        row |= {"alpha_difference": run.alpha_difference, **_ends("alpha_difference", run.alpha_difference_ci95)}
        for name, value in run.causes.items():
            row |= {f"factor_{name}": value, **_ends(f"factor_{name}", run.causes_ci95.get(name))}
        table.append(row)
    return table


def _ends(name: str, ci95: Interval) -> dict[str, float | None]:
    low, high = ci95 or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}
