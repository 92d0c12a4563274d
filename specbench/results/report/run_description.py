"""What was run, in words: the facts and commands that a page begins with, and in what its runs are not alike."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from specbench.results.comparability import SAME_WORK, TASK, differences
from specbench.results.reader import StoredRun
from specbench.results.tables import interval, word

MOST_VALUES = 6  # of a fact in which runs differ
MOST_COMMANDS = 6
MOST_TASKS = 4  # that a page of many runs begins with
USUAL = {"weights": "pretrained", "chat_template": "never"}  # of a component's settings, not worth a word
DOUBTS = {"lossy": "; not lossless by choice", "untested": "; losslessness is untested",
          "inconclusive": "; losslessness is inconclusive"}  # fmt: skip
Result = Mapping[str, Any]


def facts(results: Sequence[Result]) -> dict[str, str]:
    """What was run, by name; of several runs the values that they have, in order."""
    found = {}
    for name, tell in FACTS.items():
        values = list(dict.fromkeys(told for result in results if (told := tell(result))))
        if len(values) == 1:
            found[name] = values[0]
        elif values and name == "started":
            found[name] = f"{min(values).split(',')[0]} to {max(values).split(',')[0]}"
        elif values:
            more = f"; and {len(values) - MOST_VALUES} more" if len(values) > MOST_VALUES else ""
            found[name] = f"{len(values)} values: {'; '.join(values[:MOST_VALUES])}{more}"
    return found


def component(group: str) -> Callable[[Result], str]:
    """Tells the option that a run chose in a group, and its settings."""

    def tell(result: Result) -> str:
        settings = result["config"].get(group)
        settings = dict(settings) if isinstance(settings, Mapping) else {}
        name = result.get("choices", {}).get(group) or str(settings.get("_target_", "")).split(".")[-2:][0]
        path = settings.pop("path", None)
        told = [f"{key} {_plain(value)}" for key, value in settings.items() if _worth(key, value)]
        return ", ".join([name if path is None else f"{name} ({path})", *told])

    return tell


def _worth(key: str, value: Any) -> bool:
    return key != "_target_" and value not in (None, False, "", [], {}) and USUAL.get(key) != value


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _option(group: str) -> Callable[[Result], str]:
    return lambda result: component(group)(result).split(",")[0].split(" (")[0]


def _gamma(result: Result) -> str:
    gamma = result["config"].get("gamma")
    return str(result["gamma"]) if result["gamma"] is not None else f"chosen by the policy, from {gamma}"


def _policy(result: Result) -> str:
    settings = {k: v for k, v in (result["config"].get("gamma_policy") or {}).items() if k != "gamma"}
    return component("gamma_policy")({**result, "config": {"gamma_policy": settings}})


def _sampling(result: Result) -> str:
    config = result["config"]
    told = [f"{config['temperature']:g}"]
    for name, off in (("top_k", 0), ("top_p", 1), ("repetition_penalty", 1)):
        told += [f"{name} {config[name]:g}"] if config.get(name, off) != off else []
    return ", ".join(told)


def _lenience(result: Result) -> str:
    lenience = result["config"]["lenience"]
    return f"{lenience:g}" if lenience != 1 else ""


def _decoding(result: Result) -> str:
    """Nothing where one text is sampled."""
    beam = result.get("beam")
    if beam is None:
        return ""
    stops = ", ends when as many have ended" if beam["early_stopping"] else ""
    return (f"beam search, {beam['beams']} beams, {beam['drafter_beams']} of the drafter's, length penalty "
            f"{beam['length_penalty']:g}{stops}")  # fmt: skip


def _work(result: Result) -> str:
    counts, config = result["counts"], result["config"]
    told = [f"{counts['prompts']:,}, up to {config['max_new_tokens']:,} tokens each" if "max_new_tokens" in config
            else f"{counts['prompts']:,}"]  # fmt: skip
    told += [f"batch {config['batch_size']}"] if config.get("batch_size", 1) != 1 else []
    told += [f"{counts['failed']} failed"] if counts["failed"] else []
    return ", ".join(told)


def _workload(result: Result) -> str:
    """Nothing where all requests are there from the start."""
    told = component("workload")(result)
    return "" if told == "all_at_once" else told


def _dtype(result: Result) -> str:
    known = result.get("identity", {}).get("device", {}).get("dtype") or result["config"].get("dtype")
    return str(known or "").removeprefix("torch.")


def _machine(result: Result) -> str:
    where = result["provenance"]
    return f"{where['device']}, {where['threads']} thread{'s' * (where['threads'] != 1)}"


def _versions(result: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in result["provenance"]["versions"].items())


def commit(result: Result) -> str:
    """The commit that made a result, and whether its files were changed."""
    where = result["provenance"]
    return (where["git_sha"] or "unknown")[:7] + (" with changes" if where["dirty"] else "")


def _started(result: Result) -> str:
    seconds = result["provenance"].get("seconds")
    started = str(result["provenance"]["started"]).replace("T", " ").replace("+00:00", " UTC")
    return started if seconds is None else f"{started}, {seconds:.0f} s"


def _repeats(result: Result) -> str:
    repeats = result.get("repeats")
    return f"{repeats['processes']} pooled, which differ in: {repeats['vary']}" if repeats else ""


def _workers(result: Result) -> str:
    hosts = [worker["host"] for worker in result.get("workers") or ()]
    return f"{len(hosts)} on {', '.join(dict.fromkeys(hosts))}" if hosts else ""


FACTS: dict[str, Callable[[Result], str]] = {
    "target": component("target"),
    "drafter": component("drafter"),
    "gamma": _gamma,
    "policy": _policy,
    "verifier": component("verifier"),
    "lenience": _lenience,
    "decoding": _decoding,
    "temperature": _sampling,
    "data": component("data"),
    "requests": _work,
    "workload": _workload,
    "executor": _option("executor"),
    "cache": component("cache"),
    "dtype": _dtype,
    "seed": lambda result: str(result["config"].get("seed", "")),
    "processes": _repeats,
    "workers": _workers,
    "machine": _machine,
    "versions": _versions,
    "commit": commit,
    "started": _started,
}


def commands(runs: Sequence[StoredRun], together: bool) -> list[str]:
    """The command that makes this run again, or `together` those that made all of them, for a shell; before that of a
    run from Python, its call."""
    if not together:
        call = runs[0].result["provenance"].get("call")
        return [*([f"import specbench; {call}"] if isinstance(call, str) else []), own_command(runs[0].result)]
    typed = [(_command(run.result["provenance"].get("argv")), run.result) for run in runs]
    found = list(dict.fromkeys(command or own_command(result) for command, result in typed))
    return [command for command in found if command][:MOST_COMMANDS]


def own_command(result: Result) -> str:
    """The command of one run alone, also where it was a job of a sweep or a way of a comparison."""
    overrides = result.get("overrides")
    argv = result["provenance"].get("argv")
    if overrides is None:
        return _command(argv)
    return shlex.join(["python", "-m", "specbench", *_config_dir(argv), *overrides])


def _command(argv: Any) -> str:
    """The words that a process was started with, as a command that finds the same module anywhere; "" if they are not
    this program's, as those of a notebook that calls specbench.evaluate."""
    module = _module(argv)
    return shlex.join(["python", "-m", module, *argv[1:]]) if module else ""


def _config_dir(argv: Any) -> list[str]:
    """Hydra's option for a folder of further parts, which overrides do not have."""
    if not _module(argv):
        return []
    for flag in ("--config-dir", "-cd"):
        if flag in argv[:-1]:
            return ["--config-dir", argv[argv.index(flag) + 1]]
        if given := [word for word in argv if word.startswith(f"{flag}=")]:
            return ["--config-dir", given[0].partition("=")[2]]
    return []


def _module(argv: Any) -> str:
    """The module of this program that a process was started with; "" if it was another program."""
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        return ""
    path = Path(argv[0]).parts
    if path[-2:] == ("specbench", "compare.py"):
        return "specbench.compare"
    return "specbench" if path[-1:] == ("specbench",) or path[-2:] == ("specbench", "__main__.py") else ""


def configuration(results: Sequence[Result]) -> str:
    """The resolved configuration as YAML; of several runs what all of them have in common."""
    common = results[0]["config"]
    for result in results[1:]:
        common = _shared(common, result["config"])
    text: str = yaml.safe_dump(common, sort_keys=False, allow_unicode=True)
    return text


def _shared(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in a.items():
        if isinstance(value, Mapping) and isinstance(b.get(key), Mapping):
            found[key] = _shared(value, b[key])
        elif key in b and b[key] == value:
            found[key] = value
    return found


def unlike(results: Sequence[Result]) -> Iterator[str]:
    """Sentences on differences between runs that no setting made, after which their times cannot be compared."""
    for name, tell in {"machines": _machine, "commits": commit, "versions": _versions, "dtypes": _dtype}.items():
        found = list(dict.fromkeys(map(tell, results)))
        if len(found) > 1:
            yield f"The runs are of {len(found)} {name} ({'; '.join(found[:MOST_VALUES])}): do not compare their times."


def fastest(runs: Sequence[StoredRun]) -> list[str]:
    """For each task on each machine the run with the largest speedup, and how many others its interval does not set it
    apart from. Runs that failed the losslessness test are counted and not ranked."""
    tasks: list[list[StoredRun]] = []
    for run in runs:
        alike = (group for group in tasks if not _unlike_work([group[0], run]))
        if group := next(alike, None):
            group.append(run)
        else:
            tasks.append([run])
    unlike = ", ".join(_unlike_work(runs))
    ranked = f"Ranked in {len(tasks)} groups, each of the same work on one machine: they differ in {unlike}."
    told = [ranked] if unlike else []
    told += [_fastest(group, len(tasks) > 1) for group in tasks[:MOST_TASKS]]
    return told + ([f"And {len(tasks) - MOST_TASKS} more groups: see the table."] if len(tasks) > MOST_TASKS else [])


def _unlike_work(runs: Sequence[StoredRun]) -> list[str]:
    """The settings in which runs did other work, and "machine": in these they cannot be ranked together."""
    parts = [key for key in differences(run.result for run in runs) if key in TASK]
    swept = [key for part in parts for key in dict.fromkeys(key for run in runs for key in run.keys)
             if key.partition(".")[0] == part]  # fmt: skip
    found = [*swept, *(part for part in parts if part not in {key.partition(".")[0] for key in swept})]
    return found + ["machine"] * (len({_machine(run.result) for run in runs}) > 1)


def _fastest(group: Sequence[StoredRun], several: bool) -> str:
    """The sentence on the runs of one task; `several`: there are other tasks."""
    runs = [run for run in group if word(run.result["lossless"]) != "failed"] or group
    best = max(runs, key=lambda run: run.result["speedup"]["measured"])
    speedup = best.result["speedup"]
    common = {k: v for k, v in best.keys.items() if all(run.keys.get(k) == v for run in group)}
    task = {k: v for k, v in common.items() if k.partition(".")[0] in TASK}
    where = f"At {label(task)}: " if several and task else ""
    if word(best.result["lossless"]) == "failed":
        return _capital(f"{where}{none_left(len(group), 'runs')}.")
    error = f" ({interval(speedup['ci95'])})" if speedup["ci95"] else " (too few prompts for an interval)"
    way = {k: v for k, v in best.keys.items() if k not in (common if len(group) > 1 else task)}
    name = label({k: v for k, v in way.items() if k.partition(".")[0] not in SAME_WORK}) or label(way) or best.label
    where = "" if name == best.label else where  # a name that says it all
    failed, doubt = left_out(len(group) - len(runs)), doubts([run.result for run in group], best.result)
    if len(runs) == 1:
        return f"{where}{name}: {speedup['measured']:.2f}x{error}{failed}{doubt}."
    near = sum(run is not best and _overlap(run.result["speedup"], speedup) for run in runs)
    apart = f"; {near} of the others may be as fast" if near else "; its interval is above all others'"
    slower = ", slower than plain decoding" if speedup["ci95"] and speedup["ci95"][1] < 1 else ""
    told = f"{where}fastest of {len(runs)}{failed}: {name}, {speedup['measured']:.2f}x{error}{slower}{apart}{doubt}."
    return _capital(told)


def _capital(told: str) -> str:
    return f"{told[0].upper()}{told[1:]}"


def none_left(runs: int, what: str) -> str:
    """What is said instead of a ranking if no output is the target's."""
    return f"use none: the output of {f'all {runs} {what}' if runs > 1 else 'the run'} FAILED the losslessness test"


def left_out(failed: int) -> str:
    """How many runs are not ranked, since their output is not the target's."""
    return f" ({failed} more FAILED the losslessness test)" if failed else ""


def doubts(results: Sequence[Result], best: Result) -> str:
    """What is to be known of the run that is named first, and of the machine while all of them ran."""
    unsteady = sum(not (result.get("machine") or {"steady": True})["steady"] for result in results)
    told = DOUBTS.get(word(best["lossless"]), "")
    return told + (f"; the machine was not steady in {unsteady} of {len(results)} runs" if unsteady else "")


def _overlap(a: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    """Whether the interval of the best speedup reaches down to the other's; so it does if one has no interval."""
    return not (a["ci95"] and best["ci95"]) or a["ci95"][1] >= best["ci95"][0]


def label(keys: Mapping[str, str]) -> str:
    """Swept keys with their values, in words."""
    return ", ".join(f"{key.split('.')[-1]} {value}" for key, value in keys.items())
