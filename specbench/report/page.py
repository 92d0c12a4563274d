"""One self-contained page from finished runs, and its figures as PNG and SVG."""

import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.figure import Figure

from specbench.report import figures, paper
from specbench.report.load_table import rows_of
from specbench.report.samples import samples
from specbench.report.style import save
from specbench.report.tables import account, at, multirun_rows, speedup_interval, verdict, word
from specbench.results import flatten
from specbench.storage.atomic import write_text
from specbench.storage.read import StoredRun
from specbench.visible import visible

HEAT_MAPS = {"alpha/mean": "alpha", "speedup/measured": "measured speedup"}
MOST_HEAT_MAPS = 6
LONGEST_NAME = 60  # characters of a figure's file name
NUMBERS = {  # of one run: name, path in results.json
    "alpha": "alpha",
    "alpha, accepted / tested": "alpha_counted",
    "alpha on the target's own text": "alpha_on_target_text",
    "block efficiency": "block_efficiency",
    "c": "cost/c",
    "v": "cost/v",
    "o": "cost/o",
    "target step, s": "cost/target_step_seconds",
    "speedup": "speedup/measured",
    "Theorem 3.8": "speedup/theorem_3_8",
    "corrected": "speedup/corrected",
    "end to end": "speedup/end_to_end",
    "tokens/s": "throughput/speculative_tokens_per_second",
    "plain tokens/s": "throughput/baseline_tokens_per_second",
    "share of read peak": "bandwidth/target_share_of_peak",
    "draft acceptance rate (not alpha)": "draft_acceptance_rate",
    "drift, total variation": "drift/tv",
    "drift, KL in nats": "drift/kl",
    "largest s(x) l / p(x)": "drift/bound",
    "repeated 4-grams": "drift/repetition",
    "of plain decoding": "drift/baseline_repetition",
    "distinct 2-grams": "drift/distinct_2",
    "of plain decoding ": "drift/baseline_distinct_2",
    "tokens": "counts/tokens",
}


class Report:
    """A report being written: its sections, and the folder of its figures."""

    def __init__(self, folder: Path, runs: Sequence[StoredRun]):
        self.folder, self.runs = folder, runs
        self.sections: list[dict[str, Any]] = []
        self.names: list[str] = []  # of figures
        (folder / "figures").mkdir(parents=True, exist_ok=True)

    def figure(self, name: str, caption: str, make: Callable[[], Figure]) -> dict[str, str]:
        """Draws a figure into figures/; a name that another figure has, or that no file can have, is changed."""
        name = re.sub(r"[^\w.-]", "_", name)[:LONGEST_NAME]
        self.names.append(name)
        if (again := self.names.count(name)) > 1:
            name = f"{name}-{again}"
        return {"svg": save(make, self.folder / "figures" / name), "caption": caption}

    def section(
        self,
        title: str,
        *,
        texts: Sequence[str] = (),
        figures: Sequence[dict[str, str]] = (),
        tables: Sequence[list[dict[str, Any]]] = (),
        samples: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.sections.append({"title": title, "texts": texts, "figures": figures, "tables": tables, "samples": samples})


def write_report(folder: Path, runs: Sequence[StoredRun]) -> Path:
    """Writes report.html and figures/ into the folder; returns the page's path."""
    report = Report(folder, runs)
    one = len(runs) == 1
    (_one_run if one else _many_runs)(report)
    _under_load(report)
    _paper(report)
    first = runs[0].result
    html = rendered(
        title=f"{first['name']}: {folder.name}" if one else f"{first['name']}: {len(runs)} runs",
        subtitle=_provenance(first),
        cards=_cards(first) if one else [],
        notes=_notes(runs),
        sections=report.sections,
    )
    write_text(folder / "report.html", html)
    return folder / "report.html"


def rendered(**contents: Any) -> str:
    """The page with this title, subtitle, cards, notes and sections."""
    templates = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=templates, autoescape=True, finalize=_printable).get_template("page.html")
    return page.render(**contents)


def _printable(value: Any) -> Any:
    """A text of the page without control characters, before it is escaped; an SVG element as it is."""
    return visible(value, layout=True) if isinstance(value, str) and not isinstance(value, Markup) else value


def _one_run(report: Report) -> None:
    run = report.runs[0]
    _accounting(report, run)
    _which_gamma(report, run)
    _times(report, run)
    if run.result["beta_by_position"]:
        figure = report.figure(
            "beta_by_position", "Theorem 3.8 takes all of them to be alpha.", lambda: figures.beta_by_position([run])
        )
        report.section("Beta by position", figures=[figure])
    report.section(
        "The text as it came about",
        texts=[
            "Green: accepted guesses. Struck out: a rejected guess. Blue: the target's own token in its place. Purple: "
            "the bonus token after a round without a rejection. Grey: the end of the prompt."
        ],
        samples=samples(run),
    )
    numbers = {name: at(run.result, path) for name, path in NUMBERS.items()} | flatten(run.result.get("metrics", {}))
    report.section("All numbers", tables=[[{"": name, "value": _number(value)} for name, value in numbers.items()]])


def _accounting(report: Report, run: StoredRun) -> None:
    if not run.result["speedup"]["accounting"]:
        return
    caption = "Each factor with its 95 % interval; they multiply to the measured speedup."
    figure = report.figure("accounting", caption, lambda: figures.accounting(run))
    report.section("Why the gain is not Theorem 3.8's", texts=[account(run.result)], figures=[figure])


def _which_gamma(report: Report, run: StoredRun) -> None:
    caption = (
        "Replay evaluates every constant gamma on this run's text, with the measured time of a round of that many "
        "tokens; the band is a 95 % interval."
        if run.result["gamma_sweep"]
        else f"No other gamma is evaluated on this run: {run.result['no_replay']}."
    )
    figure = report.figure("speedup_by_gamma", caption, lambda: figures.speedup_by_gamma([run]))
    report.section("Which gamma", figures=[figure])


def _times(report: Report, run: StoredRun) -> None:
    mean = "A mean round, and the single step of plain decoding."
    trace = "Figure 5 of the paper from this run's trace; the number is the tokens that a round kept."
    drawn = [
        report.figure("round_times", mean, lambda: figures.round_times([run])),
        report.figure("timeline", trace, lambda: figures.timeline(run)),
    ]
    report.section("Where the time goes", figures=drawn)


def _many_runs(report: Report) -> None:
    runs = report.runs
    caption = "Speedup of every run; the diamond is Theorem 3.8 from the run's own alpha and c."
    if not all(run.result.get("repeats") for run in runs):
        caption += " Intervals are of one process, where a run did not repeat: another process may lie outside."
    measured = report.figure("predicted_and_measured", caption, lambda: figures.predicted_and_measured(runs))
    report.section("Measured and predicted", figures=[measured])
    rows = multirun_rows([([f"{k}={v}" for k, v in run.keys.items()], run.result) for run in runs])
    headings = dict.fromkeys(key for row in rows for key in row)
    report.section("All runs", tables=[[{key: _number(row.get(key)) for key in headings} for row in rows]])
    report.section("Why: the factors of every run", tables=[[_factors(run) for run in runs if _factors(run)]])
    if maps := _heat_maps(report):
        report.section("Over two keys at a time", figures=maps)
    few = runs[:8]
    for title, name, caption, make in (
        ("Where the time goes", "round_times", "A mean round of each run.", partial(figures.round_times, runs)),
        (
            "Which gamma",
            "speedup_by_gamma",
            "Up to eight runs: replay (solid), Theorem 3.8 (dashed) and what was measured (points).",
            partial(figures.speedup_by_gamma, few),
        ),
        ("Beta by position", "beta_by_position", "Up to eight runs.", partial(figures.beta_by_position, few)),
    ):
        report.section(title, figures=[report.figure(name, caption, make)])


def _factors(run: StoredRun) -> dict[str, str]:
    """A run's accounting as a row; empty where nothing was drafted."""
    speedup = run.result["speedup"]
    if not speedup["accounting"]:
        return {}
    factors = {name: f"{entry['factor']:.3f}" for name, entry in speedup["accounting"].items()}
    return {"run": run.label, **factors, "measured": f"{speedup['measured']:.3f}"}


def _heat_maps(report: Report) -> list[dict[str, str]]:
    """Numbers over two swept keys, for the first pairs of keys."""
    runs = report.runs
    swept = list(dict.fromkeys(key for run in runs for key in run.keys))
    pairs = [(x, y) for x, y in itertools.combinations(swept, 2) if not _one_each(runs, x, y)]
    return [
        report.figure(
            f"heat_{value.split('/')[0]}_{x}_{y}",
            f"{what} over {x} and {y}",
            partial(figures.heat_map, runs, x, y, value, what),
        )
        for x, y in pairs[: MOST_HEAT_MAPS // 2]
        for value, what in HEAT_MAPS.items()
    ]


def _under_load(report: Report) -> None:
    """Sections that only some runs have: lenience that was swept, requests that arrived over time."""
    runs = report.runs
    if len({run.result["config"]["lenience"] for run in runs}) > 1:
        caption = "Drift is the mean total variation between a tested position's output law and the target's."
        report.section("Lenience", figures=[report.figure("lenience", caption, lambda: figures.lenience(runs))])
    if any(True for run in runs for _ in rows_of(run.result)):
        caption = (
            "Blue: speculative decoding; orange: plain decoding of the same arrivals. A percentile is left out if "
        )
        caption += "fewer than five requests are beyond it."
        report.section("Waiting times", figures=[report.figure("latency", caption, lambda: figures.latency(runs))])


def _paper(report: Report) -> None:
    runs = report.runs
    report.section(
        "The paper's figures, with what was measured",
        figures=[
            report.figure("paper_2", "Figure 2: tokens a round (equation 1).", lambda: paper.figure_2(runs)),
            report.figure("paper_3", "Figure 3: the best gamma.", lambda: paper.figure_3(runs)),
            report.figure("paper_4", "Figure 4: speed and operations for c = 0.", lambda: paper.figure_4(runs)),
        ],
        tables=[paper.table_1(runs)],
    )


def _one_each(runs: Sequence[StoredRun], x: str, y: str) -> bool:
    """Whether two keys move together, so that a map of them would be a diagonal."""
    cells = {(run.keys.get(x), run.keys.get(y)) for run in runs}
    return len(cells) <= max(len({cell[0] for cell in cells}), len({cell[1] for cell in cells}))


def _cards(result: dict[str, Any]) -> list[dict[str, str]]:
    speedup, alpha = result["speedup"], result["alpha"]
    cards = [("speedup, measured", f"{speedup['measured']:.2f}x", speedup_interval(result))]
    if speedup["theorem_3_8"] is not None:
        cards.append(("Theorem 3.8", f"{speedup['theorem_3_8']:.2f}x", "from alpha, gamma and c"))
        error = "too few prompts for an error" if alpha["stderr"] is None else f"standard error {alpha['stderr']:.3f}"
        cards.append(("alpha", f"{alpha['mean']:.3f}", error))
    cards.append(("tokens a round", f"{result['block_efficiency']['mean']:.2f}", "block efficiency"))
    cards.append(("lossless", word(result["lossless"]), result["lossless"]["method"].replace("_", " ")))
    return [{"name": name, "value": value, "note": note} for name, value, note in cards]


def _notes(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    found = []
    for run in runs:
        result = run.result
        sentence, _ = verdict(result["lossless"])
        if word(result["lossless"]) != "passed" or len(runs) == 1:
            kind = {"passed": "good", "lossy": "dim"}.get(word(result["lossless"]), "bad")
            found.append({"kind": kind, "text": f"{run.label}: {sentence}" if len(runs) > 1 else sentence})
        if result["speedup"]["measured"] < 1:
            found.append({"kind": "bad", "text": f"{run.label}: slower than plain decoding"})
        unsteady = [f"the machine was not steady: {told}" for told in (result.get("machine") or {}).get("reasons", [])]
        found += [{"kind": "bad", "text": f"{run.label}: {note}"} for note in (*unsteady, *result["notes"])]
        if result["status"] != "complete":
            found.append({"kind": "bad", "text": f"{run.label}: {result['status']}"})
    return found


def _provenance(result: dict[str, Any]) -> str:
    where = result["provenance"]
    commit = (where["git_sha"] or "unknown")[:7] + (" with changes" if where["dirty"] else "")
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return f"{where['device']}, {where['threads']} threads; {versions}; commit {commit}; {where['started']}"


def _number(value: Any) -> str:
    if isinstance(value, dict):
        error = "" if value["stderr"] is None else f" ± {value['stderr']:.3f}"
        return "-" if value["mean"] is None else f"{value['mean']:.3f}{error}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
