"""`python -m specbench.replay outputs/RUN [gamma_policy=NAME ...]`: simulates other gamma policies on a run, or with
`cost=START,STEP,TOKEN,CONTEXT [batch_size=...] [context=...]` on batches of its texts, or of a file of traces."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from specbench.errors import ConfigError, answering, shown, visible
from specbench.results.atomic_files import as_json, refuse_no_run, write_text
from specbench.results.terminal import show

FILE = "replay.json"
ALL = "optimal,adaptive,entropy,heuristic,confidence,known_betas,oracle"
LOAD_KEYS = tuple(f"{key}=" for key in ("batch_size", "context", "cost", "by_row", "tokens"))


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of the policies, and the overrides of their settings. Raises ConfigError for all that a replay cannot
    change, since the run is over."""
    for override in overrides:
        key = override.partition("=")[0]
        known = key in ("gamma", "gamma_policy", "hydra.searchpath") or key.startswith("gamma_policy.")
        if "=" not in override or not known:
            raise ConfigError(
                f"{shown(override)} cannot apply to a run that is over: give gamma_policy=NAME, a setting of it, "
                "gamma=N or hydra.searchpath=[file://FOLDER]"
            )
    chosen = [override for override in overrides if override.startswith("gamma_policy=")]
    if len(chosen) > 1:
        raise ConfigError(f"{shown(' '.join(chosen))} is not possible: give one list, gamma_policy=A,B")
    names = chosen[0].partition("=")[2] if chosen else ALL
    return names.split(","), [override for override in overrides if override not in chosen]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command and writes replay.json; a mistake of the user's becomes one sentence and exit code 2."""
    parser = argparse.ArgumentParser(prog="specbench.replay", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder, with results.json and positions.parquet, or a file")
    parser.add_argument("overrides", nargs="*", help=f"gamma_policy=A,B (default: {ALL}) and settings of it")
    args = parser.parse_args(arguments)
    with answering():
        replay_run(args.run, args.overrides)


def replay_run(folder: Path, overrides: Sequence[str]) -> None:
    """Replays policies on a run, writes replay.json and prints the table; or prints that of batches. Raises
    ConfigError."""
    of_loads = [override for override in overrides if override.startswith(LOAD_KEYS)]
    names, others = split_overrides([override for override in overrides if override not in of_loads])
    named = any(override.startswith("gamma_policy=") for override in overrides)
    if not folder.is_file():
        refuse_no_run(folder)
    if of_loads or folder.is_file():
        from specbench.contrib.replay import loads

        wanted = loads.asked_loads(of_loads)
        show(loads.table_of_loads(loads.load_texts(folder), wanted, names if named else loads.ALL.split(","), others))
        return
    from specbench.contrib.replay.policies import DRAWN, policies, replay_all
    from specbench.contrib.replay.table import replay_notes, replay_table
    from specbench.contrib.replay.trace import load_trace
    from specbench.results.completion import keep_other

    trace, notes = load_trace(folder), list[str]()
    if not named and not trace.greedy:
        names.remove("confidence")
        notes.append(f"confidence is left out: {DRAWN}.")
    found, picked = replay_all(trace, list(policies(trace, names, others)))
    text = as_json({name: vars(replayed) for name, replayed in found.items()})
    kept = keep_other(folder / FILE, text)
    write_text(folder / FILE, text)
    show(replay_table(trace, found), *map(Text, [*replay_notes(trace, found, picked), *notes]))
    print(visible(f"written to {folder / FILE}" + (f"; the earlier one is now {kept.name}" if kept else "")))
