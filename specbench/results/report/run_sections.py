"""The sections of one run's page."""

from collections.abc import Mapping, Sequence
from typing import Any

from specbench.results.category_tables import whole
from specbench.results.latency_table import rows_of
from specbench.results.reader import StoredRun
from specbench.results.report import figures
from specbench.results.report.acceptance_sections import acceptance
from specbench.results.report.html_page import Report
from specbench.results.report.html_table import Cell, PageTable, shown, without_empty
from specbench.results.report.theory_figures import figure_2, figure_3, figure_4, table_1
from specbench.results.schema import flatten
from specbench.results.tables import account, at, interval, speedup_interval, word
from specbench.results.token_trace import samples

MOST_REQUESTS = 500  # in the table of requests
PROMPT_CHARACTERS = 1500  # of a prompt's end in that table
TEXT_CHARACTERS = 4000  # of an output
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
    "speedup, geometric mean of requests": "speedup/geometric_mean/mean",
    "Theorem 3.8": "speedup/theorem_3_8",
    "corrected": "speedup/corrected",
    "end to end": "speedup/end_to_end",
    "tokens/s": "throughput/speculative_tokens_per_second",
    "plain tokens/s": "throughput/baseline_tokens_per_second",
    "experts woken in a layer by the call of a round": "experts/verify",
    "by a plain call": "experts/plain",
    "weights read, call of a round / plain call": "experts/weights_v",
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
OF_DRAFTS = ("block efficiency", "v")  # numbers that say nothing where nothing was drafted

BEAM = {  # of runs by beam search: name, path in results.json below `beam`
    "w": "beams",
    "u": "drafter_beams",
    "levels": "levels",
    "calls": "calls",
    "target runs a call": "target_runs_a_call",
    "w + u gamma": "most_target_runs_a_call",
    "operations": "operations_factor",
    "requests with equal beams": "equal",
    "of": "requests",
}


def one_run(report: Report) -> None:
    """Adds the sections of a run."""
    run = report.runs[0]
    beam_search(report)
    drafted = run.result["counts"]["drafted"]
    _accounting(report, run)
    if drafted:
        _which_gamma(report, run)
    _categories(report, run)
    _times(report, run)
    experts(report, run)
    if run.result["beta_by_position"]:
        caption = "Theorem 3.8 takes all of them to be alpha."
        figure = report.figure("beta_by_position", caption, lambda: figures.beta_by_position(run))
        report.section("Beta by position", figures=[figure])
    acceptance(report, run)
    under_load(report)
    _prompts(report, run)
    if drafted:
        report.section("The text as it came about", samples=samples(run))
    numbers = {name: at(run.result, path) for name, path in NUMBERS.items()} | flatten(run.result.get("metrics", {}))
    told = {name: text for name, value in numbers.items() if (text := shown(value)) != "-"}
    rows = [{"number": name, "value": text} for name, text in told.items() if drafted or name not in OF_DRAFTS]
    report.section("All numbers", tables=[PageTable(rows)])
    if drafted:
        of_the_paper(report)
    if seconds := phases(run.result):
        report.section("Time of the whole run", texts=[seconds])


def phases(result: Mapping[str, Any]) -> str:
    """The seconds of a run's phases, in words; "" for runs of earlier versions."""
    seconds: Mapping[str, float] = result.get("seconds") or {}
    told = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in seconds.items())
    return f"Seconds until the results were written: {told}." if told else ""


def beam_search(report: Report) -> None:
    """Adds what the beam searches of runs took (A.4), if they are some."""
    rows = [{"run": run.label, **{name: shown(at(run.result, f"beam/{path}")) for name, path in BEAM.items()}}
            for run in report.runs if run.result.get("beam")]  # fmt: skip
    if rows:
        told = (
            "Levels of the search stand where tokens stand elsewhere; a run is the reading of one token by one model."
        )
        report.section("Beam search", texts=[told], tables=[PageTable(rows)])


def experts(report: Report, run: StoredRun) -> None:
    """Adds how many experts the calls of a mixture-of-experts target woke."""
    found = run.result.get("experts")
    if not found:
        return
    told = (
        f"Each token is routed to {found['chosen']} of {found['experts']} experts in each of {found['layers']} layers. "
        "A call reads the weights of every expert that one of its tokens needs: the more tokens it verifies, the more "
        f"bytes. In all, the call of a round reads {found['weights_v']:.2f} times the weights that a plain call reads."
    )
    rows = [
        {"call": row["way"], "tokens": shown(row["tokens"]), "calls": shown(row["calls"]),
         "distinct experts of a layer": shown(row["woken"]), "if routed independently": shown(row["expected"])}
        for row in found["by_tokens"]
    ]  # fmt: skip
    report.section("Experts that a call wakes", texts=[told], tables=[PageTable(rows)])


def _accounting(report: Report, run: StoredRun) -> None:
    if not run.result["speedup"]["accounting"]:
        return
    caption = "Each factor with its 95 % interval; they multiply to the measured speedup."
    figure = report.figure("accounting", caption, lambda: figures.accounting(run))
    told = account(run.result).replace("->", "\N{RIGHTWARDS ARROW}")
    report.section("Why the gain is not Theorem 3.8's", texts=[told], figures=[figure])


def _which_gamma(report: Report, run: StoredRun) -> None:
    caption = (
        "Replay evaluates every constant gamma on this run's text, with the measured time of a round of that many "
        "tokens; the band is a 95 % interval."
        if run.result["gamma_sweep"]
        else f"No other gamma is evaluated on this run: {run.result['no_replay']}."
    )
    figure = report.figure("speedup_by_gamma", caption, lambda: figures.speedup_by_gamma(run))
    report.section("Which gamma", figures=[figure])


def _times(report: Report, run: StoredRun) -> None:
    mean = "A mean round, and the single step of plain decoding."
    trace = "Figure 5 of the paper from this run's trace; the number is the tokens that a round kept."
    drawn = [
        report.figure("round_times", mean, lambda: figures.round_times([run])),
        report.figure("timeline", trace, lambda: figures.timeline(run)),
    ]
    report.section("Where the time goes", figures=drawn)


def _categories(report: Report, run: StoredRun) -> None:
    """Numbers by category, of runs that have them, and of all prompts."""
    found: Mapping[str, Any] = run.result.get("by_category") or {}
    if not found:
        return
    r = run.result
    rows = [_category(name, numbers) for name, numbers in [*found.items(), ("overall", whole(r))]]
    rows = _drafted(rows, r)
    caption = "Block efficiency: tokens per target call. " if r["counts"]["drafted"] else ""
    caption += "Speedup: ratio of total times over the category's requests."
    if (mean := at(r, "speedup/geometric_mean/mean")) is not None:
        ends = at(r, "speedup/geometric_mean/ci95")
        told = f" ({interval(ends)})" if ends else ""
        caption += f" The geometric mean of the requests' speedups is {mean:.2f}x{told}."
    report.section("By category", tables=[PageTable(without_empty(rows), caption)])


def _category(name: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    speedup = numbers.get("speedup") or {}
    measured, ci95, rate = speedup.get("measured"), speedup.get("ci95"), numbers.get("tokens_per_second")
    return {
        "category": name,
        "requests": shown(numbers.get("prompts")),
        "block efficiency": shown(numbers.get("block_efficiency")),
        "alpha": shown(numbers.get("alpha")),
        "speedup": "-" if measured is None else f"{measured:.2f}x",
        "95 %": "-" if ci95 is None else interval(ci95),
        "tokens/s": "-" if not isinstance(rate, int | float) else f"{rate:.1f}",
    }


def _drafted(rows: Sequence[dict[str, Any]], result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a table; where nothing was drafted without the numbers that say nothing then."""
    left_out = () if result["counts"]["drafted"] else OF_DRAFTS
    return [{heading: cell for heading, cell in row.items() if heading not in left_out} for row in rows]


def _prompts(report: Report, run: StoredRun) -> None:
    records = run.prompts
    rows = _drafted([_prompt(record) for record in records[:MOST_REQUESTS]], run.result)
    caption = (
        "Speedup: plain decoding's seconds per token over speculative decoding's, without prefill. One request's is "
        "noisy: a pattern over many requests is worth more than an extreme."
    )
    if len(records) > MOST_REQUESTS:
        caption += f" The first {MOST_REQUESTS:,} of {len(records):,} requests."
    report.section("By request", tables=[PageTable(without_empty(rows), caption, sorts=True)])


def _prompt(record: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table of requests, from a line of prompts.jsonl."""
    texts = {"the end of the prompt": _end(record.get("prompt") or "", PROMPT_CHARACTERS)}
    if "error" in record:
        return {
            "request": record["id"],
            "category": record.get("category") or "-",
            "tokens": Cell("failed", kind="bad"),
            "text": Cell("failed", folded={"error": str(record["error"]), **texts}),
        }
    alpha, kept, speedup = record.get("alpha"), record.get("block_efficiency"), prompt_speedup(record)
    texts["speculative"] = _start(record.get("output") or "", TEXT_CHARACTERS)
    same = record.get("baseline_output") == record.get("output")
    texts["plain"] = "the same" if same else _start(record.get("baseline_output") or "", TEXT_CHARACTERS)
    return {
        "request": record["id"],
        "category": record.get("category") or "-",
        "tokens": str(record["tokens"]),
        "block efficiency": "-" if kept is None else f"{kept:.2f}",
        "alpha": "-" if alpha is None else f"{alpha:.3f}",
        "speedup": "-" if speedup is None else f"{speedup:.2f}x",
        "text": Cell("show", folded=texts),
    }


def prompt_speedup(record: Mapping[str, Any]) -> float | None:
    """Plain decoding's seconds per token over speculative decoding's, of a line of prompts.jsonl."""
    ours, plain = record.get("decode_seconds"), record.get("baseline_decode_seconds")
    if not ours or not plain or not record["tokens"] or not record["baseline_tokens"]:
        return None
    return float((plain / record["baseline_tokens"]) / (ours / record["tokens"]))


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else f"... {text[-most:]}"


def _start(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text):,} characters)"


def under_load(report: Report) -> None:
    """Sections that only some runs have: lenience that was swept, requests that arrived over time."""
    runs = report.runs
    if len({run.result["config"]["lenience"] for run in runs}) > 1:
        caption = "Drift is the mean total variation between a tested position's output law and the target's."
        report.section("Lenience", figures=[report.figure("lenience", caption, lambda: figures.lenience(runs))])
    if any(True for run in runs for _ in rows_of(run.result)):
        caption = (
            "Blue, filled: speculative decoding; orange, hollow: plain decoding of the same arrivals. A percentile is "
            "left out if fewer than five requests are beyond it."
        )
        report.section("Waiting times", figures=[report.figure("latency", caption, lambda: figures.latency(runs))])


def of_the_paper(report: Report) -> None:
    """The paper's figures and Table 1, with the runs on them."""
    runs = report.runs
    report.section(
        "The paper's figures, with what was measured",
        figures=[
            report.figure("paper_2", "Figure 2: tokens a round (equation 1).", lambda: figure_2(runs)),
            report.figure("paper_3", "Figure 3: the best gamma.", lambda: figure_3(runs)),
            report.figure("paper_4", "Figure 4: speed and operations for c = 0.", lambda: figure_4(runs)),
        ],
        tables=[PageTable(table_1(runs), "Table 1, for c = c_hat = 0, and the measured runs.")],
        grid=True,
    )


def cards(result: dict[str, Any]) -> list[dict[str, str]]:
    """The main numbers of a run."""
    speedup, alpha = result["speedup"], result["alpha"]
    found = [("speedup, measured", f"{speedup['measured']:.2f}x", speedup_interval(result))]
    if speedup["theorem_3_8"] is not None:
        found.append(("Theorem 3.8", f"{speedup['theorem_3_8']:.2f}x", "from alpha, gamma and c"))
        error = "too few prompts for an error" if alpha["stderr"] is None else f"standard error {alpha['stderr']:.3f}"
        found.append(("alpha", f"{alpha['mean']:.3f}", error))
    if result["counts"]["drafted"]:
        found.append(("block efficiency", f"{result['block_efficiency']['mean']:.2f}", "tokens per target call (tau)"))
    found.append(("lossless", word(result["lossless"]), result["lossless"]["method"].replace("_", " ")))
    return [{"name": name, "value": value, "note": note} for name, value, note in found]
