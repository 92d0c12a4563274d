"""`python -m specbench.plan [overrides]`: how many prompts, tokens and processes an answer needs, and for how long.

A short pilot (repeats=3, 12 prompts) shows how much the speedup and alpha vary between processes, prompts and tokens.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from specbench.config.compose import compose
from specbench.config.validate import ValidatedConfig, check
from specbench.errors import ConfigError, answering, stop
from specbench.results.atomic_files import refuse_no_run
from specbench.results.terminal import show
from specbench.run.signals import exit_code, handled

PILOT = {"data.limit": "12", "repeats": "3", "logger": "none"}  # unless the overrides say otherwise


def plan_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="specbench.plan", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("overrides", nargs="*", help="of the run to plan, as of python -m specbench")
    parser.add_argument("--pilot", type=Path, metavar="FOLDER", help="a finished run to plan from")
    parser.add_argument("--devices", action="store_true", help="say how many devices the models need")
    parser.add_argument("--speedup", type=float, default=2.0, metavar="PERCENT", help="wanted: +- of the speedup (2)")
    parser.add_argument("--alpha", type=float, default=0.01, metavar="X", help="wanted: +- of alpha (.01)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; a mistake of the user's becomes one sentence and exit code 2."""
    args = plan_parser().parse_intermixed_args(arguments)
    try:
        with answering(), handled():
            refuse_bad_targets(args.speedup, args.alpha)
            if args.devices:
                tell_devices(args.overrides)
                return
            if args.pilot:
                refuse_no_run(args.pilot)
            if args.pilot and args.overrides:
                raise ConfigError(f"{' '.join(args.overrides)} cannot apply to a run that is over: leave out --pilot")
            folder = args.pilot or run_pilot(args.overrides)
            from specbench.contrib.planning.table import plan

            plan(folder, args.speedup, args.alpha)
    except KeyboardInterrupt:
        stop("interrupted: the same command goes on with the pilot", exit_code())


def refuse_bad_targets(speedup: float, alpha: float) -> None:
    """Raises ConfigError."""
    for name, value, most in (("--speedup", speedup, 100.0), ("--alpha", alpha, 1.0)):
        if not 0 < value <= most:
            raise ConfigError(f"{name} {value:g} is not allowed: it must be above 0, and at most {most:g}")


def tell_devices(words: Sequence[str]) -> None:
    """Prints how many devices the models of a run need. Raises ConfigError."""
    checked = refuse_impossible([*words, "logger=none"])
    from specbench.contrib.planning.gpu_sizing import devices_needed

    show(Text(devices_needed(checked.choices, checked.root.gamma)))


def run_pilot(overrides: Sequence[str]) -> Path:
    """Runs the pilot, or what is missing of it; returns its folder. Raises ConfigError."""
    given = {override.partition("=")[0] for override in overrides}
    words = [*overrides, *(f"{key}={value}" for key, value in PILOT.items() if key not in given)]
    refuse_impossible(words)
    from specbench.run.child_command import run_process

    digest = hashlib.sha256(" ".join(sorted(words)).encode()).hexdigest()[:8]
    folder = Path("outputs") / "plan" / f"pilot-{digest}"
    show(Text(f"pilot: {' '.join(words)}, in {folder}", style="dim"))
    code = run_process([sys.executable, "-m", "specbench", *words, f"hydra.run.dir={folder}"])
    if code != 0:
        raise ConfigError(f"the pilot ended with exit code {code}: see {folder}")
    return folder


def refuse_impossible(words: Sequence[str]) -> ValidatedConfig:
    """The checked configuration of these overrides. Raises ConfigError if they are not those of a run."""
    return check(compose(words))
