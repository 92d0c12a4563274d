"""Options of a group compared on each prompt in turn, in one process.

The jobs of a multirun stand minutes apart, and a shared machine drifts by more than options differ. Here each
prompt is decoded in all ways, in an order that turns, before the next one is begun.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from common import SPEEDUP, Collect, Measured, Row, Table, commit, machine, number, text
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from rich.progress import track

from specbench.config.build import build
from specbench.config.checks import check
from specbench.data.prompts import Request
from specbench.decoded import Decoded
from specbench.decoding.noise import prompt_key
from specbench.decoding.state import Job
from specbench.measure.estimators import speedup_interval
from specbench.paths import conf_dir
from specbench.run.parts import Parts
from specbench.run.requests import Requests
from specbench.run.session import Session
from specbench.storage.provenance import provenance

PLAIN = "plain"
Way = Callable[[Job], Decoded]


def configuration(*overrides: str) -> DictConfig:
    """What the command line would make of these overrides."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=True)


def built(*overrides: str) -> Parts:
    """The parts of a run with these overrides, without a logger. Raises ConfigError."""
    return build(check(configuration("logger=none", *overrides)), announce=lambda told: None)


def jobs_of(parts: Parts) -> tuple[list[Request], list[Job]]:
    """The first turn of every prompt that fits the context."""
    asked = Requests(parts)
    requests = [request for wanted in asked.groups() for request in wanted.requests]
    return requests, [Job(r.tokens, asked.limit(r), prompt_key(parts.seed, r.id), r.encoder_tokens) for r in requests]


def in_turn(ways: Mapping[str, Way], jobs: Sequence[Job], what: str) -> dict[str, list[Decoded]]:
    """Every prompt decoded in all ways before the next one is begun, in an order that turns."""
    names, found = [*ways], {name: [] for name in ways}
    for index, job in track(list(enumerate(jobs)), what):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(ways[name](job))
    return found


def seconds_and_tokens(decoded: Sequence[Decoded]) -> tuple[list[float], list[int]]:
    """Of every prompt."""
    requests = [request for d in decoded for request in d.requests]
    return [request.seconds for request in requests], [len(request.tokens) for request in requests]


def place(parts: Parts) -> tuple[str, str]:
    """Machine and commit, where the comparison runs."""
    facts = provenance(parts.target.device)
    return machine(facts, str(parts.target.dtype).removeprefix("torch.")), commit(facts)


def compare(group: str) -> Collect:
    """Compares the options that the experiment of a group sweeps, at the temperatures that it sweeps."""

    def collect(overrides: list[str]) -> Measured:
        swept = {key: str(value) for key, value in configuration(f"experiment={group}s").hydra.sweeper.params.items()}
        options = [name.strip() for name in swept.pop(group).split(",")]
        temperatures = swept.pop("temperature", "1").split(",")
        others = [*(f"{key}={value}" for key, value in swept.items()), *overrides]
        rows, where = [], ("", "")
        for temperature in temperatures:
            made = {
                name: built(*others, f"temperature={temperature}", f"{group}={name}")
                for name in track(options, f"loading, temperature {temperature}")
            }
            where = place(made[options[0]])
            with torch.inference_mode():
                rows += _rows(group, float(temperature), made)
        return Measured(rows, *where)

    return collect


def _rows(group: str, temperature: float, made: Mapping[str, Parts]) -> list[Row]:
    """A row for each option, fastest first."""
    sessions = {name: Session(parts) for name, parts in made.items()}
    first = next(iter(sessions.values()))
    _, jobs = jobs_of(first.parts)
    columns = max(job.limit for job in jobs) + max(parts.spare for parts in made.values())
    ways = {name: partial(_decode, session, columns, True) for name, session in sessions.items()}
    ways[PLAIN] = partial(_decode, first, columns, False)
    for way in ways.values():
        way(jobs[0])  # first calls pay for much that others do not
    found = in_turn(ways, jobs, f"temperature {temperature:g}")
    plain, rows = seconds_and_tokens(found[PLAIN]), []
    for name in made:
        speedup, ci95 = speedup_interval(*plain, *seconds_and_tokens(found[name]))
        low, high = ci95 or (None, None)
        rounds = [r for decoded in found[name] for r in decoded.rounds]
        tau = sum(r.tokens for r in rounds) / len(rounds)
        rows.append({"temperature": temperature, group: name, "tau": tau, "speedup": speedup, "low": low, "high": high})
    return sorted(rows, key=lambda row: -row["speedup"])


def _decode(session: Session, columns: int, speculative: bool, job: Job) -> Decoded:
    return session.decode([job], speculative, columns)


def table(group: str) -> Table:
    """How the rows of `compare` are shown."""
    return {"T": text("temperature"), group: text(group), "tau": number("tau"), "speedup": SPEEDUP}
