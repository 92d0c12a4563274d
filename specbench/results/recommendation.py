"""What a run's output begins with: four lines on whether it works, what the drafter is worth, whether it is faster
here, and what to do next; and what limits the gain, which stands below.

"Use" is said of what was measured, with a 95 % interval above 1 on a steady machine; "do not use" if it is below 1;
"try" of a gamma that replay expects to be faster than the run's own, with an interval above 1; "leave it off" if the
interval is not above 1 and replay expects a gain of no gamma; "measure" where nothing is claimed.
"""

import shlex
from collections.abc import Iterator
from math import inf, log
from typing import Any, NamedTuple

from specbench.results.fields import FACTORS
from specbench.results.wording import capital, steady, where, within, word

WORTH = 0.01  # smaller gains of another gamma, by replay, are none
SMALL = 0.02  # smaller losses are not named
HERE = "On this machine "
VERDICTS = {
    "passed": "It works: no change of the output distribution was found (verdict passed{why}).",
    "failed": "It does not work, do not use it: the output is not the target's (verdict FAILED{why}).",
    "lossy": "It works; the settings change the output distribution: not lossless by choice (verdict lossy{why}).",
    "untested": "It ran; whether the output is unchanged was not tested (verdict untested{why}).",
    "inconclusive": "It ran; whether the output is unchanged is not known (verdict inconclusive{why}).",
}  # by verdict


class RunAnswer(NamedTuple):
    """The four lines; `command` is what the last one tells to type, "" if there is nothing or it is not known."""

    works: str
    drafter: str
    speed: str
    next: str
    command: str

    @property
    def lines(self) -> list[str]:
        """The lines, without the command."""
        return [*self[:4]]


def answer(result: dict[str, Any]) -> RunAnswer:
    """The answer of a run, from the contents of results.json."""
    return RunAnswer(_works(result), _drafter(result), f"{_speed(result)}.", *_next(result))


def verdict_sentence(result: dict[str, Any]) -> str:
    """The answer of a run as one text."""
    return " ".join(answer(result).lines)


def closing(result: dict[str, Any]) -> str:
    """The speed again, with the verdict: the last line of a terminal."""
    told, verdict = _speed(result).removeprefix(HERE), word(result["lossless"])
    return f"{capital(told)}; verdict {'FAILED' if verdict == 'failed' else verdict}."


def details(result: dict[str, Any]) -> str:
    """What replay expects, what limits the gain, and what else was faster; "" if there is nothing to say."""
    if word(result["lossless"]) == "failed" or not result["counts"]["drafted"]:
        return ""
    pick, parts = _pick(result), [*_limits(result), *_others(result)]
    if pick is not None and not (result["speedup"]["ci95"] is None and pick["in_sample"]):
        parts.insert(0, _replayed(result, pick))
    return capital(f"{'; '.join(parts)}.") if parts else ""


def _works(result: dict[str, Any]) -> str:
    """Whether it works, and the output is unchanged."""
    verdict, reason = word(result["lossless"]), result["lossless"]["reason"]
    told, failed = VERDICTS[verdict].format(why=f": {reason}" if reason else ""), result["counts"]["failed"]
    if result["status"] != "complete":
        return f"{told} The run is {result['status']}."
    return told + (f" {failed} request{'s' * (failed > 1)} failed." if failed else "")


def _drafter(result: dict[str, Any]) -> str:
    """What the drafter is worth on any machine."""
    if not result["counts"]["drafted"]:
        return "Nothing was drafted: both ways decode plainly."
    kept, alpha = result["block_efficiency"]["mean"], result["alpha"]["mean"]
    unit = "levels" if result["beam"] else "tokens"
    told = f"{kept:.2f} {unit} per target call, where plain decoding has 1: block efficiency (tau)"
    if alpha is not None:
        told += f"; {alpha:.0%} of the drafter's tested guesses accepted: alpha {alpha:.2f}"
    told += "."
    if result["lossless"]["alpha_own"]["passed"] is False:
        told += " Alpha is NOT the drafter's own: alpha and all that follows from it are those of an error."
    return told


def _speed(result: dict[str, Any]) -> str:
    """Whether it is faster than plain decoding, with the interval, without a full stop."""
    ci95, pick = result["speedup"]["ci95"], _pick(result)
    several = "" if where(result) == "one process" else f" in {where(result)}"
    value = f"{result['speedup']['measured']:.2f}x{within(ci95)}{several}"
    if word(result["lossless"]) == "failed":
        return f"The output is wrong, so its speed says nothing: {value}"
    if not steady(result):
        return f"The machine was not steady, measure again: speedup over plain decoding {value}"
    if not result["counts"]["drafted"]:
        return f"{HERE}the loop without drafts, against plain decoding: {value}"
    if ci95 is None:
        return f"Too few prompts to compare its speed with plain decoding's: {value}"
    if ci95[0] > 1:
        return f"{HERE}it is faster than plain decoding: {value}{_prefill(result)}"
    told = "slower than" if ci95[1] < 1 else "not shown to be faster or slower than"
    told = f"{HERE}it is {told} plain decoding: {value}"
    if pick is not None and _hopeless(pick):
        told += f" with {_used(result)}, and {_replayed(result, pick)}: leave it off"
    return told


def _next(result: dict[str, Any]) -> tuple[str, str]:
    """What to do next, and a command."""
    ci95, pick = result["speedup"]["ci95"], _pick(result)
    if word(result["lossless"]) == "failed" or result["lossless"]["alpha_own"]["passed"] is False:
        if result["choices"].get("executor") == "eager":
            return "Next: find out which part is wrong, beginning with the drafter and the verifier.", ""
        return "Next: find out whether the executor is the cause:", _command(result, "executor=eager")
    if result["status"] != "complete":
        return "Next: measure all requests, by the same command:", _own_command(result)
    if not steady(result):
        return "Next: measure again while nothing else runs:", _own_command(result)
    if not result["counts"]["drafted"]:
        if result["gamma"] == 4:
            return "Next: measure with another drafter.", ""
        return "Next: measure with drafts:", _command(result, "gamma=4")
    if ci95 is None:
        return _more_prompts(result)
    if pick is not None and _worth_a_try(result, pick):
        over, policy = pick["over_own"], result["choices"].get("gamma_policy", "fixed")
        new = [f"gamma={pick['gammas'][0]}", *(["gamma_policy=fixed"] if policy != "fixed" else [])]
        expected = f"expected to be {over['factor']:.2f}x as fast as {_used(result)}{within(over['ci95'])}"
        used = f"keep {_used(result)}, or " * (ci95[0] > 1)
        return f"Next: {used}try {_gammas(pick)}, {expected}:", _command(result, *new)
    return _without_replay(result, ci95)


def _without_replay(result: dict[str, Any], ci95: list[float]) -> tuple[str, str]:
    """What to do next if no other gamma is to be tried."""
    pick, used = _pick(result), f"keep {_used(result)}" if ci95[0] > 1 else ""
    if ci95[1] < 1 or (not used and pick is not None and _hopeless(pick)):
        off = "leave it off" if pick is not None and _hopeless(pick) else f"do not use {_used(result)}"
        if result["choices"].get("drafter") == "ngram":
            return f"Next: {off}.", ""
        return f"Next: {off}, or measure a drafter without a model:", _command(result, "drafter=ngram")
    if result["repeats"] or result["workers"]:
        return f"Next: {used or 'measure more prompts'}.", ""
    used += "; for a surer number " * bool(used)
    return f"Next: {used}measure in five processes, which may differ:", _command(result, "repeats=5")


def _more_prompts(result: dict[str, Any]) -> tuple[str, str]:
    """What to do where there is no interval: more prompts, if the run has left some out."""
    told, config = "Next: measure more prompts, for an interval", result["config"]
    if result["counts"]["prompts"] == config["data"].get("limit"):
        return f"{told}:", _command(result, f"data.limit={max(32, 8 * config['batch_size'])}")
    return f"{told}; five or more, or as many groups of rows.", ""


def _own_command(result: dict[str, Any]) -> str:
    """The command of the run; "" if it is not known."""
    from specbench.results.report.run_description import command_of  # which loads torch

    return command_of(result)


def _command(result: dict[str, Any], *new: str) -> str:
    """The command of the run with other overrides; "" if it is not known. Another drafter keeps the target, which may
    follow the drafter, and not the verifier."""
    words, changed = shlex.split(_own_command(result)), [word.split("=")[0] for word in new]
    keys = [word.lstrip("+~").split("=")[0] for word in words]
    if "drafter" in changed and "drafter" in keys and "target" not in keys:
        new = (*new, f"target={result['choices']['target']}")
    dropped = {*changed, "hydra", *(["verifier"] if "drafter" in changed else [])}
    kept = [word for word, key in zip(words, keys, strict=True)
            if "=" not in word or not {key, key.split(".")[0]} & dropped]  # fmt: skip
    return shlex.join([*kept, *new]) if words else ""


def _pick(result: dict[str, Any]) -> dict[str, Any] | None:
    """What replay chose, where it holds."""
    return result["gamma_pick"] if result["gamma_sweep"] else None


def _worth_a_try(result: dict[str, Any], pick: dict[str, Any]) -> bool:
    """Whether replay expects the pick to gain, and to be faster than the run's own gamma, by intervals above 1."""
    over = pick["over_own"]
    shown = over is not None and _low(over["ci95"]) > 1 and _low(pick["ci95"]) > 1
    return shown and 0 not in pick["gammas"] and {*pick["gammas"]} != {result["gamma"]}


def _used(result: dict[str, Any]) -> str:
    """The gamma of the run, or the policy that varied it."""
    if result["gamma"] is not None:
        return f"gamma {result['gamma']}"
    policy = result["choices"].get("gamma_policy", "fixed")
    return "its gammas" if policy == "fixed" else f"gamma_policy={policy}"


def _gammas(pick: dict[str, Any]) -> str:
    """What replay chose, on each half of the prompts if it had halves."""
    return f"gamma {' or '.join(str(gamma) for gamma in dict.fromkeys(pick['gammas']))}"


def _expected(result: dict[str, Any], pick: dict[str, Any]) -> str:
    """What replay expects of its pick."""
    remarks = ["in-sample, so too high"] * pick["in_sample"] + ["first process"] * bool(result["repeats"])
    return f"{pick['speedup']:.2f}x{within(pick['ci95'])} expected" + (f" ({', '.join(remarks)})" if remarks else "")


def _better(result: dict[str, Any], pick: dict[str, Any]) -> bool:
    """Whether replay expects more of its pick than of the gamma that was used, or of the policy as measured."""
    own = [entry["speedup"] for entry in result["gamma_sweep"] if entry["gamma"] == result["gamma"]]
    gains = pick["speedup"] > (own or [result["speedup"]["measured"]])[0] * (1 + WORTH)
    return bool(gains and {*pick["gammas"]} != {result["gamma"]})


def _replayed(result: dict[str, Any], pick: dict[str, Any]) -> str:
    """What replay says beside a measurement."""
    upto = f"gamma up to {max(entry['gamma'] for entry in result['gamma_sweep'])}"
    if _hopeless(pick):
        return f"no {upto} is expected to gain"
    if _better(result, pick):
        alike = (over := pick["over_own"]) is not None and _low(over["ci95"]) <= 1
        return f"{_expected(result, pick)} with {_gammas(pick)}" + f", not told apart from {_used(result)}" * alike
    return f"no {'constant' if result['gamma'] is None else 'other'} {upto} is expected to be better"


def _hopeless(pick: dict[str, Any]) -> bool:
    """Whether replay expects a gain of no gamma: the best one loses, or is to draft nothing."""
    return not any(pick["gammas"]) or _high(pick["ci95"]) < 1


def _low(ci95: list[float] | None) -> float:
    return -inf if ci95 is None else ci95[0]


def _high(ci95: list[float] | None) -> float:
    return inf if ci95 is None else ci95[1]


def _limits(result: dict[str, Any]) -> Iterator[str]:
    """Why there is no gain even by Theorem 3.8; otherwise the largest cause of what is lost against it."""
    factors, speedup = result["speedup"]["accounting"], result["speedup"]
    theorem = factors.get("theorem_3_8")
    if theorem and _high(theorem["ci95"]) < 1 and _low(speedup["ci95"]) <= 1:
        yield _too_slow(result, theorem["factor"])
        return
    if theorem and speedup["measured"] >= theorem["factor"]:
        return  # nothing is lost
    causes = {name: own for name, own in factors.items() if name != "theorem_3_8"}
    losses = {name: -log(own["factor"]) for name, own in causes.items() if 0 < own["factor"] < 1}
    shown = [name for name in losses if FACTORS[name][1] and _high(factors[name]["ci95"]) < 1]
    worst = max(shown, key=lambda name: losses[name], default="")
    if worst and losses[worst] >= SMALL:
        what = "most of the loss" if losses[worst] > sum(losses.values()) / 2 else "the largest loss shown"
        yield f"{what} against Theorem 3.8 is {FACTORS[worst][1]} (x{factors[worst]['factor']:.2f})"


def _too_slow(result: dict[str, Any], factor: float) -> str:
    """Why Theorem 3.8 says below 1: by Corollary 3.9 some gamma gains if alpha is above c, so then the gamma is why."""
    alpha, c = result["alpha"]["mean"], result["cost"]["c"]
    if alpha <= c:
        return f"alpha {alpha:.2f} is too low for c {c:.2f} (Theorem 3.8: {factor:.2f}x)"
    long = "the policy's gammas are" if result["gamma"] is None else f"gamma {result['gamma']} is"
    return f"by Theorem 3.8 {long} too long for alpha {alpha:.2f} and c {c:.2f} ({factor:.2f}x)"


def _prefill(result: dict[str, Any]) -> str:
    """That prefill takes a gain."""
    whole, ci95 = result["speedup"]["end_to_end"], result["speedup"]["end_to_end_ci95"]
    lost = whole < 1 if ci95 is None else ci95[0] <= 1
    return f"; with reading the prompt (prefill) {whole:.2f}x{within(ci95)}" if lost else ""


def _others(result: dict[str, Any]) -> Iterator[str]:
    """Peers that were faster; what requests that arrive over time wait for their first token, at the highest rate."""
    for name, over in result["speedup_over"].items():
        if _high(over["ci95"]) < 1:
            yield f"{name} is faster: {over['measured']:.2f}x{within(over['ci95'])} of it"
    if rates := result["latency_by_rate"]:
        entry = max(rates, key=lambda entry: entry["rate"] or 0)
        ratio = entry["ratio"]["first_token"]["p50"]
        if ratio is not None and ratio["ci95"] is not None:
            rate = "" if entry["rate"] is None else f" at {entry['rate']:g}/s"
            share = f"{ratio['factor']:.2f}{within(ratio['ci95'])}"
            yield f"the median first token{rate} takes {share} of plain decoding's time"
