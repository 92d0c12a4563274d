"""In which settings runs differ: what tells one run from the others, and whether they did the same work."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.errors import ConfigError
from specbench.results.schema import flatten
from specbench.run_config import Role, with_role

TASK = with_role(Role.TASK)
SAME_WORK = with_role(Role.LABEL | Role.POOLED)  # settings in which runs may differ whose numbers are pooled


def differences(results: Iterable[Mapping[str, Any]], but: Iterable[str] = SAME_WORK) -> list[str]:
    """The settings in which results differ, by the first part of their keys."""
    configs = [flatten(result["config"]) for result in results]
    keys = dict.fromkeys(key for config in configs for key in config)
    found = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
    left_out = {*but}
    return [key for key in dict.fromkeys(key.partition("/")[0] for key in found) if key not in left_out]


def unlike_engines(results: Iterable[Mapping[str, Any]], in_turn: bool) -> str:
    """Why the speeds of runs are not to be ranked: some used compiled programs, or another executor. Empty if all ran
    alike. Of runs that were decoded `in_turn` those with other settings of the executor have a plain decoding of their
    own, and are meant to differ."""
    groups: dict[str, list[str]] = {}
    for result in results:
        setting = repr(result["config"].get("executor")) if in_turn else ""
        programs, engine = result.get("executor", {}).get("programs", {}), result.get("choices", {}).get("executor")
        amount = "no" if not programs.get("used") else "some" if programs.get("missed") else "all"
        whose = "" if amount == "all" else f"executor={engine} and "
        groups.setdefault(setting, []).append(f"{whose}{amount} programs compiled")
    for engines in groups.values():
        if len(counts := Counter(engines)) > 1:
            told = ", ".join(f"{count} of {len(engines)} with {engine}" for engine, count in counts.items())
            return f"they did not run alike ({told}): executor=compiled for all, or executor=eager, makes them so"
    return ""


def keys_to_tell_apart(results: Sequence[Mapping[str, Any]], part: str) -> list[str]:
    """Settings, of those whose first part is this one, by which runs that differ there are told apart."""
    if len({setting_of(result, part) for result in results}) > 1:
        return [part]
    configs = [flatten(result["config"]) for result in results]
    keys = dict.fromkeys(key for config in configs for key in config if key.startswith(f"{part}/"))
    differ = (key.replace("/", ".") for key in keys if len({str(config.get(key)) for config in configs}) > 1)
    return [key for key in differ if any(setting_of(result, key) is not None for result in results)]


def decoded_in_turn(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these runs are of one comparison in one process."""
    first = results[0].get("in_turn")
    return bool(first) and all(result.get("in_turn") == first for result in results)


def refuse_other_prompts(prompts: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raises ConfigError if runs, whose lines of prompts.jsonl these are, have different prompts with the same id."""
    texts: dict[str, Any] = {}
    for label, records in prompts.items():
        for record in records:
            if texts.setdefault(record["id"], record.get("prompt")) != record.get("prompt"):
                raise ConfigError(f"{label} cannot be compared with others: their prompts {record['id']} differ")


def short_paths(values: Iterable[str]) -> dict[str, str]:
    """The last name of each path among these values, with as many before it as tell all of them apart."""
    paths = {value: value.rstrip("/").split("/") for value in values if "/" in value.rstrip("/")}
    for names in range(1, max(map(len, paths.values()), default=0)):
        short = {value: "/".join(parts[-names:]) for value, parts in paths.items()}
        if len({*short.values()} | ({*values} - paths.keys())) == len({*values}):
            return short
    return {}


def differing_overrides(runs: Sequence[tuple[Path, Mapping[str, Any]]]) -> list[dict[str, str]]:
    """Of each run (its folder and results) the keys that have not the same value in all, as {"gamma": "5"}. A run
    without an override that others have has the value of its configuration: without gamma=4 it has the same gamma as
    one with it. Numbers are written alike, and all runs have the same order."""
    overrides = [_overrides(folder, result) for folder, result in runs]
    names = dict.fromkeys(key for own in overrides for key in own)
    every = []
    for (_, result), own in zip(runs, overrides, strict=True):
        values = {key: own.get(key, setting_of(result, key)) for key in names}
        every.append({key: alike(value) for key, value in values.items() if value is not None})
    same = {key for key in names if len({own.get(key) for own in every}) == 1}
    return [{key: value for key, value in own.items() if key not in same} for own in every]


def _overrides(folder: Path, result: Mapping[str, Any]) -> dict[str, str]:
    """{"gamma": "5", ...}: the overrides that results.json has, or else those in the folder's name."""
    words = result.get("overrides")
    if not isinstance(words, list):
        words = folder.name.split(",")
    return dict(word.split("=", 1) for word in words if "=" in word)


def setting_of(result: Mapping[str, Any], key: str) -> str | None:
    """The option or the value of a setting of a run as an override has it; None if it is not there, or no scalar."""
    if key in result["choices"]:
        return str(result["choices"][key])
    value: Any = result["config"]
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    if isinstance(value, dict | list):
        return None
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def alike(value: str) -> str:
    """1.0 and 1 as the same text."""
    try:
        return f"{float(value):g}" if float(value) == float(f"{float(value):g}") else value
    except ValueError:
        return value


def sortable(value: str) -> tuple[int, float, str]:
    """What a value is sorted by: numbers first, by size."""
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, value
