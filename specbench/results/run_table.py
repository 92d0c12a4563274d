"""The results of one run as a table for the terminal."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specbench.results.latency_table import load_table
from specbench.results.recommendation import answer, closing, details
from specbench.results.wording import (
    account,
    interval,
    needs,
    number,
    speedup_text,
    times,
    unsteady,
    verdict_text,
    within,
)
from specbench.stats.estimates import RECITED
from specbench.theory import LARGEST

NARROWEST = 24  # characters of a column of remarks
RECITES = 0.1  # of the new tokens: below it nothing is said
RemarkRows = Iterator[tuple[str, str, str]]  # what, its value, a remark


def run_table(result: dict[str, Any], out_dir: Path) -> Group:
    """The answer, then prediction beside measurement, and the verdict. `result` is what results.json holds."""
    config, gamma, choices = result["config"], result["gamma"], result["choices"]
    target, drafter = (config[role].get("path") or choices[role] for role in ("target", "drafter"))
    models = f"{drafter} drafts for {target}" if result["counts"]["drafted"] else target
    policy = f"gamma by {choices['gamma_policy']}" if gamma is None else f"gamma {gamma}"
    scalars = f"temperature {config['temperature']:g}, lenience {config['lenience']:g}, batch {config['batch_size']}"
    of_rounds = [*_beams(result), *_acceptance(result), *_costs(result)]
    of_run = [*_speedups(result), *_workers(result), *_engine(result), *_gammas(result),
              *_others(result)]  # fmt: skip
    waits, found = load_table(result), answer(result)
    return Group(
        Text("\n" + "\n".join(found.lines), style="bold"),
        *([_whole(f"  {found.command}")] if found.command else []),
        Text(),
        Text(f"{models}\n{policy}, {scalars}", overflow="fold"),
        Remarked("measured", [of_rounds, of_run]),
        *([] if waits is None else [waits]),
        *_remarks(result, out_dir),
        Text(closing(result), style="bold"),
    )


def _whole(text: str) -> Text:
    """A line to copy, which is not wrapped."""
    return Text(text, no_wrap=True, overflow="ignore")


class Remarked:
    """Rows of a name, a value and a remark, in sections; on a narrow terminal the remark stands below its row."""

    def __init__(self, heading: str, sections: Sequence[Sequence[tuple[str, str, str]]]):
        self.heading, self.sections = heading, sections

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [row for section in self.sections for row in section]
        name, value = (max(len(row[column]) for row in rows) for column in range(2))
        longest = max(len(word) for row in rows for word in row[2].split() or [""])
        if options.max_width - name - value - 6 < max(longest, NARROWEST):  # between columns, and at both ends
            yield from self._narrow(name, value)
            return
        table = Table("", header_style="dim", box=SIMPLE_HEAD)
        table.columns[0].no_wrap = True
        table.add_column(self.heading, justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        for section in self.sections:
            for row in section:
                table.add_row(*map(Text, row))
            table.add_section()
        yield table

    def _narrow(self, names: int, values: int) -> RenderResult:
        for section in self.sections:
            yield Text("")
            for name, value, remark in section:
                yield Text(f"{name:<{names}} {value:>{values}}", overflow="fold")
                if remark:
                    yield Padding(Text(remark, style="dim", overflow="fold"), (0, 0, 0, 4))


def _beams(result: dict[str, Any]) -> RemarkRows:
    """Of a run by beam search; what is counted as guesses and tokens are then levels of the search."""
    if not (beam := result["beam"]):
        return
    told = f"u = {beam['drafter_beams']} for the drafter; guesses and tokens below are levels"
    yield "beam search", f"w = {beam['beams']}", told
    most = f"at most w + u gamma = {beam['most_target_runs_a_call']} (A.4)"
    yield "  target runs a call", f"{beam['target_runs_a_call']:.1f}", most
    yield "  operations, counted", times(beam["operations_factor"]), "of plain beam search's, both models"
    places = [f"{place['mean']:.2f}" for place in result["beta_by_position"]] or ["-"]
    yield "  levels accepted", places[0], f"first, second, ... level of a round: {', '.join(places)}"


def _acceptance(result: dict[str, Any]) -> RemarkRows:
    if not result["counts"]["drafted"]:
        return  # there is nothing that was accepted, and a round is a target call
    law = f"; beta is {result['acceptance_law']}" if result["acceptance_law"] else ""
    yield "alpha (mean beta)", _pm(result["alpha"]), f"over {result['counts']['tested']:,} tested guesses{law}"
    yield "alpha (accepted / tested)", _pm(result["alpha_counted"]), "cross-check"
    own_text = result["alpha_on_target_text"]
    if own_text["mean"] is not None:
        yield "alpha (target's own text)", _pm(own_text), f"over {own_text['n']:,} positions of plain decoding"
    if (recited := result["recited"] or 0) >= RECITES:
        told = f"of new tokens end {RECITED} in a row that stand earlier in prompt or text: easily guessed"
        yield "  recited", f"{recited:.0%}", told
    counts, means = result["counts"], result["block_efficiency_of_requests"]
    mean = f" (pooled); mean of requests {means['mean']:.3f}" if means and means["mean"] is not None else ""
    yield "block efficiency", _pm(result["block_efficiency"]), f"tau; tokens per target call, of all calls{mean}"
    told = "by the target, per token emitted; 1 in plain decoding"
    yield "tokens evaluated", number(counts["verified"] / counts["tokens"], 3), told


def _costs(result: dict[str, Any]) -> RemarkRows:
    cost, drafted = result["cost"], result["counts"]["drafted"]
    step = f"target step of {cost['target_step_seconds'] * 1e3:.2f} ms"
    o, c, v = (f"{_ends(cost['ci95'].get(name), 3)}" for name in ("o", "c", "v"))
    if not drafted:  # the loop's own cost
        yield "o", number(cost["o"], 3), f"{o}rest of a round / {step}"
        return
    yield "c", number(cost["c"], 3), f"{c}drafter step / {step}"
    yield "v", number(cost["v"], 3), f"{v}verify call / target step; 3.8 assumes 1"
    if (again := cost["read_again"]) is not None:
        yield "  reading again", number(again, 3), "of v: kept tokens, behind a state from before the round"
    spent = f"{cost['o'] * cost['target_step_seconds'] * 1e3:.2f} ms; "
    yield "o", number(cost["o"], 3), f"{o}{spent}rest of a round / target step; 3.8 assumes 0"
    if (ranks := cost["communication"]) is not None:
        parts = ", ".join(f"{name} {number(ranks[name], 3)}" for name in ("c", "v", "o") if ranks[name])
        whole = f"of decoding, between {ranks['processes']} ranks ({ranks['backend']}), waiting for the others included"
        yield "communication", f"{ranks['share']:.0%}", f"{whole}; {ranks['step']:.0%} of a plain step; of {parts}"


def _ends(ci95: Sequence[float] | None, digits: int = 2) -> str:
    """An interval before a remark; nothing where there is none."""
    return "" if ci95 is None else f"{interval(ci95, digits)}; "


def _speedups(result: dict[str, Any]) -> RemarkRows:
    speedup, rates, ci95 = result["speedup"], result["throughput"], result["throughput_ci95"]
    yield "speedup", times(speedup["measured"]), speedup_text(result)
    if reasons := unsteady(result):
        yield "  not steady", "machine", "; ".join(reasons)
    if speedup["theorem_3_8"] is not None:
        known = _ends(speedup["accounting"].get("theorem_3_8", {}).get("ci95"))
        yield "  predicted, Theorem 3.8", times(speedup["theorem_3_8"]), f"{known}from alpha, gamma and c"
    yield "  end to end", times(speedup["end_to_end"]), f"{_ends(speedup['end_to_end_ci95'])}with prefill"
    ours, plain = "speculative_tokens_per_second", "baseline_tokens_per_second"
    told = f"{_ends(ci95.get(ours), 1)}autoregressive {rates[plain]:.1f}{within(ci95.get(plain), 1)}"
    yield "tokens/s", f"{rates[ours]:.1f}", told
    for peer, over in result["speedup_over"].items():
        few, rate = "too few prompts, or groups of rows, for an interval", rates[f"{peer}_tokens_per_second"]
        told = few if over["ci95"] is None else f"95 % interval {interval(over['ci95'])}"
        yield f"  over {peer}", times(over["measured"]), f"{told}; {rate:.1f} tokens/s"


def _workers(result: dict[str, Any]) -> RemarkRows:
    """Of a run on several workers: the speedup of each, and where it ran."""
    for worker in result["workers"]:
        place = f", cores {', '.join(map(str, worker['cores']))}" if worker["cores"] else ""
        told = f"{worker['requests']} requests on {worker['host']}{place}"
        told += f"; {number(worker['tokens_per_second'], 1)} tokens/s{'; it died' * worker['lost']}"
        yield f"  worker {worker['worker']}", times(worker["speedup"]), told


def _engine(result: dict[str, Any]) -> RemarkRows:
    found = result["bandwidth"]
    rate, peak = (found[f"{name}_bytes_per_second"] / 1e9 for name in ("target", "measured_peak"))
    ci95 = found["ci95"].get("target_bytes_per_second")
    told = _ends(ci95 and [end / 1e9 for end in ci95], 1)
    yield "GB/s read", f"{rate:.1f}", f"{told}by a target step; {rate / peak:.0%} of {peak:.1f} measured"
    if experts := result["experts"]:
        remark = f"of {experts['experts']} in a layer, by the call of a round; {experts['plain']:.1f} by a plain one; "
        yield "experts woken", f"{experts['verify']:.1f}", f"{remark}weights read {experts['weights_v']:.2f}x"
    if result["operations_factor"] is not None:
        yield "operations, predicted", times(result["operations_factor"]), "of plain decoding's (Theorem 3.11)"
    if result["executor"].get("chosen"):
        name = result["choices"]["executor"]
        yield "executor", name, _executor(name, result["executor"])


def _executor(name: str, found: dict[str, Any]) -> str:
    """The products that decoding uses, by the number of weight shapes, and the compiled programs."""
    programs, kinds = found["programs"], Counter(names[0] for names in found["chosen"].values())
    products = ", ".join(f"{kind} for {count} shapes" for kind, count in kinds.most_common())
    if programs["used"]:
        made = f", {programs['made']} of them made now" if programs["made"] else ""
        used = f"{programs['found'] + programs['made']} compiled programs{made}"
    else:
        used = "compiled programs are incomplete" if programs["missed"] else "nothing compiled"
        used += ": executor=compiled" * (name == "auto")
    return f"products: {products}; {used}" + (f" ({decision})" if (decision := programs.get("decision")) else "")


def _gammas(result: dict[str, Any]) -> RemarkRows:
    gamma = result["optimal_gamma"]
    if gamma is not None:
        told = f"{gamma} or more" if gamma == LARGEST else str(gamma)
        yield "gamma*, predicted", told, "best by Theorem 3.8, this alpha and c"
    if (check := result["cost_check"]) and result["gamma"] != 0:
        told = "replay's time of this run's rounds over theirs; 1 if costs are right"
        told += "" if check["passed"] else ": no other gamma is judged"
        yield "costs of replay", f"{check['factor']:.2f}x", f"{_ends(check['ci95'], 2)}{told}"
    if len(result["gamma_sweep"]) > 1:  # there was a choice
        pick, upto = result["gamma_pick"], max(entry["gamma"] for entry in result["gamma_sweep"])
        if not any(pick["gammas"]):
            yield "gamma, best by replay", "none", f"no gamma up to {upto} is expected to gain"
            return
        told = f"expected {pick['speedup']:.2f}x, {'in-sample' if pick['in_sample'] else 'by other prompts'}"
        if (over := pick["over_own"]) is not None:
            own = "the policy's own" if result["gamma"] is None else f"that of gamma {result['gamma']}"
            told += f"; {over['factor']:.2f}x {own}{within(over['ci95'])}"
        yield "gamma, best by replay", " or ".join(str(g or "none") for g in dict.fromkeys(pick["gammas"])), told
    elif gamma is not None and result["no_replay"]:
        yield "gamma, best by replay", "-", result["no_replay"]


def _others(result: dict[str, Any]) -> RemarkRows:
    """Rows that only some runs have: drift, metrics."""
    drift = result["drift"]
    if not result["lossless"]["expected"] and drift["tv"] is not None:
        told = f"{_ends(drift['ci95'].get('tv'), 3)}a tested position; KL {drift['kl']:.3f} nats"
        yield "drift (total variation)", f"{drift['tv']:.3f}", told
    for name, numbers in result["metrics"].items():
        for what, value in numbers.items():
            yield name, number(value, 3), what.replace("_", " ")


def _remarks(result: dict[str, Any], out_dir: Path) -> Iterator[Text]:
    """The lines below the table."""
    counts, status = result["counts"], result["status"]
    if told := details(result):
        yield Text(told)
    clusters = result["speedup"]["clusters"]
    if clusters and not result["repeats"] and (told := needs(result["speedup"]["ci95"], counts["prompts"], clusters)):
        yield Text(told)
    if result["speedup"]["accounting"]:
        yield Text(account(result))
    sentence, style = verdict_text(result["lossless"])
    yield Text("lossless: ", style="bold").append(sentence, style=style)
    long, failed = counts["too_long"], counts["failed"]
    notes = [f"{long} request{'s do' if long > 1 else ' does'} not fit the context"] * bool(long)
    notes += [f"{failed} request{'s' * (failed > 1)} failed"] * bool(failed)
    notes += [f"{status}: these are the requests that were finished"] * (status != "complete")
    for note in [*result["notes"], *notes]:
        yield Text(f"note: {note}", style="yellow")
    many = "s" * (counts["prompts"] > 1)
    yield Text(f"{counts['prompts']} request{many}, {counts['tokens']:,} tokens; written to", style="dim")
    near = out_dir.is_absolute() and out_dir.is_relative_to(Path.cwd())
    folder = out_dir.relative_to(Path.cwd()) if near else out_dir
    yield _whole(str(folder))
    for run in sorted((folder / "wandb").glob("offline-run-*"))[-1:]:
        yield Text("the offline W&B run is uploaded by", style="dim")
        yield _whole(shlex.join(["wandb", "sync", str(run)]))


def _pm(estimate: dict[str, Any]) -> str:
    error = "" if estimate["stderr"] is None else f" +- {estimate['stderr']:.3f}"
    return "-" if estimate["mean"] is None else f"{estimate['mean']:.3f}{error}"
