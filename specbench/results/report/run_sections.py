"""The sections of one run's page."""

from collections.abc import Mapping, Sequence
from typing import Any

from specbench.results.category_tables import overall_numbers
from specbench.results.fields import FIELDS, OF_DRAFTS, RUN_PAGE, at, metrics
from specbench.results.latency_table import served_rows
from specbench.results.reader import StoredRun
from specbench.results.report import figures
from specbench.results.report.acceptance_sections import add_acceptance
from specbench.results.report.html_page import Report
from specbench.results.report.theory_figures import figure_2, figure_3, figure_4, table_1
from specbench.results.table import Cell, Table
from specbench.results.token_trace import samples
from specbench.results.wording import account, estimate, interval, number, speedup_text, word

MOST_REQUESTS = 500  # in the table of requests
PROMPT_CHARACTERS = 1500  # of a prompt's end in that table
TEXT_CHARACTERS = 4000  # of an output
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


def add_run(report: Report) -> None:
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
        figure = report.figure("beta_by_position", caption, lambda: figures.beta_figure(run))
        report.section("Beta by position", figures=[figure])
    add_acceptance(report, run)
    under_load(report)
    _prompts(report, run)
    if drafted:
        report.section("The text as it came about", samples=samples(run))
    report.section("All numbers", tables=[all_numbers(run.result)])
    if drafted:
        of_the_paper(report)
    if seconds := phases(run.result):
        report.section("Time of the whole run", texts=[seconds])


def all_numbers(result: Mapping[str, Any]) -> Table:
    """The numbers of a run, with standard errors; where nothing was drafted without those that say nothing then."""
    names = [name for name in RUN_PAGE if result["counts"]["drafted"] or name not in OF_DRAFTS]
    found = {FIELDS[name].head: at(result, FIELDS[name].path.removesuffix("/mean"))
             if "geometric" not in name else FIELDS[name].of(result) for name in names}  # fmt: skip
    told = {name: text for name, value in (found | metrics(result)).items() if (text := estimate(value)) != "-"}
    return Table.of([{"number": name, "value": text} for name, text in told.items()])


def phases(result: Mapping[str, Any]) -> str:
    """The seconds of a run's phases, in words; "" if they are not known."""
    told = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in result["seconds"].items())
    return f"Seconds until the results were written: {told}." if told else ""


def beam_search(report: Report) -> None:
    """Adds what the beam searches of runs took (A.4), if they are some."""
    rows = [{"run": run.label, **{name: estimate(at(run.result, f"beam/{path}")) for name, path in BEAM.items()}}
            for run in report.runs if run.result["beam"]]  # fmt: skip
    if rows:
        told = (
            "Levels of the search stand where tokens stand elsewhere; a run is the reading of one token by one model."
        )
        report.section("Beam search", texts=[told], tables=[Table.of(rows)])


def experts(report: Report, run: StoredRun) -> None:
    """Adds how many experts the calls of a mixture-of-experts target woke."""
    found = run.result["experts"]
    if not found:
        return
    told = (
        f"Each token is routed to {found['chosen']} of {found['experts']} experts in each of {found['layers']} layers. "
        "A call reads the weights of every expert that one of its tokens needs: the more tokens it verifies, the more "
        f"bytes. In all, the call of a round reads {found['weights_v']:.2f} times the weights that a plain call reads."
    )
    rows = [
        {"call": row["way"], "tokens": estimate(row["tokens"]), "calls": estimate(row["calls"]),
         "distinct experts of a layer": estimate(row["woken"]), "if routed independently": estimate(row["expected"])}
        for row in found["by_tokens"]
    ]  # fmt: skip
    report.section("Experts that a call wakes", texts=[told], tables=[Table.of(rows)])


def _accounting(report: Report, run: StoredRun) -> None:
    if not run.result["speedup"]["accounting"]:
        return
    caption = "Each factor with its 95 % interval; they multiply to the measured speedup."
    figure = report.figure("accounting", caption, lambda: figures.accounting_waterfall(run))
    told = account(run.result).replace("->", "\N{RIGHTWARDS ARROW}")
    report.section("Why the gain is not Theorem 3.8's", texts=[told], figures=[figure])


def _which_gamma(report: Report, run: StoredRun) -> None:
    caption = (
        "Replay evaluates every constant gamma on this run's text, with the measured time of a round of that many "
        "tokens; the band is a 95 % interval."
        if run.result["gamma_sweep"]
        else f"No other gamma is evaluated on this run: {run.result['no_replay']}."
    )
    figure = report.figure("speedup_by_gamma", caption, lambda: figures.gamma_figure(run))
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
    result = run.result
    if not result["by_category"]:
        return
    rows = [
        _category(name, own) for name, own in [*result["by_category"].items(), ("overall", overall_numbers(result))]
    ]
    caption = "Block efficiency: tokens per target call. " if result["counts"]["drafted"] else ""
    caption += "Speedup: ratio of total times over the category's requests."
    if (mean := at(result, "speedup/geometric_mean/mean")) is not None:
        ends = at(result, "speedup/geometric_mean/ci95")
        told = f" ({interval(ends)})" if ends else ""
        caption += f" The geometric mean of the requests' speedups is {mean:.2f}x{told}."
    report.section("By category", tables=[Table.of(_drafted(rows, result), caption)])


def _category(name: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    speedup = numbers["speedup"]
    return {
        "category": name,
        "requests": str(numbers["prompts"]),
        "block efficiency": estimate(numbers["block_efficiency"]),
        "alpha": estimate(numbers["alpha"]),
        "speedup": f"{speedup['measured']:.2f}x",
        "95 %": speedup["ci95"] and interval(speedup["ci95"]),
        "tokens/s": number(numbers["tokens_per_second"], 1),
    }


def _drafted(rows: Sequence[dict[str, Any]], result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a table; where nothing was drafted without the numbers that say nothing then."""
    left_out = () if result["counts"]["drafted"] else [FIELDS[name].head for name in OF_DRAFTS]
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
    report.section("By request", tables=[Table.of(rows, caption, sorts=True)])


def _prompt(record: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table of requests, from a line of prompts.jsonl."""
    texts = {"the end of the prompt": _end(record["prompt"], PROMPT_CHARACTERS)}
    row: dict[str, Any] = {"request": record["id"], "category": record["category"] or "-"}
    if "error" in record:
        folded = {"error": record["error"], **texts}
        return row | {"tokens": Cell("failed", kind="bad"), "text": Cell("failed", folded=folded)}
    same, speedup = record["baseline_output"] == record["output"], prompt_speedup(record)
    texts["speculative"] = _start(record["output"], TEXT_CHARACTERS)
    texts["plain"] = "the same" if same else _start(record["baseline_output"], TEXT_CHARACTERS)
    row |= {"tokens": str(record["tokens"]), "block efficiency": number(record["block_efficiency"], 2)}
    row |= {"alpha": number(record["alpha"], 3), "speedup": speedup and f"{speedup:.2f}x"}
    return row | {"text": Cell("show", folded=texts)}


def prompt_speedup(record: Mapping[str, Any]) -> float | None:
    """Plain decoding's seconds per token over speculative decoding's, of a line of prompts.jsonl."""
    ours, plain = record["decode_seconds"], record["baseline_decode_seconds"]
    if not (ours and plain and record["tokens"] and record["baseline_tokens"]):
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
        report.section("Lenience", figures=[report.figure("lenience", caption, lambda: figures.lenience_figure(runs))])
    if any(True for run in runs for _ in served_rows(run.result)):
        caption = (
            "Blue, filled: speculative decoding; orange, hollow: plain decoding of the same arrivals. A percentile is "
            "left out if fewer than five requests are beyond it."
        )
        report.section(
            "Waiting times", figures=[report.figure("latency", caption, lambda: figures.latency_figure(runs))]
        )


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
        tables=[Table.of(table_1(runs), "Table 1, for c = c_hat = 0, and the measured runs.")],
        grid=True,
    )


def cards(result: dict[str, Any]) -> list[dict[str, str]]:
    """The main numbers of a run."""
    speedup, alpha = result["speedup"], result["alpha"]
    found = [("speedup, measured", f"{speedup['measured']:.2f}x", speedup_text(result))]
    if speedup["theorem_3_8"] is not None:
        found.append(("Theorem 3.8", f"{speedup['theorem_3_8']:.2f}x", "from alpha, gamma and c"))
        error = "too few prompts for an error" if alpha["stderr"] is None else f"standard error {alpha['stderr']:.3f}"
        found.append(("alpha", f"{alpha['mean']:.3f}", error))
    if result["counts"]["drafted"]:
        found.append(("block efficiency", f"{result['block_efficiency']['mean']:.2f}", "tokens per target call (tau)"))
    found.append(("lossless", word(result["lossless"]), result["lossless"]["method"].replace("_", " ")))
    return [{"name": name, "value": value, "note": note} for name, value, note in found]
