"""`python -m specbench.replay outputs/RUN [gamma_policy=NAME ...]`: simulates other gamma policies on a run."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from specbench.config.checks import choose
from specbench.config.schema import known_keys
from specbench.decoding.gamma_policy import GammaPolicy
from specbench.measure.simulate import (
    Replayed,
    Text,
    Trace,
    TracedCosts,
    picked_rounds,
    priced,
    replay,
    sweep_rounds,
    traced,
)
from specbench.paths import conf_dir, register_resolvers
from specbench.report.grid import Grid
from specbench.report.tables import interval, show
from specbench.results import HalfCosts, RoundCost
from specbench.settings import ConfigError, explain, stop
from specbench.storage.atomic import as_json, write_text
from specbench.storage.finished import keep_other
from specbench.storage.read import load_run
from specbench.visible import shown, visible

register_resolvers()
FILE = "replay.json"
BEST = "best gamma"  # chosen on one half of the prompts and judged on the other
ALL = "optimal,adaptive,entropy,heuristic,confidence,known_betas,oracle"


def load_trace(folder: Path) -> Trace:
    """The trace of a run's files. Raises ConfigError if one cannot be used, or holds no betas along the text."""
    run = load_run(folder)
    if reason := run.result["no_replay"]:
        raise ConfigError(f"{folder} cannot be replayed: {reason}")
    columns = {name: np.array(values, object) for name, values in run.positions.items()}
    decoded = [record for record in run.prompts if "error" not in record]
    tokens_of = {record["id"]: record["tokens"] for record in decoded}
    texts = [_text(record, columns) for record in decoded if (columns["prompt"] == record["id"]).any()]
    for text, tokens in ((text, tokens_of[text.prompt]) for text in texts):
        if not len(text) == tokens <= text.limit or text.baseline_tokens < 1:
            raise ConfigError(
                f"{folder / 'positions.parquet'} cannot be used: it has {len(text)} tokens of {text.prompt}, and "
                f"prompts.jsonl says {tokens}, of at most {text.limit}, and {text.baseline_tokens} of plain decoding"
            )
    if not texts:
        raise ConfigError(f"{folder} cannot be replayed: there are no betas along its text")
    cost = run.result["cost"]
    costs = [RoundCost(**entry) for entry in cost["by_gamma"]]
    halves = [_half(half, folder) for half in cost.get("halves", ())]  # none in results of earlier versions
    if (
        sorted(id for half in halves for ids in half.clusters for id in ids) != sorted(t.prompt for t in texts)
        and halves
    ):
        raise ConfigError(
            f"{folder / 'results.json'} cannot be used: cost.halves are not of the texts in positions.parquet"
        )
    return traced(texts, costs, run.result["speedup"]["measured"], halves)


def _half(found: dict[str, Any], folder: Path) -> HalfCosts:
    """An entry of `cost.halves`. Raises ConfigError."""
    by_gamma = [RoundCost(**entry) for entry in found["by_gamma"]]
    gammas, count = [cost.gamma for cost in by_gamma], len(by_gamma)
    if not gammas or gammas != sorted({*gammas}) or [len(row) for row in found["covariance"]] != [count] * count:
        raise ConfigError(f"{folder / 'results.json'} cannot be used: cost.halves is not that of a run")
    return HalfCosts(found["clusters"], by_gamma, found["covariance"])


def _text(record: dict[str, Any], columns: dict[str, Any]) -> Text:
    """The text of one line of prompts.jsonl, with its rows of positions.parquet."""
    here = columns["prompt"] == record["id"]
    names = ("outcome", "beta", "acceptance", "relative_entropy", "confidence")
    found = {name: columns[name][here].astype(float) for name in names}
    return Text(
        prompt=record["id"],
        prompt_tokens=record["prompt_tokens"],
        limit=record["limit"],
        baseline_seconds=record["baseline_decode_seconds"],
        baseline_tokens=record["baseline_tokens"],
        root_entropy=np.sqrt(found.pop("relative_entropy")),
        **found,
    )


def policies(trace: Trace, names: Sequence[str], overrides: list[str]) -> Iterator[tuple[str, GammaPolicy]]:
    """The named policies, with settings from `conf/gamma_policy` and the overrides; none may draft more tokens than the
    trace has costs for. Raises ConfigError, also for overrides that apply to none of them."""
    used = not any(override.startswith("gamma=") for override in overrides)
    for name in names:
        choice = [f"gamma_policy={name}", *overrides]
        try:
            with initialize_config_dir(str(conf_dir()), version_base="1.3"):
                config = compose("config", overrides=choice)
        except Exception as error:  # Hydra's composition fails with errors of any class
            raise ConfigError(explain(error, known_keys(choice), choice)) from error
        used = used or "gamma" in config.gamma_policy
        policy = build_policy(config, trace)
        if any(override.startswith("gamma_policy.largest=") for override in overrides):
            refuse_more_than_was_measured(config.gamma_policy.largest, trace)
        yield name, policy
    if not used:
        raise ConfigError(f"gamma=... cannot apply to gamma_policy={','.join(names)}: it is for fixed and heuristic")


def refuse_more_than_was_measured(largest: int, trace: Trace) -> None:
    """Raises ConfigError if a policy is to draft more tokens than the trace has costs for."""
    if largest > trace.largest:
        raise ConfigError(
            f"gamma_policy.largest={largest} is not possible: this run's rounds were measured to {trace.largest} tokens"
        )


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
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


def build_policy(config: DictConfig, trace: Trace) -> GammaPolicy:
    """The policy of a composed configuration. Raises ConfigError."""
    choice = choose(config, "gamma_policy", GammaPolicy, None)
    policy: GammaPolicy = choice.kind.from_settings(choice.settings)
    if policy.largest > trace.largest and policy.constant is None:
        policy = choice.kind.from_settings(replace(choice.settings, largest=trace.largest))
    if policy.calibrated:
        policy.calibrate(TracedCosts(trace))
    return policy


def replay_all(trace: Trace, chosen: Sequence[tuple[str, GammaPolicy]]) -> dict[str, Replayed]:
    """Replays every constant gamma, the best of them, and the chosen policies."""
    rounds = sweep_rounds(trace)
    found = {f"gamma {g}": priced(trace, of_gamma) for g, of_gamma in rounds.items()}
    found[BEST] = priced(trace, picked_rounds(trace, rounds)[1])
    return found | {name: replay(trace, policy) for name, policy in chosen}


def table(trace: Trace, found: dict[str, Replayed]) -> Grid:
    """A table of predicted speedups, and each policy's share of the gain that the oracle has over the best constant
    gamma (section 3.5)."""
    best = found[BEST].speedup
    oracle = found["oracle"].speedup - best if "oracle" in found else None
    told = "each half of the prompts by the other's costs" if trace.halves else "in-sample: too few prompts for halves"
    title = f"measured on this trace: {trace.speedup:.2f}x; replayed {told}"
    headings = ("policy", "speedup", "95 %", "tokens a round", "drafted a round", "of the oracle's extra gain")
    rows = []
    for name, r in found.items():
        share = "-" if not oracle or name.startswith("gamma ") or name == BEST else f"{(r.speedup - best) / oracle:.0%}"
        per_round = f"{r.drafted / r.rounds:.2f}"
        cells = (name, f"{r.speedup:.3f}x", interval(r.ci95), f"{r.block_efficiency:.2f}", per_round, share)
        rows.append(dict(zip(headings, cells, strict=True)))
    return Grid(rows, headings, title, ["policy"])


def main(arguments: list[str] | None = None) -> None:
    """Runs the command and writes replay.json; a mistake of the user's becomes one sentence and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder, with results.json and positions.parquet")
    parser.add_argument("overrides", nargs="*", help=f"gamma_policy=A,B (default: {ALL}) and settings of it")
    args = parser.parse_args(arguments)
    try:
        names, others = split(args.overrides)
        trace = load_trace(args.run)
        found = replay_all(trace, list(policies(trace, names, others)))
        show(table(trace, found))
        text = as_json({name: vars(replayed) for name, replayed in found.items()})
        kept = keep_other(args.run / FILE, text)
        write_text(args.run / FILE, text)
    except ConfigError as error:
        stop(str(error), 2)
    print(visible(f"written to {args.run / FILE}" + (f"; the earlier one is now {kept.name}" if kept else "")))


if __name__ == "__main__":
    main()
