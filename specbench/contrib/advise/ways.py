"""What is tried: the ways of decoding that fit the target, and the loads."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from specbench.config.compose import compose
from specbench.config.default_drafter import TAKEN, UNTRAINED, untrained
from specbench.config.validate import ValidatedConfig, check
from specbench.contrib.replay.loads import given_numbers
from specbench.errors import ConfigError
from specbench.models.checkpoint import local_path
from specbench.run.jobs import labels_of

GAMMA, OTHERS = "4", (2, 8)  # of the pilot unless it is given; of the best ways where replay cannot choose
WITH_MODEL = ("model",)  # drafters of a model that is given by its path
HEADS = ("medusa", "eagle3", "eagle", "dflash")
SWEPT = ("drafter", "gamma", "gamma_policy", "verifier")  # whose values are ways
LOADS = ("batch_size", "workload.rate")
STDLIB = 640  # prompts of the included data
LARGEST_VALUE = 1e6  # of a batch size, and of a rate
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
        """The requests of a unit, those that are decoded together, at least."""
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
            given[key] = value.strip("[]").split(",")
        elif key.startswith("drafter."):
            paths.append(word)
        else:
            common.append(word)
    loads = loads_of(given)
    if "workload=poisson" in common and "workload.rate" not in given:
        raise ConfigError("workload=poisson is not possible without its rates: give them, as in workload.rate=2,4")
    keys = {word.partition("=")[0] for word in common}
    common += [word for word in ("order=1", "name=advise") if word.partition("=")[0] not in keys]
    common.append("logger=none")
    named = given.get("drafter", [])
    has_path = any(word.startswith("drafter.path=") for word in paths)
    named += [name for name in WITH_MODEL if has_path and not named]
    if not named and not keys & {"target", "target.path"}:
        named = ["stdlib"]  # of the included target
    counted = not {"data", "data.count"} & keys
    if named:  # whose target and data are those of all ways
        brought = checked_way((*common, *loads[0].words, f"drafter={named[0]}", *paths))
        common += [f"{group}={brought.choices[group].name}" for group in ("target", "data") if group not in keys]
        counted &= "count" in brought.resolved["data"]
    common += [f"data.count={STDLIB}"] * counted
    loaded = [*common, *loads[0].words]
    fit = untrained(loaded)
    drafters = {name: [f"drafter={name}", *paths] for name in named}
    if not only:
        drafters = {name: [f"drafter={name}"] for name in UNTRAINED if not fit[name]} | heads_beside(loaded) | drafters
    if not drafters:
        raise ConfigError(
            "--only needs drafters, as in drafter=suffix or drafter.path=Q"
            if only
            else "no drafter fits: " * (len({*fit.values()}) > 1) + fit[TAKEN]  # one reason is no drafter's
        )
    found = {name: reason for name, reason in fit.items() if reason}
    every = [
        [*drafters[name], f"gamma={gamma}", *more]
        for name in sorted(drafters, key=lambda name: name not in named)
        for gamma in given.get("gamma", [GAMMA])
        for more in combinations(given)
    ]
    ways = labelled(every)
    for label, words in list(ways.items()):
        try:
            root = checked_way((*loaded, *words)).root
            if max(root.repeats, root.workers) > 1:
                raise ConfigError("repeats and workers must be 1, since all ways share a process")
        except ConfigError as error:
            drafter = words[0].partition("=")[2]
            if drafter in named or len(ways) == 1:
                raise ConfigError(f"{label}: {error}") from error
            found[drafter] = str(error)
            del ways[label]
    return Trial(common, ways, loads, found)


def heads_beside(common: Sequence[str]) -> dict[str, list[str]]:
    """The overrides of trained heads that lie in the target's folder or in folders of it, the first that fit of each
    kind, by drafter."""
    found: dict[str, list[str]] = {}
    for name in HEADS:
        try:
            config = compose([*common, f"drafter={name}", "drafter.path=."])
        except ConfigError:  # which the ways will tell
            continue
        folder = local_path(str(config.target.path))
        inner = sorted(str(path.parent) for path in folder.glob("*/config.json"))
        for place in [str(folder)] * (name == "medusa" and folder.is_dir()) + inner:
            config.drafter.path = place
            try:
                check(config)
            except ConfigError:
                continue
            found[name] = [f"drafter={name}", f"drafter.path={place}"]
            break
        if not inner:
            break
    return found


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


@cache
def checked_way(words: tuple[str, ...]) -> ValidatedConfig:
    """The checked configuration of overrides, composed once. Raises ConfigError."""
    try:
        return check(compose([*words]))
    except ConfigError as error:
        key, several, _ = str(error).partition(" has several values")
        raise ConfigError(f"{key} is not possible: {NO_SWEEP}") if several else error from error


def loads_of(given: Mapping[str, Sequence[str]]) -> list[Load]:
    """Every batch size at every rate. Raises ConfigError."""
    texts = {key: ",".join(given[key]) for key in LOADS if key in given}
    rows = given_numbers(texts, "batch_size", "1", 1, LARGEST_VALUE, "whole numbers", whole=True)
    given_rates = (
        given_numbers(texts, "workload.rate", "", 1e-6, LARGEST_VALUE, "numbers") if "workload.rate" in texts else []
    )
    rates: Sequence[float | None] = given_rates or [None]
    return [Load(int(size), rate) for size in rows for rate in rates]


def variants(common: Sequence[str], words: Sequence[str], result: Mapping[str, Any]) -> Ways:
    """A way's words, and with them what may be faster still: the gamma that replay finds best (and its double if
    replay knows no larger one), or else others; where guesses are drawn, another verifier of chains; a policy that
    chooses gamma by cost."""
    own = dict(word.split("=", 1) for word in words)
    largest = max((entry["gamma"] for entry in result["gamma_sweep"]), default=0)
    picked = result["gamma_pick"]["gammas"] if largest else OTHERS
    picked = [*picked, *[2 * largest] * (largest in picked)]
    more = [{"gamma": str(gamma)} for gamma in dict.fromkeys(picked) if gamma and str(gamma) != own["gamma"]]
    more += [{"verifier": "block"}] if "verifier" not in own and result["config"]["temperature"] else []
    if "gamma_policy" not in own:
        more += [{"gamma_policy": "goodput"}, {"gamma_policy": "goodput", "gamma_policy.signal": "none"}]
    found = [[*words]]
    for new in more:
        changed = [f"{key}={value}" for key, value in (own | new).items()]
        if len(new) > 1 and found[-1][-1] == "gamma_policy=goodput":
            continue  # it sees q
        try:
            checked_way((*common, *changed))
        except ConfigError:
            continue
        found.append(changed)
    return labelled(found)


def command(common: Sequence[str], words: Sequence[str]) -> str:
    """The command of one run, for a shell."""
    kept = [word for word in common if word not in ("logger=none", "name=advise")]
    return shlex.join(["python", "-m", "specbench", *kept, *words])


def on_unseen(common: Sequence[str], own: Mapping[str, Any]) -> list[str]:
    """The overrides for the prompts of a load that no stage has decoded; none if there are no such prompts."""
    given = dict(word.split("=", 1) for word in common if "=" in word)
    last = max(stage["next"] for stage in own["stages"].values())
    if last >= own["prompts"]:
        return []
    skip = [f"skip={int(given.pop('skip', 0)) + last}", *[f"take={own['prompts'] - last}"] * ("take" in given)]
    return [*(word for word in common if not word.startswith(("skip=", "take="))), *skip]
