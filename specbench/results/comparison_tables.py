"""Shows a comparison: who is fastest, by how much, and why."""

from collections.abc import Mapping, Sequence
from typing import Any

from specbench.results.labels import CAUSES, UNITS
from specbench.results.tables import number
from specbench.results.terminal_table import Grid
from specbench.stats.comparison import LEVEL, Compared, Comparison
from specbench.stats.estimates import Interval

Names = Mapping[str, Mapping[str, str]]  # by label, what tells the run from the others


def tables(found: Comparison, names: Names, title: str) -> list[Grid]:
    """The ranking, and the causes of the distances."""
    tests = f", {len(found.pairs)} tests corrected by Holm's method" if len(found.pairs) > 1 else ""
    about = f"{title}{found.requests} requests, {found.clusters} clusters{tests}; by {UNITS[found.by]}"
    few = [] if found.runs[0].ci95["speedup"] else ["too few prompts for intervals and tests"]
    return [_ranking(found, names, "; ".join([about, *few])), *_why(found, names)]


def _ranking(found: Comparison, names: Names, title: str) -> Grid:
    against = f"of {'the fastest' if found.reference == found.runs[0].label else found.reference}"
    table, tested = [], any(pair.p_value is not None for pair in found.pairs)
    for run in found.runs:
        n = run.numbers
        row = {
            "rank": str(run.rank) if tested else "-",
            **names[run.label],
            "tokens/s": number(n["tokens_per_second"], 1),
        }
        row |= {against: number(run.ratio, 3), "95 %": _interval(run.ratio_ci95), "p": _p_value(run.p_value)}
        row |= {"speedup": number(n["speedup"], 2), "alpha": number(n["alpha"], 3)}
        row |= {"on text": number(n["alpha_on_target_text"], 3), "block efficiency": number(n["tau"], 2)}
        table.append(row | {"c": number(n["c"], 3), "v": number(n["v"], 2), "o": number(n["o"], 2)})
    return Grid(table, _headings(table), title, ("rank", *_keys(names)))


def _why(found: Comparison, names: Names) -> list[Grid]:
    """The factors against the reference, without those that are 1.00 for every run."""
    others = [run for run in found.runs if run.causes]
    shown = [name for name in CAUSES if any(abs(run.causes.get(name, 1.0) - 1) >= 0.005 for run in others)]
    if not shown:
        return []
    reference = " ".join(names[found.reference].values()) or found.reference
    told = {name: f"factor of {CAUSES[name]}" if CAUSES[name] in _keys(names) else CAUSES[name] for name in shown}
    table = [{**names[run.label], "ratio": number(run.ratio, 3),
              **{told[name]: f"x{run.causes[name]:.2f}" for name in shown}} for run in others]  # fmt: skip
    return [Grid(table, _headings(table), f"factors that make up the distance from {reference}", _keys(names))]


def _keys(names: Names) -> list[str]:
    """The keys in which the runs differ."""
    return [*dict.fromkeys(key for own in names.values() for key in own)]


def _headings(table: Sequence[Mapping[str, str]]) -> list[str]:
    """Those that some row has something under, in order."""
    keys = dict.fromkeys(key for row in table for key in row)
    return [key for key in keys if any(row.get(key, "-") != "-" for row in table)]


def sentence(found: Comparison) -> str:
    """The comparison of two runs in words, with the factors whose intervals exclude 1."""
    run = next(run for run in found.runs if run.label != found.reference)
    pair = found.pairs[0]
    error = f" ({_interval(run.ratio_ci95)})" if run.ratio_ci95 else " (too few prompts for an interval)"
    moved = [f"{CAUSES[name]} x{value:.2f}" for name, value in _moved(run)]
    why = f"; what moved: {', '.join(moved)}" if moved else "; no factor moved by more than its error"
    sure = "" if pair.corrected is None else f", p {_p_value(pair.corrected)}"
    judged = "" if pair.corrected is None else ", a difference" if pair.corrected < LEVEL else ", no sure difference"
    told = f"{run.label} has {run.ratio:.2f}x{error} the {UNITS[found.by]} of {found.reference}{sure}{judged}"
    return told + (why if run.ratio_ci95 else "")


def _moved(run: Compared) -> list[tuple[str, float]]:
    found = [(name, value) for name, value in run.causes.items()
             if (ci95 := run.causes_ci95.get(name)) and not ci95[0] <= 1 <= ci95[1]]  # fmt: skip
    return sorted(found, key=lambda entry: -abs(entry[1] - 1))


def rows(found: Comparison, names: Names, more: Mapping[str, str]) -> list[dict[str, Any]]:
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


def _interval(ci95: Interval) -> str:
    return f"{ci95[0]:.3f}-{ci95[1]:.3f}" if ci95 else "-"


def _p_value(value: float | None) -> str:
    return "-" if value is None else "<.001" if value < 0.001 else f"{value:.3f}"[0 if value >= 0.9995 else 1 :]
