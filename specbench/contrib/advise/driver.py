"""For each load: a pilot that finds the fastest ways, then the measurement of the first two on other prompts. What is
finished is kept in advice.json, and is not done again."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.text import Text

from specbench.config.build import Targets
from specbench.contrib.advise.bench import LoadBench, Stage, last_pilot
from specbench.contrib.advise.race import ERROR, FIRST, FIRST_LOOK, LEVEL, PLAIN, RACES, Race
from specbench.contrib.advise.ways import Load, Trial, Ways, variants
from specbench.errors import ConfigError
from specbench.results.atomic_files import file_text, parse_json, write_json
from specbench.results.completion import keep_other
from specbench.results.reader import read_result
from specbench.results.terminal import show

FILE = "advice.json"
# Numbers of units, if a unit is one request, and if it is several.
PILOT_UNITS = 64, 16  # at most
MEASURED = (FIRST_LOOK[0], 256), (FIRST_LOOK[1], 8)  # of a measurement, at least and at most
PILOT, VARIANTS = 0.35, 0.6  # of a load's time, when the pilot ends, and when variants of its best have been tried
BEST = 2  # ways of the pilot whose variants are tried, and ways that are measured if they are not told apart
WANTED = 0.03  # +- of the measured gain


class Driver:
    """The loads of a trial, one after the other. `state` is what advice.json holds."""

    def __init__(self, tried: Trial, folder: Path, seconds: float):
        self.tried, self.folder = tried, folder
        self.begun = time.monotonic()  # when the current load began
        self.until, self.share = self.begun + seconds, 0.0  # when all loads end; seconds of the current one
        self.targets = Targets()
        first = LoadBench(tried.common, tried.loads[0], folder, self.targets, self.save)
        drafters = {words[0]: words for words in tried.ways.values()}
        identity = {name: first.checked(words).identity().as_dict() for name, words in drafters.items()}
        identity["ways"] = tried.ways
        self.state: dict[str, Any] = {"identity": identity, "loads": {}}
        path = folder / FILE
        if path.is_file():
            earlier = parse_json(file_text(path), str(path))
            if isinstance(earlier, dict) and earlier.get("identity") == identity:
                self.state = earlier
            else:
                show(Text(f"{path} is of other models, settings or code: it is kept beside the new one", style="dim"))
                keep_other(path, "")

    def save(self) -> None:
        """Writes advice.json."""
        write_json(self.folder / FILE, self.state)

    def go(self) -> dict[str, Any]:
        """Does what is missing for every load. Returns the state. Raises ConfigError, or KeyboardInterrupt."""
        every = [(load, self.state["loads"].setdefault(load.label, {"stages": {}, "refused": dict(self.tried.refused)}))
                 for load in self.tried.loads]  # fmt: skip
        left = [(load, own) for load, own in every if not own.get("over")]
        first, rest = ([each for each in left if decided(each[1]) == told] for told in (False, True))
        if first and rest:
            show(Text("loads that have an answer wait for those that have none", style="dim"))
        begun, before = time.monotonic(), self.state.setdefault("seconds", 0.0)
        try:
            for several in (first, rest):
                for number, (load, own) in enumerate(several):
                    if several is first or not first or time.monotonic() < self.until:
                        self._load(load, own, len(several) - number)
                        self.save()
        finally:
            if left:
                self.state["seconds"] = before + time.monotonic() - begun  # of all starts, with loading
                self.save()
        if not any(own["stages"] for own in self.state["loads"].values()):
            raise ConfigError(f"no way fits: {[*own['refused'].values()][-1]}")
        return self.state

    def _load(self, load: Load, own: dict[str, Any], loads: int) -> None:
        """One of so many loads that share the time that is left; that to load models is given to each."""
        bench = LoadBench(self.tried.common, load, self.folder, self.targets, self.save)
        ways = dict(self.tried.ways)
        with self._untimed():
            total = bench.total(ways)
        self.begun = time.monotonic()
        self.share = max(0.0, self.until - self.begun) / loads
        own |= {"rows": load.rows, "rate": load.rate, "prompts": total, "refused": own["refused"] | bench.refused}
        if not ways:
            return
        for each in self.tried.loads:
            if total < (wanted := (FIRST + 1) * bench.unit_of(each)):
                raise ConfigError(
                    f"{each.label} needs {wanted:,} prompts, there are {total:,}: give more by data.limit or data.count"
                    + ", or a smaller batch_size" * (each.rows > 1)
                )
        own |= {"unit": bench.unit_of(load), "first_turns": any(p.turns[1:] for p in bench.example.prompts)}
        winner, race, rivals = self._chosen(bench, own, ways)
        rivals += race.drafting
        if winner is not None:
            winner, rivals = self._measured(bench, own, ways, winner, race, rivals)
            own["words"] = ways[winner]
        own["winner"], own["rivals"] = winner, [way for way in rivals if way != winner]
        lost = bool(race.units) and not race.drafting
        own["ended"] = "time" if time.monotonic() >= self._at(1.0) else "prompts"
        own["over"] = lost or (winner is not None and own["ended"] == "prompts")

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """Inside, models are loaded: all limits of time move by as long as that takes."""
        begun = time.monotonic()
        yield
        seconds = time.monotonic() - begun
        self.begun, self.until = self.begun + seconds, self.until + seconds

    def _at(self, part: float) -> float:
        """The second of the clock at which this part of the load's time is over."""
        return self.begun + part * self.share

    def _chosen(self, bench: LoadBench, own: dict[str, Any], ways: Ways) -> tuple[str | None, Race, list[str]]:
        """The fastest way of the pilot and of variants of its best two, which are added to `ways`: None if plain
        decoding wins, or nothing was decoded. Also the last race, and the ways that the pilot left and whose variants
        are not tried."""
        stages, several, total = own["stages"], own["unit"] > 1, own["prompts"]
        first, last = FIRST_LOOK[several], total - FIRST * own["unit"]  # the measurement has FIRST units at least
        most = PILOT_UNITS[several] if len(ways) > 1 else first
        limits = min(total // 2, last), self._at(PILOT), most, first
        winner, race = self._race(bench, stages, "pilot", ways, limits)
        if winner is None or len(race.ways) < 3 or len(race.units) < FIRST:
            return winner, race, []
        pilot, more = last_pilot(stages), Ways()
        for way in race.drafting[:BEST]:
            more |= variants(bench.common, ways[way], read_result(Path(pilot["folders"][way][-1])))
        with self._untimed():
            bench.total(more)
        if len(more) < 2:
            return winner, race, []
        ways |= more
        limits = min(total * 2 // 3, last), self._at(VARIANTS), most // 2, first
        found, of_variants = self._race(bench, stages, "variants", more, limits)
        if found is None:
            return winner, race, []
        return found, of_variants, [way for way in race.drafting[BEST:] if way not in more]

    def _measured(
        self, bench: LoadBench, own: dict[str, Any], ways: Ways, winner: str, race: Race, rivals: Sequence[str]
    ) -> tuple[str, list[str]]:
        """The faster of the two fastest ways on other prompts, and which rivals are not told from it."""
        stages, several = own["stages"], own["unit"] > 1
        finalists = list(dict.fromkeys([winner, *race.drafting]))[:BEST]
        if winner in (kept := stages.get("measurement", {}).get("ways", {})) and kept.keys() <= ways.keys():
            finalists = [*kept]  # of an earlier start, whose units are not given up for another second one
        least, largest = MEASURED[several]
        level = LEVEL / len(finalists)  # the faster of two is chosen here
        needed = race.needed(winner, WANTED, level) if winner in race.ways else None
        units = min(largest, max(least, needed or largest))
        measured = Race([*finalists, PLAIN], units, LEVEL / RACES, FIRST_LOOK[several], gain_wanted=True)
        own_ways = {way: ways[way] for way in finalists}
        stage = self._stage(bench, stages, "measurement", own_ways, measured, (own["prompts"], self._at(1.0)))
        reasons = stage["reasons"] = measured.reasons | stage.get("reasons", {})
        verdicts = stage["verdicts"]
        wrong = {way for way in finalists
                 if verdicts.get(way) == "failed" or reasons.get(way, "").startswith("failed")}  # fmt: skip
        gains = stage["gains"] = {way: measured.gain(way, level) for way in finalists if measured.units_of(way)}
        fastest = max(finalists, key=lambda way: (way not in wrong, gains.get(way, (0.0, None))[0]))
        return fastest, [way for way in rivals if way not in finalists or way in measured.left - wrong]

    def _race(
        self, bench: LoadBench, stages: dict[str, Stage], name: str, ways: Ways, limits: tuple[int, float, int, int]
    ) -> tuple[str | None, Race]:
        """The winner of a race between ways, or None if plain decoding wins. If the text of a way is wrong, the race
        starts again without it."""
        last, until, most, first = limits
        left, number = dict(ways), 1
        while True:
            race = Race([*left, PLAIN], most, LEVEL / RACES, first)
            stage = name if number == 1 else f"{name}-{number}"
            state = self._stage(bench, stages, stage, left, race, (last, until))
            bad = [way for way in left if state["verdicts"].get(way) == "failed"]
            known = race.units[0] if race.units else ()
            state["gains"] = {way: race.gain(way) for way in race.ways if way != PLAIN and way in known}
            state["left"], state["reasons"] = race.drafting, race.reasons | dict.fromkeys(bad, "its verdict failed")
            left = {way: words for way, words in left.items() if way not in bad}
            if not bad or not left:
                return next((way for way in race.drafting if way in left and race.units), None), race
            number += 1

    def _stage(
        self, bench: LoadBench, stages: dict[str, Stage], name: str, ways: Ways, race: Race, limits: tuple[int, float]
    ) -> Stage:
        """Goes on with a stage from where it was. With other ways than before (a new one, or others after a longer
        pilot) it begins anew, and what followed a wrong text of it is forgotten."""
        begin = max((stage["next"] for stage in stages.values()), default=0)
        if name not in stages or stages[name]["ways"] != ways:
            for later in [other for other in stages if other.startswith(f"{name}-")]:
                del stages[later]
            stages[name] = {"units": [], "verdicts": {}, "folders": {}, "ways": dict(ways)}
        state = stages[name]
        state["next"] = begin  # no stage sees the prompts of another one
        bench.run(name, ways, race, state, *limits)
        return state


def decided(own: Mapping[str, Any]) -> bool:
    """Whether the gain of a load was measured, with an interval that does not hold 1, or no way fits it."""
    if "rows" in own and not own["stages"]:
        return True
    gains = own["stages"].get("measurement", {}).get("gains", {})
    _, ci95 = gains.get(own.get("winner"), (None, None))
    return bool(ci95) and not ci95[0] <= 1 <= ci95[1]


def trial_lines(tried: Trial, minutes: float) -> Sequence[str]:
    """What will be tried, before anything is loaded."""
    drafters = ", ".join(dict.fromkeys(words[0].partition("=")[2] for words in tried.ways.values()))
    loads = "; ".join(f"{load.label} (a unit is {load.unit} prompt{'s, at least' * (load.unit > 1)})"
                      for load in tried.loads)  # fmt: skip
    lines = [
        f"{len(tried.ways)} ways of decoding ({drafters}) beside plain decoding, each prompt in all in turn; {loads}"
    ]
    lines += [f"not {name}: {reason}" for name, reason in tried.refused.items()]
    lines.append(
        f"At most {minutes:g} minutes (--minutes), beside loading models and ending the unit that is decoded then: the "
        "limit, no estimate. A pilot drops ways that cannot win; then the two fastest are measured on other prompts."
    )
    lines.append(ERROR)
    return lines
