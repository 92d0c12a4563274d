"""Phases 5 and 6: how often a round waits for the host, and whether the clocks see all of a round."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from specbench.contrib.gpu_check.check import Number, Phase
from specbench.contrib.gpu_check.fixtures import GRAPHS, PAIR, Lab, jobs_of
from specbench.contrib.gpu_check.timer import Timer as PhaseTimer
from specbench.decoding.speculative import RoundHook, decode_speculative, ignore
from specbench.decoding.state import State
from specbench.decoding.timer import DECODING, Clock, Lap, Timer
from specbench.run.components import Components
from specbench.run.decoder import untimed
from specbench.run.recorder import Recorder, round_numbers

NEW_TOKENS = 40
TRIES = 3  # of which the fastest counts
AHEAD_TOKENS = 80  # of a text whose rounds are launched ahead, but for the last three drafts
CHAINS = tuple(
    (f"{e}, {c}", (f"executor={e}", f"cache={c}")) for e in ("eager", "cudagraph") for c in ("static", "paged")
)
OTHERS = tuple((drafter, (GRAPHS, f"drafter={drafter}")) for drafter in ("ngram", "prompt_lookup", "tree", "medusa"))


class Decoding(NamedTuple):
    """A decode that can be repeated. `run` decodes one text and returns when each of its rounds ended, in seconds; with
    `ahead` rounds are launched ahead, and only those that the host left unread are returned."""

    run: Callable[..., list[float]]
    parts: Components


def decoding(parts: Components) -> Decoding:
    """Decodes one text of the parts' pair, without the queue."""
    target = parts.target

    def run(clock: Clock | None = None, after_round: RoundHook = ignore, ahead: bool = False) -> list[float]:
        ends: list[float] = []

        def note(state: State, *arguments: Any) -> None:
            if state.flights or not ahead:
                ends.append(time.perf_counter())
            after_round(state, *arguments)

        new_tokens = AHEAD_TOKENS if ahead else NEW_TOKENS
        state = State.start(jobs_of(parts, 1, 32, new_tokens), [], parts.spare, target.device)
        state.stride = parts.policy.largest + 1 if ahead else 0
        target.allocate(1, state.tokens.shape[1])
        target.prefill(state)
        decode_speculative(state, target, parts.drafter, parts.policy, parts.verifier, clock or Clock(), note)
        return ends

    return Decoding(run, parts)


class Synchronisations(Phase):
    """Counts what PyTorch's own debug mode reports."""

    number, title, seconds = 5, "waiting for the device", 45
    meaning = (
        "A decoder has to wait once a round, to learn what was kept. The remark names the lines that waited most. "
        "A few waits at the start of a text are allowed for."
    )

    def prepare(self, lab: Lab) -> Lab:
        return lab

    def measure(self, prepared: Lab, timer: PhaseTimer) -> Iterator[Number]:
        for names, limit in ((CHAINS, ("<=", 1.5)), (OTHERS, None)):
            for name, overrides in names:
                run = decoding(prepared.parts("target=stdlib", *overrides)).run
                run()
                rounds: list[float] = []
                found = timer.synchronisations(lambda run=run, rounds=rounds: rounds.extend(run()))  # type: ignore[misc]
                lines = sorted({*found}, key=lambda line: -found.count(line))[:3]
                where = ", ".join(line.rpartition("specbench/")[2] for line in lines)
                waits = len(found) / len(rounds) if found else None
                yield Number(
                    f"waits a round, {name}", waits, "", limit, where or "none was reported, and one is needed"
                )


class Clocks(Phase):
    """Events against the host's clock, with and without the recorder."""

    number, title, seconds = 6, "events against the host's clock", 35
    meaning = (
        "The round's length by events must be its length by the host's clock, and recording must not change it. If "
        "events are shorter, host time hides behind the recorder; if the control without recorder is faster, the "
        "recorder's work is billed to decoding."
    )

    def prepare(self, lab: Lab) -> Decoding:
        return decoding(lab.parts(*PAIR, GRAPHS))

    def measure(self, prepared: Decoding, timer: PhaseTimer) -> Iterator[Number]:
        run, parts = prepared
        prepared.run(after_round=recorder_of(parts))
        alone = min(_between(run()) for _ in range(TRIES))
        yield Number("round without recorder or clock, host", alone * 1e3, "ms")
        ahead = min(_between(run(ahead=True)) for _ in range(TRIES))
        yield Number("round without recorder or clock, launched ahead, host", ahead * 1e3, "ms")
        yield Number("launched ahead / control", ahead / alone, "")
        for name, kind in (("waiting for the recorder", Timer), ("not waiting", Hasty)):
            events, wall = _round_seconds(prepared, kind(parts.target.device))
            judged = kind is Timer
            yield Number(f"round, {name}, events", events * 1e3, "ms")
            yield Number(f"round, {name}, host", wall * 1e3, "ms")
            yield Number(f"events / host, {name}", events / wall, "", (">=", 0.97) if judged else None)
            yield Number(f"host / control, {name}", wall / alone, "", ("<=", 1.05) if judged else None)


class Hasty(Timer):
    """A stopwatch that does not wait for the recorder, as an error to be seen."""

    def _wait(self) -> None:
        """Does nothing: `rounds` is called when the device is idle."""


def recorder_of(parts: Components) -> Recorder:
    """The recorder that a run would have."""
    return Recorder(parts.verifier, parts.metrics, parts.target.executor.leaf(round_numbers))


def _between(ends: list[float]) -> float:
    """Mean seconds from the end of one round to that of the next, the first two left out: each waits for the device,
    to learn what was kept."""
    return (ends[-1] - ends[1]) / (len(ends) - 2)


def _round_seconds(decoding: Decoding, clock: Timer) -> tuple[float, float]:
    """Mean seconds of a round by events and by the host's clock, the first two left out."""
    parts = decoding.parts
    with parts.target.executor.timed(clock.launch):
        decoding.run(clock, untimed(parts.target.executor, recorder_of(parts)))
    if parts.target.device.type == "cuda":
        torch.cuda.synchronize(parts.target.device)
    laps = [lap for lap in clock.rounds() if Lap.VERIFY in lap][2:]
    events = sum(seconds for lap in laps for name, seconds in lap.items() if name in DECODING)
    return events / len(laps), sum(lap[Lap.WALL] for lap in laps) / len(laps)
