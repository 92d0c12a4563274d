"""One HTML page for a run, a sweep or a comparison, from one template: works offline, light and dark."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template
from matplotlib.figure import Figure

from specbench.errors import visible
from specbench.measure.record import Record
from specbench.measure.rounds import rounds_frame
from specbench.report import figures, files, tables
from specbench.report.files import Run
from specbench.report.terminal import (
    baseline_strength,
    compared_headline,
    fastest,
    speedup_sentence,
    verdict_and_prediction,
)

PROMPTS_SHOWN = 8  # on the page of a run


@cache
def template() -> Template:
    """The page; everything that is put into it is escaped."""
    env = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    env.filters["visible"] = lambda text: visible(str(text), layout=True)
    return env.get_template("page.html")


def write_run(folder: Path, results: dict[str, Any], records: Sequence[Record]) -> Run:
    """Writes results.json, rounds.parquet and the page of a run into its folder. prompts.jsonl is there already."""
    files.write_text(folder / files.RESULTS, json.dumps(results, indent=1, allow_nan=False))
    rounds_frame(records).to_parquet(folder / files.ROUNDS, index=False)
    run = Run(folder, results, folder.name)
    files.write_text(folder / files.PAGE, run_page(run, records))
    return run


def write_page(folder: Path) -> Path:
    """Makes the page of a run, a comparison or a sweep again; returns its place. Raises ConfigError."""
    if (folder / files.RESULTS).is_file():
        run = files.read_run(folder)
        text = run_page(run, run.records)
    elif (folder / files.COMPARISON).is_file():
        rows = files.read_comparison(folder)
        text = comparison_page(rows, files.read_all(folder), folder.name)
    else:
        text = sweep_page(files.read_all(folder), folder.name)
    files.write_text(folder / files.PAGE, text)
    return folder / files.PAGE


def run_page(run: Run, records: Sequence[Record]) -> str:
    """The page of one run: the answer, figures, tables, and what was decoded."""
    results = run.results
    drawn = {"Measured beside predicted": figures.over_gamma(run)}
    drawn["Where the difference goes"] = figures.accounting(run)
    shown = {"By category": tables.by_category([run]), "By method": tables.methods(run)}
    texts = [record for record in records if record.speculative and record.baseline][:PROMPTS_SHOWN]
    title = results["name"] if results["status"] == "complete" else f"{results['name']} ({results['status']})"
    answer = (speedup_sentence(results), f"{verdict_and_prediction(results)}{baseline_strength(results)}")
    more = {"title": title, "tiles": tiles(results), "texts": texts, "notes": results["notes"]}
    return rendered(drawn, shown, [run], answer=answer, **more)


def tiles(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The numbers that come first: name, value, what it is."""
    speedup, cost, lossless, alpha = (results[name] for name in ("speedup", "cost", "lossless", "alpha"))
    measured, predicted, corrected = (
        tables.ratio(speedup[name], None) for name in ("measured", "theorem_3_8", "corrected")
    )
    costs = ", ".join("-" if cost[name] is None else f"{cost[name]:.2f}".removeprefix("0") for name in "cvo")
    return [
        ("speedup", measured, interval(speedup["ci95"])),
        ("Theorem 3.8", predicted, f"by measured costs {corrected}"),
        ("alpha", tables.number(alpha["mean"]), f"{alpha['n']:,} tested guesses"),
        ("block efficiency", tables.number(results["block_efficiency"]["mean"]), "tokens per target call"),
        ("c, v, o", costs, "in single-token target steps"),
        ("lossless", tables.verdict(lossless), lossless["reason"] or "the output distribution is the target's"),
    ]


def sweep_page(runs: Sequence[Run], title: str) -> str:
    """The page of several runs."""
    rows = [(run.label, s["measured"], s["ci95"], s["theorem_3_8"]) for run in runs if (s := run.results["speedup"])]
    answer = fastest([row[:3] for row in rows], "runs")
    drawn = {"Speedup": figures.speedups(rows), "Speedup by setting": figures.sweep_lines(runs)}
    shown = {"Runs": tables.runs_table(runs), "By category": tables.by_category(runs)}
    notes = ["Jobs of a sweep run at different times: python -m specbench.compare decodes each prompt by all in turn."]
    return rendered(drawn, shown, runs, title=title, answer=(answer, verdicts(runs)), notes=notes)


def comparison_page(rows: Sequence[Mapping[str, Any]], runs: Sequence[Run], title: str) -> str:
    """The page of a comparison, from the rows of `measure.compare` and its runs."""
    predicted = {run.label: run.results["speedup"]["theorem_3_8"] for run in runs}
    bars = [(row["method"], row["speedup"], row["speedup_ci95"], predicted.get(row["method"])) for row in rows]
    places = {row["method"]: place for place, row in enumerate(rows)}
    ordered = sorted(runs, key=lambda run: places.get(run.label, len(rows)))
    shown = {"Ranking": tables.comparison(rows), "Runs": tables.runs_table(ordered)}
    shown["By category"] = tables.by_category(ordered)
    answer, notes = (compared_headline(rows), verdicts(runs)), ordered[0].results["notes"]
    return rendered({"Speedup": figures.speedups(bars)}, shown, runs, title=title, answer=answer, notes=notes)


def rendered(drawn: Mapping[str, Figure | None], shown: Mapping[str, Any], runs: Sequence[Run], **others: Any) -> str:
    """The template with its figures, its tables, what was run, and `others` by the names that it gives them."""
    pictures = {name: figures.svg(figure) for name, figure in drawn.items() if figure is not None}
    parts = {
        name: (list(frame.columns), frame.astype(str).values.tolist()) for name, frame in shown.items() if len(frame)
    }
    others |= {"facts": facts(runs), "text_columns": tables.TEXT_COLUMNS}
    return template().render(pictures=pictures, tables=parts, **others)


def interval(ends: Sequence[float] | None) -> str:
    """A 95 % interval in words."""
    return "too few prompts for an interval" if ends is None else f"95 % interval {ends[0]:.2f} to {ends[1]:.2f}"


def verdicts(runs: Sequence[Run]) -> str:
    """How many runs have which verdict."""
    found = Counter(tables.verdict(run.results["lossless"]) for run in runs)
    return "lossless: " + ", ".join(f"{number} of {len(runs)} {word}" for word, number in found.items())


def facts(runs: Sequence[Run]) -> dict[str, str]:
    """Where and how runs were measured: what they share, and of the first what is of one run."""
    known, counts = runs[0].results["provenance"], runs[0].results["counts"]
    overrides = [run.results["details"]["overrides"] for run in runs]
    common = [word for word in overrides[0] if all(word in own for own in overrides)]
    argv = [str(word) for word in known.get("argv") or []]
    python = "python -m " if argv and argv[0].startswith("specbench") else ""
    commit = str(known.get("git_sha") or "")[:12]
    found = {
        "command": python + " ".join(argv),
        "overrides": " ".join(common),
        "prompts": f"{counts['prompts']:,}, {counts['failed']} failed",
        "device": " ".join(str(known[name]) for name in ("device", "cpu") if known.get(name)),
        "threads": str(known.get("threads", "")),
        "versions": ", ".join(f"{name} {version}" for name, version in known.get("versions", {}).items()),
        "commit": f"{commit} with changes" if commit and known.get("dirty") else commit,
        "started": str(known.get("started", "")),
    }
    return {name: value for name, value in found.items() if value}
