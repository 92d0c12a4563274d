"""Decodes parts of the prompts in several ways in turn, whose models are loaded once, and keeps what was measured."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from specbench.config.build import Targets, build
from specbench.config.components import Components, segment_size
from specbench.config.validate import ValidatedConfig
from specbench.contrib.advise.race import PLAIN, Race, Unit
from specbench.contrib.advise.ways import Load, Ways, checked_way
from specbench.errors import ConfigError, first_line
from specbench.results.console import decoding_progress
from specbench.results.schema import RunResult
from specbench.results.terminal import show
from specbench.results.wording import duration, word
from specbench.run.execute import save
from specbench.run.jobs import RunJob
from specbench.run.pooled import WORST
from specbench.run.run import run_in_turn
from specbench.stats.records import DecodedRequest, Group, RunRecord

log = logging.getLogger(__name__)
PART = 8  # units of a part, if they are of several requests
READ_IN_RACES = 5_000  # tokens that a verdict reads again before the measurement, beside texts that differ
Stage = dict[str, Any]  # what advice.json holds of a stage


class LoadBench:
    """The ways of one load. `folder` gets a folder for each part and way."""

    def __init__(
        self, common: Sequence[str], load: Load, folder: Path, targets: Targets, save_state: Callable[[], None]
    ):
        self.common, self.load, self.folder, self.targets = [*common, *load.words], load, folder, targets
        self.save_state = save_state
        self.built: dict[str, Components] = {}  # by the overrides of a way
        self.refused: dict[str, str] = {}

    def total(self, ways: Ways) -> int:
        """Builds the ways; those that cannot be built are `refused`, and taken out. Returns the number of prompts, 0 if
        no way is left."""
        for label, words in list(ways.items()):
            if (key := " ".join(words)) in self.built:
                continue
            show(Text(f"loading {label}", style="dim"))
            try:
                self.built[key] = build(self.checked(words), log.info, self.targets)
            except (ConfigError, RuntimeError, MemoryError) as error:
                self.refused[label] = str(error) if isinstance(error, ConfigError) else first_line(error)
                log.warning("%s is left out: %s", label, self.refused[label])
                del ways[label]
        return len(self.example.prompts) if ways else 0

    @property
    def example(self) -> Components:
        """Built parts, whose prompts and workload are those of all."""
        return next(iter(self.built.values()))

    def unit_of(self, load: Load) -> int:
        """The requests of a unit at a load."""
        return load.unit if load.unit == 1 else segment_size(load.rows, self.example.workload)

    def checked(self, words: Sequence[str]) -> ValidatedConfig:
        """The checked configuration of a way. Raises ConfigError."""
        return checked_way((*self.common, *words))

    def run(self, name: str, ways: Ways, race: Race, state: Stage, last: int, until: float) -> None:
        """Decodes units of the prompts from `state`'s next one to number `last` until the race is over, or until that
        second of the clock. `state` keeps the units. Raises KeyboardInterrupt after a signal, with everything kept."""
        for unit in state["units"]:
            race.add(unit)
        size = self.unit_of(self.load)
        while not race.over and time.monotonic() < until:
            skip = state["next"]
            units = min(race.most - len(race.units), (last - skip) // size, PART if size > 1 else race.most)
            if units < 1:
                break
            left = {way: ways[way] for way in race.drafting}
            interrupted = self._part(f"{name}-{len(race.units)}", left, race, state, units * size, until)
            self.save_state()
            if interrupted:
                raise KeyboardInterrupt("what was finished is kept, and the same command goes on")
            if state["next"] == skip:
                break

    def _part(self, name: str, ways: Ways, race: Race, state: Stage, take: int, until: float) -> bool:
        """One run of each way on the next prompts. Returns whether a signal has ended it."""
        labels, skip, seen, stopped, clock = list(ways), state["next"], [0], set[int](), list[float]()
        place = self.folder / self.load.label.replace(", ", "-").replace(" ", "_") / name
        built = [self.built[" ".join(ways[way])] for way in labels]
        first = skip + built[0].config["skip"]  # which the command may have given
        read = built[0].verdict_tokens
        if not name.startswith("measurement"):
            read = min(read, READ_IN_RACES)
        words = [[*ways[way], f"skip={first}", f"take={take}", f"verdict_tokens={read}"] for way in labels]
        jobs = [RunJob([*self.common, *own], place / f"way-{number}", self.checked(own))
                for number, own in enumerate(words)]  # fmt: skip
        prompts = [prompt if len(prompt.turns) == 1 else replace(prompt, turns=prompt.turns[:1])
                   for prompt in built[0].prompts[skip : skip + take]]  # fmt: skip
        numbers = {prompt.id: number for number, prompt in enumerate(prompts, skip)}

        def stops(records: Sequence[RunRecord]) -> Collection[int]:
            for way, record in zip(labels, records, strict=True):
                if record.failures and way in race.left:
                    race.leave(way, f"failed: {record.failures[0].error}")
            while any(len(record.groups) > seen[0] for record in records):
                groups = {way: record.groups[seen[0]] for way, record in zip(labels, records, strict=True)
                          if way in race.left and len(record.groups) > seen[0]}  # fmt: skip
                seen[0] += 1
                if groups:
                    state["units"].append(unit_of(groups))
                    state["next"] = 1 + max(numbers[r.request.prompt_id] for r in next(iter(groups.values())).results)
                    before = len(race.left)
                    race.add(state["units"][-1])
                    if len(race.left) < before and len(race.ways) > 2:
                        self._tell(name, race)
            over = race.over or time.monotonic() >= until
            stopped.update(number for number, way in enumerate(labels) if over or way not in race.left)
            clock.append(time.monotonic())
            if len(clock) == 2 and not over:  # the first unit's time has loading and warming up in it
                seconds = (clock[1] - clock[0]) * (race.most - len(race.units))
                told = duration(min(until - clock[1], seconds))
                show(Text(f"{self.load.label}, {name}: {len(race.drafting)} ways left, about {told} more", style="dim"))
            return stopped

        segments = skip // self.unit_of(self.load)
        own_parts = {"prompts": prompts, "segments_before": segments, "verdict_tokens": read}
        runs = [(replace(parts, **own_parts, config=job.checked.resolved), job.folder, lambda group: None)
                for parts, job in zip(built, jobs, strict=True)]  # fmt: skip
        with decoding_progress(f"{self.load.label}, {name}: ") as progress:
            finished = run_in_turn([runs], progress, stops=stops)
        self._keep(labels, jobs, finished, state)
        return any(result.status == "interrupted" and number not in stopped
                   for number, (result, _) in enumerate(finished) if isinstance(result, RunResult))  # fmt: skip

    def _tell(self, name: str, race: Race) -> None:
        """Says that ways have left."""
        best = f", the fastest {race.drafting[0]} ({race.gain(race.drafting[0])[0]:.2f}x)" if race.drafting else ""
        show(Text(f"{self.load.label}, {name}: ways left: {len(race.drafting)}, after {len(race.units)} units{best}"))

    def _keep(self, labels: Sequence[str], jobs: Sequence[RunJob], finished: Sequence[Any], state: Stage) -> None:
        """Writes the files of each run, and notes its folder and its verdict: of several parts the worst one."""
        for way, job, (result, record) in zip(labels, jobs, finished, strict=True):
            if not isinstance(result, RunResult):
                continue
            if len(jobs) > 1:
                result.in_turn = {"started": result.provenance["started"], "runs": [j.checked.digest for j in jobs]}
            save(job, self.example.target.tokenizer, result, record)
            found = word(result.as_dict()["lossless"]), state["verdicts"].get(way, WORST[-1])
            state["verdicts"][way] = min(found, key=WORST.index)
            state["folders"].setdefault(way, []).append(str(job.folder))


def last_pilot(stages: Mapping[str, Stage]) -> Stage:
    """The last pilot, which begins again without a way whose text was wrong; empty if there is none."""
    return next((stage for name, stage in reversed([*stages.items()]) if name.startswith("pilot")), {})


def unit_of(groups: dict[str, Group]) -> Unit:
    """Seconds and tokens of each way, and of plain decoding: of requests that arrive over time those from arrival to
    the last token, else of decoding alone."""
    found = {way: cost_of([result.speculative for result in group.results]) for way, group in groups.items()}
    plain = next(iter(groups.values()))
    return found | {PLAIN: cost_of([result.baseline for result in plain.results])}


def cost_of(requests: Sequence[DecodedRequest]) -> list[float]:
    """Seconds and tokens of requests that were decoded together."""
    seconds = [r.seconds if r.times is None else r.times.finished - r.times.arrived for r in requests]
    return [sum(seconds), float(sum(len(r.tokens) for r in requests))]
