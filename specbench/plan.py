"""`python -m specbench.plan [overrides]`: how many prompts, tokens and processes an answer needs, and for how long.

A short pilot (repeats=3, 12 prompts) shows how much the speedup and alpha vary between processes, prompts and tokens.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from specbench.config.checks import check
from specbench.interrupts import exit_code, handled
from specbench.measure.accounting import speedup_of
from specbench.measure.crossed import CrossedSums
from specbench.measure.estimators import FEWEST
from specbench.measure.planning import (
    LONGER,
    Plan,
    Spread,
    halves_of_alpha,
    halves_of_time,
    plans,
    process_is_unknown,
    share_within,
    shown,
)
from specbench.paths import conf_dir, register_resolvers
from specbench.repeats import run_process
from specbench.report.grid import Grid
from specbench.report.tables import duration, number, show
from specbench.settings import ConfigError, explain, stop
from specbench.storage.atomic import as_json, write_text
from specbench.storage.finished import keep_other
from specbench.storage.read import StoredRun, load_run
from specbench.storage.sums import load_sums
from specbench.visible import visible

register_resolvers()
PILOT = {"data.limit": "12", "repeats": "3", "logger": "none"}  # unless the overrides say otherwise
FILE = "plan.json"
MOSTLY = 0.5  # of the texts


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="specbench.plan", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("overrides", nargs="*", help="of the run to plan, as of python -m specbench")
    parser.add_argument("--pilot", type=Path, metavar="FOLDER", help="a finished run to plan from")
    parser.add_argument("--speedup", type=float, default=2.0, metavar="PERCENT", help="wanted: +- of the speedup (2)")
    parser.add_argument("--alpha", type=float, default=0.01, metavar="X", help="wanted: +- of alpha (.01)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; a mistake of the user's becomes one sentence and exit code 2."""
    args = parser().parse_intermixed_args(arguments)
    try:
        with handled():
            refuse_bad_targets(args.speedup, args.alpha)
            folder = args.pilot or run_pilot(args.overrides)
            if args.pilot and args.overrides:
                raise ConfigError(f"{' '.join(args.overrides)} cannot apply to a run that is over: leave out --pilot")
            plan(folder, args.speedup, args.alpha)
    except ConfigError as error:
        stop(str(error), 2)
    except KeyboardInterrupt:
        stop("interrupted: the same command goes on with the pilot", exit_code())


def refuse_bad_targets(speedup: float, alpha: float) -> None:
    """Raises ConfigError."""
    for name, value, most in (("--speedup", speedup, 100.0), ("--alpha", alpha, 1.0)):
        if not 0 < value <= most:
            raise ConfigError(f"{name} {value:g} is not allowed: it must be above 0, and at most {most:g}")


def run_pilot(overrides: Sequence[str]) -> Path:
    """Runs the pilot, or what is missing of it; returns its folder. Raises ConfigError."""
    given = {override.partition("=")[0] for override in overrides}
    words = [*overrides, *(f"{key}={value}" for key, value in PILOT.items() if key not in given)]
    refuse_impossible(words)
    digest = hashlib.sha256(" ".join(sorted(words)).encode()).hexdigest()[:8]
    folder = Path("outputs") / "plan" / f"pilot-{digest}"
    show(Text(f"pilot: {' '.join(words)}, in {folder}", style="dim"))
    code = run_process([sys.executable, "-m", "specbench", *words, f"hydra.run.dir={folder}"])
    if code != 0:
        raise ConfigError(f"the pilot ended with exit code {code}: see {folder}")
    return folder


def refuse_impossible(words: Sequence[str]) -> None:
    """Raises ConfigError if the overrides are not those of a run."""
    from hydra import compose, initialize_config_dir

    from specbench.config.schema import known_keys

    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            check(compose("config", overrides=list(words), return_hydra_config=True))
    except ConfigError:
        raise
    except Exception as error:  # Hydra's composition fails with errors of any class
        raise ConfigError(explain(error, known_keys(words), words)) from error


def plan(folder: Path, speedup: float, alpha: float) -> None:
    """Prints what the targets need, and writes plan.json. Raises ConfigError."""
    run = load_run(folder)
    if run.result.get("in_turn"):
        raise ConfigError(f"{folder} cannot be a pilot: its times are of all ways that were decoded in turn with it")
    sums = crossed(folder)
    if sums.table.shape[2] < FEWEST or not sums.point["tested"]:
        raise ConfigError(
            f"{folder} cannot be a pilot: it needs {FEWEST} prompts at least, and guesses that were tested"
        )
    seconds, tokens = times_of(run, sums), tokens_of(run)
    found: dict[str, Any] = {}
    for name, target, spread in (("speedup", speedup / 100, of_speedup(run, sums)),
                                 ("alpha", alpha, of_alpha(run, sums))):  # fmt: skip
        relative = target if name == "speedup" else target / (run.result["alpha"]["mean"] or 1.0)
        known = [
            p
            for p in plans(spread, relative, tokens, seconds, longest_of(run, sums))
            if name == "alpha" or p.processes > 1
        ]
        known = known if not process_is_unknown(sums) or name == "alpha" else []
        told = f"+- {speedup:g} % of the speedup" if name == "speedup" else f"+- {alpha:g} of alpha"
        if not known:
            why = "its pilot has too few processes" if process_is_unknown(sums) else "no plan reaches it"
            show(Text(f"{told}: {why}"))
        else:
            show(table(known, told, 100 if name == "speedup" else run.result["alpha"]["mean"]))
        found[name] = {"target": target, **asdict(spread), "plans": [asdict(p) for p in known]}
    processes, clusters = sums.table.shape[1:]
    told = f"a guess from {clusters} prompts in {processes} process{'es' * (processes > 1)}"
    show(Text(f"{told}; data may have fewer prompts than data.limit says, see data.count"))
    text = as_json(found | {"seconds_of_a_prompt": seconds})
    kept = keep_other(folder / FILE, text)
    write_text(folder / FILE, text)
    before = f", the earlier one is now {kept.name}" if kept else ""
    print(visible(f"written to {folder / FILE}{before}; times are those of this machine, without loading"))


def crossed(folder: Path) -> CrossedSums:
    """The sums of the run, or of each of its processes."""
    parts = sorted(folder.glob("repeat=*/results.json"))
    folders = [path.parent for path in parts] or [folder]
    return CrossedSums.of(lambda: map(load_sums, folders))


def of_speedup(run: StoredRun, sums: CrossedSums) -> Spread:
    """Of the logarithm of the speedup."""
    prompts = [record for record in run.prompts if "error" not in record]
    plain = {r["id"]: r["baseline_decode_seconds"] / max(1, r["baseline_tokens"]) for r in prompts}
    halves = halves_of_time(run.rounds, list(plain), plain)
    return Spread(sums.components(lambda s: {"speedup": speedup_of(s)})["speedup"], share_within(halves))


def of_alpha(run: StoredRun, sums: CrossedSums) -> Spread:
    """Of the logarithm of alpha."""
    halves = halves_of_alpha(run.rounds, [record["id"] for record in run.prompts if "error" not in record])
    return Spread(sums.components(lambda s: {"alpha": s["beta"] / s["tested"]})["alpha"], share_within(halves))


def tokens_of(run: StoredRun) -> int:
    """The most new tokens of a prompt."""
    return int(run.result["config"]["max_new_tokens"])


def times_of(run: StoredRun, sums: CrossedSums) -> float:
    """Seconds of a prompt in a process, with everything that is done for it but loading."""
    processes, prompts = sums.table.shape[1:]
    return float(run.result["provenance"]["seconds"] / processes / prompts)


def longest_of(run: StoredRun, sums: CrossedSums) -> float:
    """How many times as long texts may be made: not at all where most of them end before max_new_tokens."""
    return 1.0 if sums.point["stops"] > MOSTLY * run.result["counts"]["prompts"] else LONGER[-1]


def table(found: Sequence[Plan], title: str, scale: float) -> Grid:
    """The cheapest plan of each number of processes; `scale` turns relative widths into what the target is in."""
    rows = [
        {
            "repeats": str(p.processes) if p.processes > 1 else "1 (this process alone)",
            "data.limit": str(p.prompts),
            "max_new_tokens": str(p.tokens),
            "+-": number(p.half_width * scale, 2 if scale == 100 else 4),
            "time": duration(p.seconds),
        }
        for p in shown(found)
    ]
    return Grid(rows, list(rows[0]), f"{title}, cheapest first")


if __name__ == "__main__":
    main()
