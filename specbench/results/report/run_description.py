"""What was run, in words: the facts and commands that a page begins with, and in what its runs are not alike."""

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from specbench.results.comparability import SAME_WORK, TASK, differences, unlike_engines
from specbench.results.fields import ResultDict
from specbench.results.reader import StoredRun
from specbench.results.schema import flatten
from specbench.results.wording import (
    WayNumbers,
    capital,
    doubts,
    interval,
    label,
    left_out,
    no_gain,
    none_left,
    slower,
    word,
)

MOST_VALUES = 6  # of a fact in which runs differ
MOST_COMMANDS = 6
MOST_TASKS = 4  # that a page of many runs begins with
USUAL = {"weights": "pretrained", "chat_template": "never"}  # settings that are not worth a word
OFF = {"top_k": 0, "top_p": 1, "repetition_penalty": 1}  # values that change nothing
ORIGIN = {"machine": "machines", "commit": "commits", "versions": "versions", "dtype": "dtypes"}  # if runs differ


def facts(results: Sequence[ResultDict]) -> dict[str, str]:
    """What was run, by name; of several runs the values that they have, in order."""
    every, found = [facts_of(result) for result in results], {}
    for name in dict.fromkeys(name for own in every for name in own):
        values = list(dict.fromkeys(own[name] for own in every if name in own))
        if len(values) > 1 and name == "started":
            values = [f"{min(values).split(',')[0]} to {max(values).split(',')[0]}"]
        more = f"; and {len(values) - MOST_VALUES} more" if len(values) > MOST_VALUES else ""
        many = f"{len(values)} values: {'; '.join(values[:MOST_VALUES])}{more}"
        found[name] = values[0] if len(values) == 1 else many
    return found


def facts_of(result: ResultDict) -> dict[str, str]:
    """What one run was; without what is as in most runs."""
    config, gamma, lenience = result["config"], result["gamma"], result["config"]["lenience"]
    workload = _option("workload", result)
    told = {
        "target": _option("target", result),
        "drafter": _option("drafter", result),
        "gamma": f"chosen by the policy, from {config.get('gamma')}" if gamma is None else str(gamma),
        "policy": _option("gamma_policy", result, but="gamma"),
        "verifier": _option("verifier", result),
        "lenience": f"{lenience:g}" if lenience != 1 else "",
        "decoding": _beams(result["beam"]),
        "temperature": ", ".join([f"{config['temperature']:g}", *(
            f"{name} {config[name]:g}" for name, off in OFF.items() if config.get(name, off) != off)]),
        "data": _option("data", result),
        "requests": _amount(config, result["counts"]),
        "workload": workload if workload != "all_at_once" else "",
        "executor": _option("executor", result).split(",")[0].split(" (")[0],
        "cache": _option("cache", result),
        "seed": str(config.get("seed", "")),
        **_origin(result),
    }  # fmt: skip
    return {name: text for name, text in told.items() if text}


def _option(group: str, result: ResultDict, but: str = "") -> str:
    """The option that a run chose in a group, and its settings that are worth a word, without `but`."""
    settings = result["config"].get(group)
    settings = dict(settings) if isinstance(settings, Mapping) else {}
    path, name = settings.pop("path", None), result["choices"].get(group, "")
    told = [f"{key} {_plain(value)}" for key, value in settings.items()
            if value not in (None, False, "", [], {}, USUAL.get(key)) and key not in ("_target_", but)]  # fmt: skip
    return ", ".join([name if path is None else f"{name} ({path})", *told])


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _beams(beam: Mapping[str, Any] | None) -> str:
    if beam is None:
        return ""
    stops = ", ends when as many have ended" if beam["early_stopping"] else ""
    penalty = f"length penalty {beam['length_penalty']:g}"
    return f"beam search, {beam['beams']} beams, {beam['drafter_beams']} of the drafter's, {penalty}{stops}"


def _amount(config: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    told = [f"{counts['prompts']:,}"]
    told += [f"up to {config['max_new_tokens']:,} tokens each"] if "max_new_tokens" in config else []
    told += [f"batch {config['batch_size']}"] if config.get("batch_size", 1) != 1 else []
    told += [f"{counts['failed']} failed"] if counts["failed"] else []
    return ", ".join(told)


def _origin(result: ResultDict) -> dict[str, str]:
    """Where, when and by what a run was made."""
    made, repeats = result["provenance"], result["repeats"]
    hosts = [worker["host"] for worker in result["workers"]]
    dtype = result.get("identity", {}).get("device", {}).get("dtype") or result["config"].get("dtype")
    started = str(made["started"]).replace("T", " ").replace("+00:00", " UTC")
    seconds = made.get("seconds")
    return {
        "dtype": str(dtype or "").removeprefix("torch."),
        "processes": f"{repeats['processes']} pooled, which differ in: {repeats['vary']}" if repeats else "",
        "workers": f"{len(hosts)} on {', '.join(dict.fromkeys(hosts))}" if hosts else "",
        "machine": _machine(result),
        "versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        "commit": (made["git_sha"] or "unknown")[:7] + (" with changes" if made["dirty"] else ""),
        "started": started if seconds is None else f"{started}, {seconds:.0f} s",
    }


def _machine(result: ResultDict) -> str:
    where = result["provenance"]
    return f"{where['device']}, {where['threads']} thread{'s' * (where['threads'] != 1)}"


def commands(runs: Sequence[StoredRun], together: bool) -> list[str]:
    """The command that makes this run again, or `together` those that made all of them, for a shell; before that of a
    run from Python, its call."""
    if together:
        told = [_typed(run.result["provenance"].get("argv")) or command_of(run.result) for run in runs]
    else:
        call = runs[0].result["provenance"].get("call")
        told = [f"import specbench; {call}" if isinstance(call, str) else "", command_of(runs[0].result)]
    return [command for command in dict.fromkeys(told) if command][:MOST_COMMANDS]


def command_of(result: ResultDict) -> str:
    """The command of one run alone, also where it was a job of a sweep or a way of a comparison."""
    overrides, argv = result.get("overrides"), result["provenance"].get("argv")
    if overrides is None:
        return _typed(argv)
    folder = None  # of further parts, which overrides do not have
    if _module(argv):
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config-dir", "-cd")
        folder = parser.parse_known_args(argv[1:])[0].config_dir
    return shlex.join(["python", "-m", "specbench", *(["--config-dir", folder] if folder else []), *overrides])


def _typed(argv: Any) -> str:
    """The words that a process was started with, as a command that finds the same module anywhere; "" if they are not
    this program's, as those of a notebook that calls specbench.evaluate."""
    module = _module(argv)
    return shlex.join(["python", "-m", module, *argv[1:]]) if module else ""


def _module(argv: Any) -> str:
    """The module of this program that a process was started with; "" if it was another program."""
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        return ""
    path = Path(argv[0]).parts
    if path[-2:] == ("specbench", "compare.py"):
        return "specbench.compare"
    return "specbench" if path[-1:] == ("specbench",) or path[-2:] == ("specbench", "__main__.py") else ""


def configuration(results: Sequence[ResultDict]) -> str:
    """The resolved configuration as YAML; of several runs what all of them have in common, without levels."""
    common = results[0]["config"]
    if len(results) > 1:
        flat = [flatten(result["config"]) for result in results]
        common = {key: value for key, value in flat[0].items() if all((key, value) in own.items() for own in flat)}
    text: str = yaml.safe_dump(common, sort_keys=False, allow_unicode=True)
    return text


def unlike(results: Sequence[ResultDict]) -> Iterator[str]:
    """Sentences on differences between runs that no setting made, after which their times cannot be compared."""
    every = [_origin(result) for result in results]
    for name, plural in ORIGIN.items():
        found = list(dict.fromkeys(own[name] for own in every))
        if len(found) > 1:
            told = "; ".join(found[:MOST_VALUES])
            yield f"The runs are of {len(found)} {plural} ({told}): do not compare their times."


def fastest(runs: Sequence[StoredRun]) -> list[str]:
    """For each task on each machine the run with the largest speedup, and how many others its interval does not set it
    apart from. Runs that failed the losslessness test are counted and not ranked."""
    tasks: list[list[StoredRun]] = []
    for run in runs:
        group = next((group for group in tasks if not _unlike_work([group[0], run])), None)
        if group is None:
            tasks.append(group := [])
        group.append(run)
    unlike = ", ".join(_unlike_work(runs))
    ranked = f"Ranked in {len(tasks)} groups, each of the same work on one machine: they differ in {unlike}."
    told = [ranked] if unlike else []
    told += [_fastest(group, len(tasks) > 1) for group in tasks[:MOST_TASKS]]
    return told + ([f"And {len(tasks) - MOST_TASKS} more groups: see the table."] if len(tasks) > MOST_TASKS else [])


def _unlike_work(runs: Sequence[StoredRun]) -> list[str]:
    """The settings in which runs did other work, and "machine": in these they cannot be ranked together."""
    swept, found = dict.fromkeys(key for run in runs for key in run.keys), []
    for part in differences(run.result for run in runs):
        if part in TASK:
            found += [key for key in swept if key.partition(".")[0] == part] or [part]
    found += ["machine"] * (len({_machine(run.result) for run in runs}) > 1)
    return found + ["compiled programs"] * bool(unlike_engines([run.result for run in runs], in_turn=True))


def _fastest(group: Sequence[StoredRun], several: bool) -> str:
    """The sentence on the runs of one task; `several`: there are other tasks."""
    runs = [run for run in group if word(run.result["lossless"]) != "failed"]
    common = {k: v for k, v in group[0].keys.items() if all(run.keys.get(k) == v for run in group)}
    task = {k: v for k, v in common.items() if k.partition(".")[0] in TASK}
    where = f"At {label(task)}: " if several and task else ""
    if not runs:
        return capital(f"{where}{none_left(len(group), 'runs')}.")
    best = max(runs, key=lambda run: run.result["speedup"]["measured"])
    speedup = best.result["speedup"]
    error = f" ({interval(speedup['ci95'])})" if speedup["ci95"] else " (too few prompts for an interval)"
    name = _name(best, common if len(group) > 1 else task)
    where = "" if name == best.label else where  # a name that says it all
    failed, doubt = left_out(len(group) - len(runs)), doubts([run.result for run in group], best.result)
    measured = f"{speedup['measured']:.2f}x{error}"
    if len(runs) == 1:
        loses = ", slower than plain decoding" if speedup["ci95"] and speedup["ci95"][1] < 1 else ""
        return f"{where}{name}: {measured}{loses}{failed}{doubt}."
    named = ((_name(run, common), run.result["speedup"], run.result) for run in runs)
    ways = [WayNumbers(name, own["measured"], own["ci95"], result, *_units(result)) for name, own, result in named]
    ways.sort(key=lambda way: -way.speedup)
    if told := no_gain(ways):
        return capital(f"{where}{told}{failed}{slower(ways)}{doubt}.")
    near = sum(run is not best and _overlap(run.result["speedup"], speedup) for run in runs)
    apart = f"; {near} of the others may be as fast" if near else "; its interval is above all others'"
    return capital(f"{where}fastest of {len(runs)}{failed}: {name}, {measured}{apart}{slower(ways)}{doubt}.")


def _name(run: StoredRun, common: Mapping[str, str]) -> str:
    """A run by its keys without those in `common`, and if others are left without those that are no work."""
    way = {key: value for key, value in run.keys.items() if key not in common}
    return label({k: v for k, v in way.items() if k.partition(".")[0] not in SAME_WORK}) or label(way) or run.label


def _units(result: ResultDict) -> tuple[int, int, float]:
    """Clusters of prompts, processes, and the share of the processes: of an earlier version's `repeats` all of it."""
    own, repeats = result["speedup"], result["repeats"] or {}
    share, processes = own.get("process_share"), int(repeats.get("processes") or 1)
    clusters = int(own["clusters"] or result["counts"]["prompts"])
    return clusters, processes, float(processes > 1) if share is None else share


def _overlap(a: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    """Whether the interval of the best speedup reaches down to the other's; so it does if one has no interval."""
    return not (a["ci95"] and best["ci95"]) or a["ci95"][1] >= best["ci95"][0]
