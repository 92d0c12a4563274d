"""The results of one run as a table for the terminal."""

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
from specbench.results.recommendation import verdict_sentence
from specbench.results.wording import account, interval, number, speedup_text, unsteady, verdict_text
from specbench.theory import LARGEST

NARROWEST = 24  # characters of a column of remarks
RemarkRows = Iterator[tuple[str, str, str]]  # what, its value, a remark


def run_table(result: dict[str, Any], out_dir: Path) -> Group:
    """What to do, then prediction beside measurement, and the verdict. `result` is what results.json holds."""
    config = result["config"]
    drafter = f"{_path(result, 'drafter')} drafts for " if result["counts"]["drafted"] else ""
    title = (
        f"{drafter}{_path(result, 'target')}\n"
        f"{_policy(result)}, temperature {config['temperature']:g}, "
        f"lenience {config['lenience']:g}, batch {config['batch_size']}"
    )
    of_rounds = [*_beams(result), *_acceptance(result), *_costs(result)]
    of_run = [*_speedups(result), *_workers(result), *_engine(result), *_gammas(result), *_others(result)]
    waits = load_table(result)
    return Group(
        Text(f"\n{verdict_sentence(result)}\n", style="bold"),
        Text(title, overflow="fold"),
        Remarked("measured", [of_rounds, of_run]),
        *([] if waits is None else [waits]),
        *_remarks(result, out_dir),
    )


class Remarked:
    """Rows of a name, a value and a remark, in sections; on a narrow terminal the remark stands below its row."""

    def __init__(self, heading: str, sections: Sequence[Sequence[tuple[str, str, str]]]):
        self.heading, self.sections = heading, sections
        rows = [row for section in sections for row in section]
        self.name, self.value = (max(len(row[column]) for row in rows) for column in range(2))
        self.longest = max(len(word) for row in rows for word in row[2].split() or [""])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = options.max_width - self.name - self.value - 6  # between columns, and at both ends
        if left < max(self.longest, NARROWEST):
            yield from self._narrow()
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

    def _narrow(self) -> RenderResult:
        for section in self.sections:
            yield Text("")
            for name, value, remark in section:
                yield Text(f"{name:<{self.name}} {value:>{self.value}}", overflow="fold")
                if remark:
                    yield Padding(Text(remark, style="dim", overflow="fold"), (0, 0, 0, 4))


def _beams(result: dict[str, Any]) -> RemarkRows:
    """Of a run by beam search; what is counted as guesses and tokens are then levels of the search."""
    beam = result["beam"]
    if beam is None:
        return
    told = f"u = {beam['drafter_beams']} for the drafter; guesses and tokens below are levels"
    yield "beam search", f"w = {beam['beams']}", told
    most = beam["most_target_runs_a_call"]
    yield "  target runs a call", f"{beam['target_runs_a_call']:.1f}", f"at most w + u gamma = {most} (A.4)"
    yield "  operations, counted", _times(beam["operations_factor"]), "of plain beam search's, both models"
    places = ", ".join(f"{place['mean']:.2f}" for place in result["beta_by_position"])
    yield "  levels accepted", places.split(", ")[0] or "-", f"first, second, ... level of a round: {places}"


def _acceptance(result: dict[str, Any]) -> RemarkRows:
    if not result["counts"]["drafted"]:
        return  # there is nothing that was accepted, and a round is a target call
    yield "alpha (mean beta)", _pm(result["alpha"]), f"over {result['counts']['tested']:,} tested guesses"
    yield "alpha (accepted / tested)", _pm(result["alpha_counted"]), "cross-check"
    own_text = result["alpha_on_target_text"]
    if own_text["mean"] is not None:
        yield "alpha (target's own text)", _pm(own_text), f"over {own_text['n']:,} positions of plain decoding"
    yield "block efficiency", _pm(result["block_efficiency"]), "tokens per target call"


def _costs(result: dict[str, Any]) -> RemarkRows:
    cost = result["cost"]
    step = cost["target_step_seconds"] * 1e3
    if not result["counts"]["drafted"]:  # the loop's own cost
        yield "o", number(cost["o"], 3), f"{_range(cost, 'o')}rest of a round / target step of {step:.2f} ms"
        return
    yield "c", number(cost["c"], 3), f"{_range(cost, 'c')}drafter step / target step of {step:.2f} ms"
    yield "v", number(cost["v"], 3), f"{_range(cost, 'v')}verify call / target step; 3.8 assumes 1"
    if (again := cost["read_again"]) is not None:
        yield "  reading again", number(again, 3), "of v: kept tokens, behind a state from before the round"
    yield "o", number(cost["o"], 3), f"{_range(cost, 'o')}rest of a round / target step; 3.8 assumes 0"
    if (ranks := cost["communication"]) is not None:
        yield "communication", f"{ranks['share']:.0%}", _communication(ranks)


def _communication(ranks: dict[str, Any]) -> str:
    """What the share of time in collectives is of, and which part of each cost it is."""
    parts = ", ".join(f"{name} {number(ranks[name], 3)}" for name in ("c", "v", "o") if ranks[name])
    whole = f"of decoding, between {ranks['processes']} ranks ({ranks['backend']}), waiting for the others included"
    return f"{whole}; {ranks['step']:.0%} of a plain step; of {parts}"


def _ends(ci95: Sequence[float] | None, digits: int = 2, then: str = "; ") -> str:
    """An interval before a remark; nothing where there is none."""
    return "" if ci95 is None else f"{interval(ci95, digits)}{then}"


def _range(values: dict[str, Any], name: str) -> str:
    """The interval of one of `values`, before a remark."""
    return _ends(values["ci95"].get(name), 3)


def _speedups(result: dict[str, Any]) -> RemarkRows:
    speedup, rates = result["speedup"], result["throughput"]
    yield "speedup", _times(speedup["measured"]), speedup_text(result)
    if reasons := unsteady(result):
        yield "  not steady", "machine", "; ".join(reasons)
    if speedup["theorem_3_8"] is not None:
        known = speedup["accounting"].get("theorem_3_8", {}).get("ci95")
        yield "  predicted, Theorem 3.8", _times(speedup["theorem_3_8"]), f"{_ends(known)}from alpha, gamma and c"
    if predicted := speedup["predicted"]:
        told = f"of every second prompt, from the others; {interval(predicted['ci95'])}"
        yield "  predicted, all costs", _times(predicted["speedup"]), f"{told}; measured {predicted['measured']:.2f}x"
    yield "  end to end", _times(speedup["end_to_end"]), f"{_ends(speedup['end_to_end_ci95'])}with prefill"
    ours, plain = (f"{who}_tokens_per_second" for who in ("speculative", "baseline"))
    own, beside = (_ends(result["throughput_ci95"].get(name), 1, "") for name in (ours, plain))
    told = f"{own}{'; ' * bool(own)}autoregressive {rates[plain]:.1f}{f' ({beside})' * bool(beside)}"
    yield "tokens/s", f"{rates[ours]:.1f}", told
    for peer, over in result["speedup_over"].items():
        few, rate = "too few prompts, or groups of rows, for an interval", rates[f"{peer}_tokens_per_second"]
        told = few if over["ci95"] is None else f"95 % interval {interval(over['ci95'])}"
        yield f"  over {peer}", _times(over["measured"]), f"{told}; {rate:.1f} tokens/s"
    yield from _servers(result)


def _servers(result: dict[str, Any]) -> RemarkRows:
    """What was seen of peers that are servers, and what they count of their own speculative decoding."""
    for peer, found in result["servers"].items():
        first, gaps, texts = found["latency"]["first_token"]["p50"], found["latency"]["inter_token"], found["texts"]
        told = "median, another process, maybe another machine"
        if gaps["p50"] is not None:
            told += f"; between steps p50 {gaps['p50'] * 1e3:.1f}, p99 {gaps['p99'] * 1e3:.1f} ms"
        told += "; prompts may have been read before" * found["keeps_prefixes"]
        yield f"  {peer}, first token", f"{first * 1e3:.1f} ms", told
        why = f"not known: {found['no_alpha']}" if found["no_alpha"] else f"over {found['alpha']['n']:,} tested guesses"
        yield f"  {peer}, alpha", _pm(found["alpha"]), why
        why = found["no_block_efficiency"] or f"over {found['block_efficiency']['n']:,} rounds"
        yield f"  {peer}, block efficiency", _pm(found["block_efficiency"]), why
        if texts["compared"]:
            told = "equal plain decoding's here"
            if difference := texts["first_difference"]:
                told += f"; {difference['request']} parts at character {difference['character']}"
            yield f"  {peer}, texts", f"{texts['equal']} of {texts['compared']}", told


def _workers(result: dict[str, Any]) -> RemarkRows:
    """Of a run on several workers: the speedup of each, and where it ran."""
    for worker in result["workers"]:
        place = ", ".join(map(str, worker["cores"]))
        told = f"{worker['requests']} requests on {worker['host']}{f', cores {place}' * bool(place)}"
        told += f"; {number(worker['tokens_per_second'], 1)} tokens/s{'; it died' * worker['lost']}"
        yield f"  worker {worker['worker']}", _times(worker["speedup"]), told


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
        yield "operations, predicted", _times(result["operations_factor"]), "of plain decoding's (Theorem 3.11)"
    if chosen := result["executor"].get("chosen"):
        name = result["choices"]["executor"]
        yield "executor", name, _executor(name, chosen, result["executor"]["programs"])


def _executor(name: str, chosen: dict[str, list[str]], programs: dict[str, Any]) -> str:
    """The products that decoding uses, by the number of weight shapes, and the compiled programs."""
    kinds = Counter(names[0] for names in chosen.values())
    products = ", ".join(f"{kind} for {count} shapes" for kind, count in kinds.most_common())
    made = f", {programs['made']} of them made now" if programs["made"] else ""
    count = programs["found"] + programs["made"]
    without = "compiled programs are incomplete" if programs["missed"] else "nothing compiled"
    hint = ": executor=compiled" if name == "auto" else ""
    used = f"{count} compiled programs{made}" if programs["used"] else without + hint
    return f"products: {products}; {used}" + (f" ({decision})" if (decision := programs.get("decision")) else "")


def _gammas(result: dict[str, Any]) -> RemarkRows:
    gamma = result["optimal_gamma"]
    if gamma is not None:
        told = f"{gamma} or more" if gamma == LARGEST else str(gamma)
        yield "gamma*, predicted", told, "best by Theorem 3.8, this alpha and c"
    if len(result["gamma_sweep"]) > 1:  # there was a choice
        pick = result["gamma_pick"]
        told = f"expected {pick['speedup']:.2f}x{', in-sample' if pick['in_sample'] else ', by other prompts'}"
        if (regret := result["regret"]) is not None:
            less = f"{abs(regret):.1%} {'less' if regret < 0 else 'more'} than"
            told += f"; {less if abs(regret) >= 0.0005 else 'as much as'} gamma {result['gamma']}"
        yield "gamma, best by replay", " or ".join(map(str, dict.fromkeys(pick["gammas"]))), told


def _others(result: dict[str, Any]) -> RemarkRows:
    """Rows that only some runs have: drift, metrics."""
    drift = result["drift"]
    if not result["lossless"]["expected"] and drift["tv"] is not None:
        told = f"{_range(drift, 'tv')}a tested position; KL {drift['kl']:.3f} nats"
        yield "drift (total variation)", f"{drift['tv']:.3f}", told
    for name, numbers in result["metrics"].items():
        for what, value in numbers.items():
            yield name, number(value, 3), what.replace("_", " ")


def _remarks(result: dict[str, Any], out_dir: Path) -> Iterator[Text]:
    """The lines below the table."""
    counts = result["counts"]
    if result["speedup"]["accounting"]:
        yield Text(account(result))
    sentence, style = verdict_text(result["lossless"])
    yield Text("lossless: ", style="bold").append(sentence, style=style)
    if (ci95 := result["speedup"]["ci95"]) is not None and ci95[1] < 1:
        yield Text("speculative decoding was slower than plain decoding here", style="yellow")
    long, failed, status = counts["too_long"], counts["failed"], result["status"]
    notes = [f"{long} request{'s do' if long > 1 else ' does'} not fit the context"] if long else []
    notes += [f"{failed} request{'s' * (failed > 1)} failed"] if failed else []
    notes += [f"{status}: these are the requests that were finished"] if status != "complete" else []
    for note in [*result["notes"], *notes]:
        yield Text(f"note: {note}", style="yellow")
    many = "s" * (counts["prompts"] > 1)
    yield Text(f"{counts['prompts']} request{many}, {counts['tokens']:,} tokens; written to", style="dim")
    near = out_dir.is_absolute() and out_dir.is_relative_to(Path.cwd())
    yield Text(str(out_dir.relative_to(Path.cwd()) if near else out_dir), style="dim", overflow="fold")


def _policy(result: dict[str, Any]) -> str:
    if result["gamma"] is not None:
        return f"gamma {result['gamma']}"
    return f"gamma by {result['choices']['gamma_policy']}"


def _path(result: dict[str, Any], role: str) -> str:
    """The checkpoint, or where there is none the option that was chosen."""
    return str(result["config"][role].get("path") or result["choices"][role])


def _pm(estimate: dict[str, Any]) -> str:
    if estimate["mean"] is None:
        return "-"
    error = "" if estimate["stderr"] is None else f" +- {estimate['stderr']:.3f}"
    return f"{estimate['mean']:.3f}{error}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
