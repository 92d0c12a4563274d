"""The sections of one run's page, and those that pages of many runs have too."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from specbench.results.acceptance_tables import check_of, classes_table
from specbench.results.category_tables import TAU, Entry, categories_table, overall_numbers
from specbench.results.fields import FIELDS, OF_DRAFTS, RUN_PAGE, at, metrics
from specbench.results.latency_table import load_table
from specbench.results.reader import StoredRun
from specbench.results.report import figures, sweep_figures
from specbench.results.report.html_page import Drawing, Section
from specbench.results.table import Cell, Table
from specbench.results.token_trace import samples
from specbench.results.wording import account, estimate, number, speedup_text, word

MOST_REQUESTS = 500  # in the table of requests
PROMPT_CHARACTERS = 1500  # of a prompt's end in that table
TEXT_CHARACTERS = 4000  # of an output
METHODS = {"top_1": "token by token", "martingale": "a test of the tokens' probabilities", "beams": "beam by beam"}
BEAM = {"w": "beams", "u": "drafter_beams", "levels": "levels", "calls": "calls",
        "target runs a call": "target_runs_a_call", "w + u gamma": "most_target_runs_a_call",
        "operations": "operations_factor", "requests with equal beams": "equal",
        "of": "requests"}  # of runs by beam search: name, path in results.json below `beam`  # fmt: skip


def run_sections(run: StoredRun) -> Iterator[Section]:
    """The sections of a run."""
    result, drafted = run.result, run.result["counts"]["drafted"]
    if drafted:
        replayed = (
            "Replay evaluates every constant gamma on this run's text, with the measured time of a round of that many "
            "tokens; the band is a 95 % interval. A gamma without one is not drawn."
        )
        none = f"No other gamma is evaluated on this run: {result['no_replay']}."
        yield which_gamma({"": [run]}, replayed if result["gamma_sweep"] else none)
    yield from beam_search([run])
    if result["speedup"]["accounting"]:
        caption = "Each factor with its 95 % interval; they multiply to the measured speedup."
        told = account(result).replace("->", "\N{RIGHTWARDS ARROW}")
        drawing = Drawing("accounting", caption, partial(figures.accounting_waterfall, run))
        yield Section("Why the gain is not Theorem 3.8's", [told], [drawing])
    for head, kind in (("category", "by_category"), ("tokens of the prompt", "by_length")):
        if result[kind]:
            caption = f"Speedup: ratio of total times over the row's requests. Block efficiency: {TAU.about}."
            table = categories_table([Entry({}, overall_numbers(result), result[kind])], caption, "measured", head)
            yield Section(f"By {head}", tables=[table])
    trace = "Figure 5 of the paper from this run's trace; the number is the tokens that a round kept."
    timeline = Drawing("timeline", trace, partial(figures.timeline, [run]))
    yield times_of_rounds([run], "A mean round, and the single step of plain decoding.", timeline)
    yield from _experts(result)
    yield from beta_section({"": [run]}, "Theorem 3.8 takes all of them to be alpha.")
    yield from acceptance(result)
    yield from waiting_times([run])
    yield _requests(run)
    if drafted:
        yield Section("The text as it came about", samples=samples(run))
    yield Section("All numbers", tables=[_all_numbers(result)])
    if seconds := phases(result):
        yield Section("Time of the whole run", [seconds])


def which_gamma(groups: sweep_figures.RunGroups, caption: str) -> Section:
    """Speedup by gamma."""
    return Section(
        "Which gamma", figures=[Drawing("speedup_by_gamma", caption, partial(sweep_figures.speedup_by_gamma, groups))]
    )


def beta_section(groups: sweep_figures.RunGroups, caption: str) -> Iterator[Section]:
    """Beta by position, if anything was drafted."""
    if any(run.result["beta_by_position"] for runs in groups.values() for run in runs):
        make = partial(sweep_figures.beta_by_position, groups)
        yield Section("Beta by position", figures=[Drawing("beta_by_position", caption, make)])


def times_of_rounds(runs: Sequence[StoredRun], caption: str, *more: Drawing) -> Section:
    """The time of a round."""
    drawing = Drawing("round_times", caption, partial(figures.round_times, runs))
    return Section("Where the time goes", figures=[drawing, *more])


def beam_search(runs: Sequence[StoredRun]) -> Iterator[Section]:
    """What the beam searches of runs took (A.4), if they are some."""
    rows = [{"run": run.label, **{name: estimate(at(run.result, f"beam/{path}")) for name, path in BEAM.items()}}
            for run in runs if run.result["beam"]]  # fmt: skip
    told = "Levels of the search stand where tokens stand elsewhere; a run is the reading of one token by one model."
    if rows:
        yield Section("Beam search", [told], tables=[Table.of(rows)])


def waiting_times(runs: Sequence[StoredRun]) -> Iterator[Section]:
    """How requests that arrived over time were served."""
    tables = []
    for run in runs:
        if table := load_table(run.result):
            table.title = f"{run.label}: {table.title}" if len(runs) > 1 else table.title
            tables.append(table)
    if tables:
        yield Section("Waiting times", tables=tables)


def acceptance(result: Mapping[str, Any]) -> Iterator[Section]:
    """Which guesses are accepted; nothing where nothing was drafted."""
    found = result["acceptance"]
    if not found or not found["conditional"]:
        return
    alpha, told = at(result, "alpha/mean"), "Theorem 3.8 takes each guess to be accepted with probability alpha."
    drawn = [
        Drawing("accepted_lengths", "Rounds by length; the numbers count them.",
                partial(figures.lengths_figure, found)),
        Drawing("acceptance_by_position", f"With +- 1.96 standard errors. {told}",
                partial(figures.positions_figure, found, alpha)),
    ]  # fmt: skip
    if found["by_entropy"]:
        caption = "Where a model is sure, and where it is not; +- 1.96 standard errors."
        drawn.append(Drawing("alpha_by_entropy", caption, partial(figures.entropy_figure, found)))
    if found["calibration"]:
        error = found["calibration"]["error"]
        caption = f"Calibration of the drafter: the expected error is {error:.3f}, along the target's own text."
        drawn.append(Drawing("calibration", caption, partial(figures.calibration_figure, found)))
    kinds = classes_table(result)
    texts = [f"{told}." for told in check_of(result)]
    yield Section("Which guesses are accepted", texts, drawn, [kinds] if kinds else [], grid=True)


def _experts(result: Mapping[str, Any]) -> Iterator[Section]:
    """How many experts the calls of a mixture-of-experts target woke."""
    found = result["experts"]
    if not found:
        return
    told = (
        f"Each token is routed to {found['chosen']} of {found['experts']} experts in each of {found['layers']} layers. "
        "A call reads the weights of every expert that one of its tokens needs: the more tokens it verifies, the more "
        f"bytes. In all, the call of a round reads {found['weights_v']:.2f} times the weights that a plain call reads."
    )
    headings = {"way": "call", "tokens": "tokens", "calls": "calls", "woken": "distinct experts of a layer",
                "expected": "if routed independently"}  # fmt: skip
    rows = [{heading: estimate(row[name]) for name, heading in headings.items()} for row in found["by_tokens"]]
    yield Section("Experts that a call wakes", [told], tables=[Table.of(rows)])


def _requests(run: StoredRun) -> Section:
    """A row for each request."""
    left_out = () if run.result["counts"]["drafted"] else [FIELDS[name].head for name in OF_DRAFTS]
    rows = [{heading: cell for heading, cell in _request(record).items() if heading not in left_out}
            for record in run.prompts[:MOST_REQUESTS]]  # fmt: skip
    caption = (
        "Speedup: plain decoding's seconds per token over speculative decoding's, without prefill. One request's is "
        "noisy: a pattern over many requests is worth more than an extreme."
    )
    if len(run.prompts) > MOST_REQUESTS:
        caption += f" The first {MOST_REQUESTS:,} of {len(run.prompts):,} requests."
    return Section("By request", tables=[Table.of(rows, caption, sorts=True)])


def _request(record: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table of requests, from a line of prompts.jsonl."""
    prompt = record["prompt"]
    end = prompt if len(prompt) <= PROMPT_CHARACTERS else f"... {prompt[-PROMPT_CHARACTERS:]}"
    row: dict[str, Any] = {"request": record["id"], "category": record["category"] or "-"}
    texts = {"the end of the prompt": end}
    if "error" in record:
        folded = {"error": record["error"], **texts}
        return row | {"tokens": Cell("failed", kind="bad"), "text": Cell("failed", folded=folded)}
    ours, plain = record["output"], record["baseline_output"]
    texts |= {"speculative": _start(ours), "plain": "the same" if ours == plain else _start(plain)}
    return row | {
        "tokens": str(record["tokens"]),
        "block efficiency": number(record["block_efficiency"], 2),
        "alpha": number(record["alpha"], 3),
        "speedup": _speedup(record),
        "text": Cell("show", folded=texts),
    }


def _speedup(record: Mapping[str, Any]) -> str:
    """Plain decoding's seconds per token over speculative decoding's, of a line of prompts.jsonl."""
    ours, plain = record["decode_seconds"], record["baseline_decode_seconds"]
    if not (ours and plain and record["tokens"] and record["baseline_tokens"]):
        return "-"
    return f"{(plain / record['baseline_tokens']) / (ours / record['tokens']):.2f}x"


def _start(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS else f"{text[:TEXT_CHARACTERS]} ... ({len(text):,} characters)"


def _all_numbers(result: Mapping[str, Any]) -> Table:
    """The numbers of a run, with standard errors; where nothing was drafted without those that say nothing then."""
    found = {}
    for name in RUN_PAGE:
        if result["counts"]["drafted"] or name not in OF_DRAFTS:
            path = FIELDS[name].path  # without "/mean" it is an estimate with its standard error
            found[FIELDS[name].head] = at(result, path if "geometric" in name else path.removesuffix("/mean"))
    told = {name: estimate(value) for name, value in (found | metrics(result)).items()}
    return Table.of([{"number": name, "value": text} for name, text in told.items() if text != "-"])


def phases(result: Mapping[str, Any]) -> str:
    """The seconds of a run's phases, in words; "" if they are not known."""
    told = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in result["seconds"].items())
    return f"Seconds until the results were written: {told}." if told else ""


def cards(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The main numbers of a run: name, value and a note."""
    speedup, alpha, lossless = result["speedup"], result["alpha"], result["lossless"]
    found = [("speedup, measured", f"{speedup['measured']:.2f}x", speedup_text(result))]
    if speedup["theorem_3_8"] is not None:
        found.append(("Theorem 3.8", f"{speedup['theorem_3_8']:.2f}x", "from alpha, gamma and c"))
        error = "too few prompts for an error" if alpha["stderr"] is None else f"standard error {alpha['stderr']:.3f}"
        found.append(("alpha", f"{alpha['mean']:.3f}", error))
    if result["counts"]["drafted"]:
        found.append(("block efficiency (tau)", f"{result['block_efficiency']['mean']:.2f}", "tokens per target call"))
    return [*found, ("lossless", word(lossless), METHODS.get(lossless["method"], ""))]
