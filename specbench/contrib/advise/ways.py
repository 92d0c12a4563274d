"""What is tried: the ways of decoding that fit the target, and the loads."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specbench.config.compose import compose
from specbench.config.default_drafter import UNTRAINED, untrained
from specbench.config.validate import check
from specbench.errors import ConfigError, shown
from specbench.run.jobs import labels_of

GAMMAS = ("2", "4", "8")  # unless they are given
WITH_MODEL = ("model", "lookup_or_model")  # drafters of a model that is given by its path
SWEPT = ("drafter", "gamma", "gamma_policy", "verifier")  # whose values are ways
LOADS = ("batch_size", "workload.rate")
STDLIB = 640  # prompts of the included data
MOST = 1e6  # of a batch size, and of a rate
NO_SWEEP = "it has several values, which only drafter, gamma, gamma_policy, verifier, batch_size and workload.rate may"
Ways = dict[str, list[str]]  # the overrides of each way, by its label


@dataclass(frozen=True)
class Load:
    """A batch size, and a rate of requests or none."""

    rows: int
    rate: float | None

    @property
    def label(self) -> str:
        return f"batch {self.rows}" + (f", {self.rate:g} requests a second" if self.rate else "")

    @property
    def words(self) -> list[str]:
        of_rate = [] if self.rate is None else ["workload=poisson", f"workload.rate={self.rate}"]
        return [f"batch_size={self.rows}", *of_rate]

    @property
    def unit(self) -> int:
        """The requests of a unit: those that are decoded together."""
        return 1 if self.rows == 1 and self.rate is None else 4 * self.rows


@dataclass(frozen=True)
class Trial:
    """What a command tries: `common` are overrides of all ways, `refused` drafters that do not fit, with reasons."""

    common: list[str]
    ways: Ways
    loads: list[Load]
    refused: dict[str, str]


def trial(overrides: Sequence[str], only: bool) -> Trial:
    """What these overrides ask for; `only` the drafters that they name, if any. Raises ConfigError."""
    given: dict[str, list[str]] = {}
    common, paths = [], list[str]()
    for word in overrides:
        key, equals, value = word.partition("=")
        if key in (*SWEPT, *LOADS) and equals:
            given[key] = value.split(",")
        elif key.startswith("drafter."):
            paths.append(word)
        else:
            common.append(word)
    loads = loads_of(given)
    if "workload=poisson" in common and "workload.rate" not in given:
        raise ConfigError("workload=poisson is not possible without its rates: give them, as in workload.rate=2,4")
    keys = {word.partition("=")[0] for word in common}
    common += [] if {"data", "data.count"} & keys else [f"data.count={STDLIB}"]
    common += [word for word in ("order=1", "name=advise") if word.partition("=")[0] not in keys]
    common.append("logger=none")
    fit = untrained(common)
    named = given.get("drafter", [])
    has_path = any(word.startswith("drafter.path=") for word in paths)
    named += [name for name in WITH_MODEL if has_path and not named]
    if not named and not keys & {"target", "target.path"}:
        named = ["stdlib"]  # of the included target
    drafters = list(dict.fromkeys([*named, *(name for name in UNTRAINED if not fit[name] and not only)]))
    if not drafters:
        raise ConfigError(
            "--only needs drafters, as in drafter=suffix or drafter.path=Q" if only else "no drafter fits"
        )
    found = {name: reason for name, reason in fit.items() if reason}
    every = [
        [f"drafter={drafter}", *(paths if drafter in named else []), f"gamma={gamma}", *more]
        for drafter in drafters
        for gamma in given.get("gamma", GAMMAS)
        for more in combinations(given)
    ]
    ways = labelled(every)
    for label, words in list(ways.items()):
        try:
            config = compose([*common, *loads[0].words, *words])
        except ConfigError as error:
            named_key, several, _ = str(error).partition(" has several values")
            raise ConfigError(f"{named_key} is not possible: {NO_SWEEP}") if several else error from error
        try:
            root = check(config).root
            if max(root.repeats, root.workers) > 1:
                raise ConfigError("repeats and workers must be 1, since all ways share a process")
        except ConfigError as error:
            drafter = words[0].partition("=")[2]
            if drafter in named or len(ways) == 1:
                raise ConfigError(f"{label}: {error}") from error
            found[drafter] = str(error)
            del ways[label]
    return Trial(common, ways, loads, found)


def combinations(given: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Each choice of a policy and a verifier among those that are given."""
    found: list[list[str]] = [[]]
    for key in ("gamma_policy", "verifier"):
        found = [[*words, f"{key}={value}"] for words in found for value in given[key]] if key in given else found
    return found


def labelled(every: Sequence[list[str]]) -> Ways:
    """Ways by what tells them apart."""
    words = [dict(word.split("=", 1) for word in way if not word.startswith("drafter.")) for way in every]
    return dict(zip(labels_of(words), every, strict=True))


def loads_of(given: Mapping[str, Sequence[str]]) -> list[Load]:
    """Every batch size at every rate. Raises ConfigError."""
    rows = [positive_number(value, "batch_size") for value in given.get("batch_size", ["1"])]
    if wrong := [value for value in rows if value != int(value)]:
        raise ConfigError(f"batch_size={wrong[0]:g} is not allowed: it must be an integer")
    rates: list[float | None] = [positive_number(value, "workload.rate") for value in given.get("workload.rate", [])]
    return [Load(int(size), rate) for size in rows for rate in rates or [None]]


def positive_number(text: str, key: str) -> float:
    """A number above 0. Raises ConfigError."""
    try:
        if 0 < (value := float(text.strip("[]"))) < MOST:
            return value
    except ValueError:
        pass
    raise ConfigError(f"{key}={shown(text)} is not allowed: it must be numbers above 0 and below {MOST:g}, as in "
                      f"{key}=1,8")  # fmt: skip


def variants(common: Sequence[str], words: Sequence[str], result: Mapping[str, object]) -> Ways:
    """The winner's words, and with them what may be faster still: the gamma that replay finds best, another verifier
    of chains, a policy that chooses gamma by cost."""
    own = dict(word.split("=", 1) for word in words)
    pick = result["gamma_pick"] if result["gamma_sweep"] else None
    gammas = [str(gamma) for gamma in dict.fromkeys(pick["gammas"]) if gamma > 0] if isinstance(pick, dict) else []
    more = [{"gamma": gamma} for gamma in gammas if gamma != own["gamma"]]
    more += [] if "verifier" in own else [{"verifier": "block"}]
    more += [] if "gamma_policy" in own else [{"gamma_policy": "optimal"}]
    found = [[*words]]
    for new in more:
        changed = [f"{key}={value}" for key, value in (own | new).items()]
        try:
            check(compose([*common, *changed]))
        except ConfigError:
            continue
        found.append(changed)
    return labelled(found)


def command(common: Sequence[str], words: Sequence[str]) -> str:
    """The command of one run, for a shell."""
    kept = [word for word in common if word not in ("logger=none", "name=advise")]
    return shlex.join(["python", "-m", "specbench", *kept, *words])
