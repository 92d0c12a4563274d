"""Tables of finished runs as pandas DataFrames: by run, by category, by place of the draft, and of a comparison."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from specbench.report.files import Run

Cells = Mapping[str, Callable[[Mapping[str, Any]], Any]]
FORMATS = ("markdown", "latex", "csv")
VERDICTS = {True: "passed", False: "failed", None: "unknown"}


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many digits, and "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def ratio(value: float | None, interval: Sequence[float] | None) -> str:
    """A speedup with its 95 % interval, as 1.21x (1.15 to 1.28)."""
    if value is None:
        return "-"
    return f"{value:.2f}x" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def mean(estimate: Mapping[str, Any] | None) -> str:
    """A mean with its standard error."""
    if estimate is None or estimate["mean"] is None:
        return "-"
    error = estimate["stderr"]
    return f"{estimate['mean']:.3f}" + ("" if error is None else f" +- {error:.3f}")


def verdict(lossless: Mapping[str, Any]) -> str:
    """The verdict in a word or two: "lossy by choice" where the settings change the distribution."""
    found = VERDICTS[lossless["passed"]]
    return found if lossless["expected"] or lossless["passed"] is None else "lossy by choice"


RUN_CELLS: Cells = {
    "speedup": lambda r: ratio(r["speedup"]["measured"], r["speedup"]["ci95"]),
    "Thm 3.8": lambda r: ratio(r["speedup"]["theorem_3_8"], None),
    "alpha": lambda r: mean(r["alpha"]),
    "block efficiency": lambda r: mean(r["block_efficiency"]),
    "c": lambda r: number(r["cost"]["c"]),
    "v": lambda r: number(r["cost"]["v"]),
    "o": lambda r: number(r["cost"]["o"]),
    "tokens/s": lambda r: number(r["throughput"]["speculative_tokens_per_second"]),
    "plain tokens/s": lambda r: number(r["throughput"]["baseline_tokens_per_second"]),
    "lossless": lambda r: verdict(r["lossless"]),
}
CATEGORY_CELLS: Cells = {
    "prompts": lambda c: str(c["prompts"]),
    "speedup": lambda c: ratio(c["speedup"]["measured"], c["speedup"]["ci95"]),
    "alpha": lambda c: mean(c["alpha"]),
    "block efficiency": lambda c: mean(c["block_efficiency"]),
    "tokens/s": lambda c: number(c["speculative_tokens_per_second"]),
    "plain tokens/s": lambda c: number(c["baseline_tokens_per_second"]),
}
COMPARED_CELLS: Cells = {
    "rank": lambda row: str(row["rank"]),
    "method": lambda row: row["method"],
    "speedup": lambda row: ratio(row["speedup"], row["speedup_ci95"]),
    "of the first": lambda row: ratio(row["ratio"], row["ratio_ci95"]),
    "p (Holm)": lambda row: "-" if row["p_value"] is None else f"{row['p_value']:.3f}",
    "alpha": lambda row: number(row["alpha"]),
    "block efficiency": lambda row: number(row["block_efficiency"]),
    "c": lambda row: number(row["c"]),
    "v": lambda row: number(row["v"]),
    "o": lambda row: number(row["o"]),
    "tokens/s": lambda row: number(row["tokens_per_second"]),
}


def frame(rows: Sequence[Mapping[str, Any]], cells: Cells) -> pd.DataFrame:
    """A row of cells for each row of numbers."""
    return pd.DataFrame([{head: cell(row) for head, cell in cells.items()} for row in rows], columns=[*cells])


def runs_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row for each run of a sweep."""
    table = frame([run.results for run in runs], RUN_CELLS)
    table.insert(0, "run", [run.label for run in runs])
    return table


def sweep_csv(runs: Sequence[Run]) -> pd.DataFrame:
    """The numbers of each run under the names of results.json, for summary.csv."""
    from specbench.report.loggers import flat

    leave = ("config", "provenance", "details", "notes", "by_category", "acceptance")
    rows = [{key: value for key, value in run.results.items() if key not in leave} for run in runs]
    return pd.DataFrame([{"run": run.label, **flat(row)} for run, row in zip(runs, rows, strict=True)])


def by_category(runs: Sequence[Run]) -> pd.DataFrame:
    """One row for each run and category of prompts; empty if the data name none."""
    found = []
    for run in runs:
        table = frame(run.results["by_category"], CATEGORY_CELLS)
        table.insert(0, "category", [category["category"] for category in run.results["by_category"]])
        table.insert(0, "run", run.label)
        found.append(table)
    whole = pd.concat(found, ignore_index=True) if found else pd.DataFrame()
    return whole.drop(columns="run") if len(runs) == 1 and len(whole) else whole


def acceptance(run: Run) -> pd.DataFrame:
    """Mean of beta at each place of the draft, and how many rounds accepted so many guesses."""
    places = {entry["place"]: entry for entry in run.results["acceptance"]["by_place"]}
    lengths = run.results["acceptance"]["lengths"]
    rows = []
    for place in range(len(lengths)):
        entry = places.get(place)
        rows.append(
            {
                "guesses": place,
                "rounds that accepted so many": lengths[place],
                "beta at this place": mean(entry),
                "tested": entry["n"] if entry else "-",
            }
        )
    return pd.DataFrame(rows)


def costs(run: Run) -> pd.DataFrame:
    """What the factors of the speedup are, from Theorem 3.8's prediction to what was measured."""
    rows = [
        {"factor": MEANING.get(entry["factor"], entry["factor"]), "value": ratio(entry["value"], entry["ci95"])}
        for entry in run.results["speedup"]["accounting"]
    ]
    measured = run.results["speedup"]
    return pd.DataFrame([*rows, {"factor": "measured", "value": ratio(measured["measured"], measured["ci95"])}])


MEANING = {
    "theorem_3_8": "Theorem 3.8",
    "tokens": "tokens per round, over equation 1",
    "drafting": "drafting, not g c",
    "verify": "verification costs v, not 1",
    "rest": "the rest of a round costs o, not 0",
    "plain_rest": "the rest of a plain step",
    "rows": "rows per call",
}


def comparison(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The ranking of methods that decoded the same prompts."""
    return frame(rows, COMPARED_CELLS)


def written(table: pd.DataFrame, form: str) -> str:
    """A table as Markdown, LaTeX or CSV; signs that have a meaning there are escaped."""
    if form == "csv":
        return str(table.to_csv(index=False))
    if form == "latex":
        return str(table.style.format(escape="latex").hide(axis="index").to_latex(hrules=True))
    escaped = table.map(lambda cell: str(cell).replace("|", "\\|").replace("\n", " "))
    return str(escaped.to_markdown(index=False, disable_numparse=True)) + "\n"
