"""What a wanted interval needs, from a finished pilot: prompts, tokens, processes and time."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from specbench.contrib.planning.plans import (
    LONGER,
    Plan,
    Spread,
    halves_of_alpha,
    halves_of_time,
    plans,
    share_within,
    shown_plans,
)
from specbench.errors import ConfigError, visible
from specbench.results.atomic_files import as_json, write_text
from specbench.results.completion import keep_other
from specbench.results.parquet import load_sums
from specbench.results.reader import StoredRun, load_run
from specbench.results.table import Table
from specbench.results.terminal import show
from specbench.results.wording import duration, number
from specbench.stats.bootstrap import FEWEST
from specbench.stats.formulas import speedup_of
from specbench.stats.two_way_bootstrap import FEWEST_PROCESSES, TwoWaySums

FILE = "plan.json"
MOSTLY = 0.5  # of the texts


def plan(folder: Path, speedup: float, alpha: float) -> None:
    """Prints what the targets need, and writes plan.json. Raises ConfigError."""
    run = load_run(folder)
    if run.result["in_turn"]:
        raise ConfigError(f"{folder} cannot be a pilot: its times are of all ways that were decoded in turn with it")
    sums = crossed(folder)
    processes, prompts = sums.table.shape[1:]
    if prompts < FEWEST or not sums.point["tested"]:
        raise ConfigError(
            f"{folder} cannot be a pilot: it needs {FEWEST} prompts at least, and guesses that were tested"
        )
    # Of a prompt in a process, with everything that is done for it but loading.
    seconds = float(run.result["provenance"]["seconds"] / processes / prompts)
    tokens, mean = int(run.result["config"]["max_new_tokens"]), run.result["alpha"]["mean"] or 1.0
    # Texts are not made longer where most of them end before max_new_tokens.
    longest = 1.0 if sums.point["stops"] > MOSTLY * run.result["counts"]["prompts"] else LONGER[-1]
    few = processes < FEWEST_PROCESSES  # to tell how processes differ
    spread = of_speedup(run, sums)
    ways = plans(spread, speedup / 100, tokens, seconds, longest)
    ways = [] if few else [way for way in ways if way.processes > 1]
    told = f"+- {speedup:g} % of the speedup"
    if ways:
        show(plan_table(ways, told, 100))
    else:
        show(Text(f"{told}: {'its pilot has too few processes' if few else 'no plan reaches it'}"))
    found = {"speedup": {"target": speedup / 100, **asdict(spread), "plans": [asdict(way) for way in ways]}}
    spread = of_alpha(run, sums)
    ways = plans(spread, alpha / mean, tokens, seconds, longest)
    told = f"+- {alpha:g} of alpha"
    show(plan_table(ways, told, mean) if ways else Text(f"{told}: no plan reaches it"))
    found["alpha"] = {"target": alpha, **asdict(spread), "plans": [asdict(way) for way in ways]}
    told = f"a guess from {prompts} prompts in {processes} process{'es' * (processes > 1)}"
    show(Text(f"{told}; data may have fewer prompts than data.limit says, see data.count"))
    text = as_json({**found, "seconds_of_a_prompt": seconds})
    kept = keep_other(folder / FILE, text)
    write_text(folder / FILE, text)
    before = f", the earlier one is now {kept.name}" if kept else ""
    print(visible(f"written to {folder / FILE}{before}; times are those of this machine, without loading"))


def crossed(folder: Path) -> TwoWaySums:
    """The sums of the run, or of each of its processes."""
    parts = sorted(folder.glob("repeat=*/results.json"))
    folders = [path.parent for path in parts] or [folder]
    return TwoWaySums.of(lambda: map(load_sums, folders))


def of_speedup(run: StoredRun, sums: TwoWaySums) -> Spread:
    """Of the logarithm of the speedup."""
    prompts = [record for record in run.prompts if "error" not in record]
    plain = {r["id"]: r["baseline_decode_seconds"] / max(1, r["baseline_tokens"]) for r in prompts}
    halves = halves_of_time(run.rounds, list(plain), plain)
    return Spread(sums.components(lambda s: {"speedup": speedup_of(s)})["speedup"], share_within(halves))


def of_alpha(run: StoredRun, sums: TwoWaySums) -> Spread:
    """Of the logarithm of alpha."""
    halves = halves_of_alpha(run.rounds, [record["id"] for record in run.prompts if "error" not in record])
    return Spread(sums.components(lambda s: {"alpha": s["beta"] / s["tested"]})["alpha"], share_within(halves))


def plan_table(found: Sequence[Plan], title: str, scale: float) -> Table:
    """The cheapest plan of each number of processes; `scale` turns relative widths into what the target is in."""
    rows = [
        {
            "repeats": str(p.processes) if p.processes > 1 else "1 (this process alone)",
            "data.limit": str(p.prompts),
            "max_new_tokens": str(p.tokens),
            "+-": number(p.half_width * scale, 2 if scale == 100 else 4),
            "time": duration(p.seconds),
        }
        for p in shown_plans(found)
    ]
    return Table.of(rows, f"{title}, cheapest first")
