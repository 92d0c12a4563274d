"""What was run, in words: the facts and commands that a page begins with, and in what its runs are not alike."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from specbench.results.comparability import SAME_WORK, TASK, differences
from specbench.results.fields import ResultDict
from specbench.results.reader import StoredRun
from specbench.results.wording import doubts, interval, label, left_out, none_left, word

MOST_VALUES = 6  # of a fact in which runs differ
MOST_COMMANDS = 6
MOST_TASKS = 4  # that a page of many runs begins with
USUAL = {"weights": "pretrained", "chat_template": "never"}  # of a component's settings, not worth a word


def facts(results: Sequence[ResultDict]) -> dict[str, str]:
    """What was run, by name; of several runs the values that they have, in order."""
    found = {}
    for name, tell in FACTS.items():
        values = list(dict.fromkeys(told for result in results if (told := tell(result))))
        if len(values) > 1 and name == "started":
            values = [f"{min(values).split(',')[0]} to {max(values).split(',')[0]}"]
        if len(values) > 1:
            more = f"; and {len(values) - MOST_VALUES} more" if len(values) > MOST_VALUES else ""
            values = [f"{len(values)} values: {'; '.join(values[:MOST_VALUES])}{more}"]
        if values:
            found[name] = values[0]
    return found


def _option(group: str, result: ResultDict, but: str = "") -> str:
    """The option that a run chose in a group, and its settings that are worth a word, without `but`."""
    settings = result["config"].get(group)
    settings = dict(settings) if isinstance(settings, Mapping) else {}
    path = settings.pop("path", None)
    told = [f"{key} {_plain(value)}" for key, value in settings.items() if key not in ("_target_", but)
            and value not in (None, False, "", [], {}) and USUAL.get(key) != value]  # fmt: skip
    name = result["choices"].get(group, "")
    return ", ".join([name if path is None else f"{name} ({path})", *told])


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _gamma(result: ResultDict) -> str:
    gamma = result["gamma"]
    return f"chosen by the policy, from {result['config'].get('gamma')}" if gamma is None else str(gamma)


def _sampling(result: ResultDict) -> str:
    config = result["config"]
    told = [f"{config['temperature']:g}"]
    for name, off in (("top_k", 0), ("top_p", 1), ("repetition_penalty", 1)):
        told += [f"{name} {config[name]:g}"] if config.get(name, off) != off else []
    return ", ".join(told)


def _lenience(result: ResultDict) -> str:
    lenience = result["config"]["lenience"]
    return f"{lenience:g}" if lenience != 1 else ""


def _decoding(result: ResultDict) -> str:
    """Nothing where one text is sampled."""
    beam = result["beam"]
    if beam is None:
        return ""
    stops = ", ends when as many have ended" if beam["early_stopping"] else ""
    return (f"beam search, {beam['beams']} beams, {beam['drafter_beams']} of the drafter's, length penalty "
            f"{beam['length_penalty']:g}{stops}")  # fmt: skip


def _work(result: ResultDict) -> str:
    counts, config = result["counts"], result["config"]
    told = [f"{counts['prompts']:,}"]
    told += [f"up to {config['max_new_tokens']:,} tokens each"] if "max_new_tokens" in config else []
    told += [f"batch {config['batch_size']}"] if config.get("batch_size", 1) != 1 else []
    told += [f"{counts['failed']} failed"] if counts["failed"] else []
    return ", ".join(told)


def _workload(result: ResultDict) -> str:
    """Nothing where all requests are there from the start."""
    told = _option("workload", result)
    return "" if told == "all_at_once" else told


def _dtype(result: ResultDict) -> str:
    known = result.get("identity", {}).get("device", {}).get("dtype") or result["config"].get("dtype")
    return str(known or "").removeprefix("torch.")


def _machine(result: ResultDict) -> str:
    where = result["provenance"]
    return f"{where['device']}, {where['threads']} thread{'s' * (where['threads'] != 1)}"


def _versions(result: ResultDict) -> str:
    return ", ".join(f"{name} {version}" for name, version in result["provenance"]["versions"].items())


def commit(result: ResultDict) -> str:
    """The commit that made a result, and whether its files were changed."""
    where = result["provenance"]
    return (where["git_sha"] or "unknown")[:7] + (" with changes" if where["dirty"] else "")


def _started(result: ResultDict) -> str:
    seconds = result["provenance"].get("seconds")
    started = str(result["provenance"]["started"]).replace("T", " ").replace("+00:00", " UTC")
    return started if seconds is None else f"{started}, {seconds:.0f} s"


def _repeats(result: ResultDict) -> str:
    repeats = result["repeats"]
    return f"{repeats['processes']} pooled, which differ in: {repeats['vary']}" if repeats else ""


def _workers(result: ResultDict) -> str:
    hosts = [worker["host"] for worker in result["workers"]]
    return f"{len(hosts)} on {', '.join(dict.fromkeys(hosts))}" if hosts else ""


FACTS: dict[str, Callable[[ResultDict], str]] = {
    "target": lambda result: _option("target", result),
    "drafter": lambda result: _option("drafter", result),
    "gamma": _gamma,
    "policy": lambda result: _option("gamma_policy", result, but="gamma"),
    "verifier": lambda result: _option("verifier", result),
    "lenience": _lenience,
    "decoding": _decoding,
    "temperature": _sampling,
    "data": lambda result: _option("data", result),
    "requests": _work,
    "workload": _workload,
    "executor": lambda result: _option("executor", result).split(",")[0].split(" (")[0],
    "cache": lambda result: _option("cache", result),
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
        return [*([f"import specbench; {call}"] if isinstance(call, str) else []), run_command(runs[0].result)]
    typed = (_command(run.result["provenance"].get("argv")) or run_command(run.result) for run in runs)
    return [command for command in dict.fromkeys(typed) if command][:MOST_COMMANDS]


def run_command(result: ResultDict) -> str:
    """The command of one run alone, also where it was a job of a sweep or a way of a comparison."""
    overrides, argv = result.get("overrides"), result["provenance"].get("argv")
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


def configuration(results: Sequence[ResultDict]) -> str:
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


def unlike(results: Sequence[ResultDict]) -> Iterator[str]:
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
    name = _name(best, common if len(group) > 1 else task)
    where = "" if name == best.label else where  # a name that says it all
    failed, doubt = left_out(len(group) - len(runs)), doubts([run.result for run in group], best.result)
    if len(runs) == 1:
        return f"{where}{name}: {speedup['measured']:.2f}x{error}{failed}{doubt}."
    near = sum(run is not best and _overlap(run.result["speedup"], speedup) for run in runs)
    apart = f"; {near} of the others may be as fast" if near else "; its interval is above all others'"
    slower = ", slower than plain decoding" if speedup["ci95"] and speedup["ci95"][1] < 1 else ""
    told = f"{where}fastest of {len(runs)}{failed}: {name}, {speedup['measured']:.2f}x{error}{slower}{apart}{doubt}."
    return _capital(told)


def _name(run: StoredRun, common: Mapping[str, str]) -> str:
    """A run by its keys without those in `common`, and if others are left without those that are no work."""
    way = {key: value for key, value in run.keys.items() if key not in common}
    return label({k: v for k, v in way.items() if k.partition(".")[0] not in SAME_WORK}) or label(way) or run.label


def _capital(told: str) -> str:
    return f"{told[0].upper()}{told[1:]}"


def _overlap(a: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    """Whether the interval of the best speedup reaches down to the other's; so it does if one has no interval."""
    return not (a["ci95"] and best["ci95"]) or a["ci95"][1] >= best["ci95"][0]
