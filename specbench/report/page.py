"""One HTML page for a run, a sweep or a comparison, from one template: works offline, light and dark."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template
from matplotlib.figure import Figure

from specbench.errors import visible
from specbench.measure.record import Record
from specbench.report import figures, tables
from specbench.report.files import Run
from specbench.report.terminal import compared_headline, headline

PROMPTS_SHOWN = 8  # on the page of a run


@cache
def template() -> Template:
    """The page; everything that is put into it is escaped."""
    env = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    env.filters["visible"] = lambda text: visible(str(text), layout=True)
    return env.get_template("page.html")


def run_page(run: Run, records: Sequence[Record]) -> str:
    """The page of one run: the answer, figures, tables, and what was decoded."""
    results = run.results
    speedup, cost = results["speedup"], results["cost"]
    tiles = [
        ("speedup", tables.ratio(speedup["measured"], None), interval(speedup["ci95"])),
        ("Theorem 3.8", tables.ratio(speedup["theorem_3_8"], None), "predicted from alpha, gamma and c"),
        ("alpha", tables.number(results["alpha"]["mean"]), f"{results['alpha']['n']:,} tested guesses"),
        ("block efficiency", tables.number(results["block_efficiency"]["mean"]), "tokens per target call"),
        ("lossless", tables.verdict(results["lossless"]), results["lossless"]["reason"] or "output distribution"),
        ("c, v, o", ", ".join(tables.number(cost[name], 2) for name in "cvo"), "in single-token target steps"),
    ]
    drawn = {
        "From Theorem 3.8 to what was measured": figures.accounting(run),
        "Acceptance": figures.acceptance(run),
        "The first rounds of a text": figures.timeline(records),
    }
    shown = {"Acceptance": tables.acceptance(run), "Speedup by factor": tables.costs(run)}
    if results["by_category"]:
        shown = {"By category": tables.by_category([run]), **shown}
    texts = [record for record in records if record.speculative and record.baseline][:PROMPTS_SHOWN]
    return rendered(results["name"], headline(results), tiles, drawn, shown, notes=results["notes"], texts=texts,
                    facts=facts(results))  # fmt: skip


def sweep_page(runs: Sequence[Run], title: str) -> str:
    """The page of several runs."""
    best = max(runs, key=lambda run: run.results["speedup"]["measured"] or 0)
    speedup = best.results["speedup"]
    told = (
        f"{len(runs)} runs; the largest speedup is {tables.ratio(speedup['measured'], speedup['ci95'])}, {best.label}"
    )
    shown = {"Runs": tables.runs_table(runs)}
    if any(run.results["by_category"] for run in runs):
        shown["By category"] = tables.by_category(runs)
    notes = ["Jobs of a sweep run at different times: python -m specbench.compare decodes each prompt by all in turn."]
    return rendered(title, told, [], {"Speedup": figures.speedups(runs)}, shown, notes=notes,
                    facts=facts(runs[0].results))  # fmt: skip


def comparison_page(rows: Sequence[Mapping[str, Any]], runs: Sequence[Run], title: str) -> str:
    """The page of a comparison."""
    shown = {"Ranking": tables.comparison(rows), "Runs": tables.runs_table(runs)}
    return rendered(title, compared_headline(rows), [], {"Speedup": figures.ranking(rows)}, shown,
                    notes=runs[0].results["notes"], facts=facts(runs[0].results))  # fmt: skip


def rendered(
    title: str,
    answer: str,
    tiles: Sequence[tuple[str, str, str]],
    drawn: Mapping[str, Figure | None],
    shown: Mapping[str, Any],
    *,
    notes: Sequence[str],
    facts: Mapping[str, str],
    texts: Sequence[Record] = (),
) -> str:
    """The template with its parts."""
    pictures = {name: figures.svg(figure) for name, figure in drawn.items() if figure is not None}
    parts = {name: (list(frame.columns), frame.astype(str).values.tolist()) for name, frame in shown.items()}
    return template().render(title=title, answer=answer, tiles=tiles, pictures=pictures, tables=parts, notes=notes,
                             facts=facts, texts=texts)  # fmt: skip


def interval(ends: Sequence[float] | None) -> str:
    """A 95 % interval in words."""
    return "too few prompts for an interval" if ends is None else f"95 % interval {ends[0]:.2f} to {ends[1]:.2f}"


def facts(results: Mapping[str, Any]) -> dict[str, str]:
    """Where and how a run was measured."""
    known = results["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in known.get("versions", {}).items())
    return {
        "command": "python -m " + " ".join(map(str, known.get("argv", []))),
        "overrides": " ".join(results["details"]["overrides"]) or "none",
        "device": str(known.get("device", "")),
        "threads": str(known.get("threads", "")),
        "versions": versions,
        "commit": f"{known.get('git_sha')}{' with changes' if known.get('dirty') else ''}",
        "started": str(known.get("started", "")),
    }
