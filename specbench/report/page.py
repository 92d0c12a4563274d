"""The HTML page of a run, from one template for all pages, and its figures: works offline, light and dark."""

import io
import json
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader, Template
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from specbench.errors import visible
from specbench.measure.record import Record
from specbench.measure.sums import rounds_frame
from specbench.report import files, tables
from specbench.report.files import Run
from specbench.report.terminal import baseline_strength, speedup_sentence, verdict_with_reason, what_ran
from specbench.theory import walltime_improvement

PROMPTS_SHOWN = 8  # on the page of a run
INK = "#7a828c"  # of text and axes; a page puts its own colour of text in its place
THEORY, MEASURED, GAIN, LOSS = "#4c78a8", "#e07b39", "#3f9b6b", "#c8553d"
WIDTH, BARS, BAR = 4.6, 0.9, 0.34  # inches: of all figures; the height around horizontal bars, and of each
# matplotlib names each key in its types.
STYLE: Any = dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK)
STYLE |= dict.fromkeys(("axes.spines.right", "axes.spines.top", "legend.frameon"), False)
STYLE |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "svg.fonttype"), "none")
STYLE |= {"font.size": 9, "svg.hashsalt": "specbench", "text.parse_math": False}  # a label is text, whatever it holds


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


def run_page(run: Run, records: Sequence[Record]) -> str:
    """The page of one run: the answer, figures, tables, and what was decoded."""
    results = run.results
    drawn = {"Measured beside predicted": over_gamma(run), "Where the difference goes": accounting(run)}
    shown = {"By category": tables.by_category([run]), "By method": tables.methods(run)}
    texts = [record for record in records if record.speculative and record.baseline][:PROMPTS_SHOWN]
    title = results["name"] if results["status"] == "complete" else f"{results['name']} ({results['status']})"
    predicted = results["speedup"]["theorem_3_8"]
    theorem = f"Theorem 3.8 predicts {tables.ratio(predicted, None) if predicted else 'nothing here'}"
    lossless = f"lossless: {verdict_with_reason(results)}"
    answer = (speedup_sentence(results), f"{theorem}; {lossless}{baseline_strength(results)}")
    more = {"title": title, "what": what_ran(results), "tiles": tiles(results), "texts": texts}
    return rendered(drawn, shown, [run], answer=answer, notes=results["notes"], **more)


def tiles(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The numbers that come first: name, value, what it is."""
    speedup, cost, lossless, alpha = (results[name] for name in ("speedup", "cost", "lossless", "alpha"))
    measured, predicted, corrected = (
        tables.ratio(speedup[name], None) for name in ("measured", "theorem_3_8", "corrected")
    )
    costs = ", ".join("-" if cost[name] is None else f"{cost[name]:.2f}".removeprefix("0") for name in "cvo")
    return [
        ("speedup", measured, interval(speedup["ci95"])),
        ("Theorem 3.8", predicted, f"{corrected} with v and o"),
        ("alpha", tables.mean(alpha), f"{alpha['n']:,} tested guesses"),
        ("block efficiency", tables.number(results["block_efficiency"]["mean"]), "tokens per target call"),
        ("c, v, o", costs, "in single-token target steps"),
        ("lossless", tables.verdict(lossless), lossless["reason"] or tables.unchanged(results)),
    ]


def rendered(drawn: Mapping[str, Figure | None], shown: Mapping[str, Any], runs: Sequence[Run], **others: Any) -> str:
    """The template with its figures, its tables, what was run, and `others` by the names that it gives them."""
    pictures = {name: svg(figure) for name, figure in drawn.items() if figure is not None}
    parts = {
        name: (list(frame.columns), frame.astype(str).values.tolist()) for name, frame in shown.items() if len(frame)
    }
    others |= {"facts": facts(runs), "text_columns": tables.TEXT_COLUMNS}
    return template().render(pictures=pictures, tables=parts, **others)


def interval(ends: Sequence[float] | None) -> str:
    """A 95 % interval in words."""
    return "too few prompts for an interval" if ends is None else f"95 % interval {ends[0]:.2f} to {ends[1]:.2f}"


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


def over_gamma(run: Run) -> Figure | None:
    """Theorem 3.8's prediction over gamma by the run's alpha and c, and the measurement at the run's own gamma."""
    speedup, counts = run.results["speedup"], run.results["counts"]
    alpha, c, gamma = run.results["alpha"]["mean"], run.results["cost"]["c"], run.results["config"]["gamma"]
    if None in (alpha, c, speedup["measured"], speedup["theorem_3_8"]) or not counts["drafted"]:
        return None
    gammas = range(2 * gamma + 3)
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(2.9)
        predicted = [walltime_improvement(alpha, number, c) for number in gammas]
        axes.plot(gammas, predicted, ".--", color=THEORY, label=f"Theorem 3.8 at alpha {alpha:.2f}, c {c:.2f}")
        axes.plot(gamma, speedup["measured"], "o", color=MEASURED, label="measured, 95 % interval")
        axes.plot((gamma, gamma), speedup["ci95"] or (speedup["measured"],) * 2, color=MEASURED, linewidth=2)
        axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set(xlabel="gamma", ylabel="speedup over plain decoding")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(axes, 1)
    return figure


def accounting(run: Run) -> Figure | None:
    """The factors of the speedup as bars from one to the next, from Theorem 3.8's prediction to the measurement."""
    speedup = run.results["speedup"]
    factors = [entry for entry in speedup["accounting"] if entry["factor"] != "rows" or abs(entry["value"] - 1) > 1e-3]
    if not factors or speedup["measured"] is None:
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(BARS + BAR * (len(factors) + 1))
        level = 1.0
        for y, entry in enumerate(factors):
            after = level * entry["value"]
            colour = THEORY if y == 0 else GAIN if after >= level else LOSS
            axes.barh(y, after - level, left=level, color=colour, height=0.6)
            axes.plot((after, after), (y + 0.3, y + 0.7), color=INK, linewidth=0.8)
            value = f"x{entry['value']:.2f}" if y else f"{after:.2f}"
            annotate_behind(axes, value, max(after, level), y)
            level = after
        last, ends = len(factors), speedup["ci95"] or (level, level)
        axes.barh(last, level - 1, left=1, color=MEASURED, height=0.6)
        axes.plot(ends, (last, last), color=INK, linewidth=1.6)
        annotate_behind(axes, f"{speedup['measured']:.2f}", max(level, 1, ends[1]), last)
        name_rows(axes, [*(tables.MEANING.get(entry["factor"], entry["factor"]) for entry in factors), "measured"])
        axes.margins(x=0.14)
        at_one(axes)
    return figure


def annotate_behind(axes: Any, text: str, x: float, y: float) -> None:
    """A value behind the end of a bar."""
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center")


def canvas(height: float) -> tuple[Figure, Any]:
    """A figure of so many inches, and its axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def legend(axes: Any, columns: int) -> None:
    """A legend above the axes, with each name once."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    middle = blended_transform_factory(axes.figure.transFigure, axes.transAxes)  # of the figure, which has more room
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "bbox_transform": middle}
    axes.legend(unique.values(), unique.keys(), ncols=columns, columnspacing=1.2, handlelength=1.2, **place)


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Names from top to bottom; long ones are broken, and cut after two lines."""
    short = [textwrap.fill(visible(name), 34, max_lines=2, placeholder=" ...") for name in names]
    axes.set_yticks(range(len(names)), short)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def at_one(axes: Any) -> None:
    """A line where both methods are as fast."""
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel("speedup over plain decoding")


def svg(figure: Figure) -> str:
    """The figure as SVG text in the page's colour of text, without the XML header."""
    buffer = io.StringIO()
    with warnings.catch_warnings(), matplotlib.rc_context(STYLE):
        warnings.filterwarnings("ignore", "Glyph")  # a browser has fonts that matplotlib lacks
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")
