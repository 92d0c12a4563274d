"""The sentence that a run's output begins with: whether to use the drafter, with which gamma, and what limits it.

"Use" and "do not use" need a 95 % interval beside 1, on a steady machine, and are said of what was measured; a gain
that only replay expects is one to try. Nothing is recommended by a run whose output is not the target's, unless that
is a setting.
"""

from collections.abc import Iterator
from math import inf, log
from typing import Any

from specbench.results.fields import FACTORS
from specbench.results.wording import steady, where, within, word

WORTH = 0.01  # smaller gains of another gamma, by replay, are none
SMALL = 0.02  # smaller losses are not named


def verdict_sentence(result: dict[str, Any]) -> str:
    """The answer of a run in one sentence, or a few, from the contents of results.json."""
    verdict, reason = word(result["lossless"]), result["lossless"]["reason"]
    if verdict == "failed":
        why = f" ({reason})" if reason else ""
        failed = f"Do not use this: the output FAILED the losslessness test{why}"
        parts = [f"{failed}: {_measured(result)}, of a wrong output"]
    elif not result["counts"]["drafted"]:
        parts = [f"Nothing was drafted: {_measured(result)}"]
    else:
        parts = [*_advice(result), *_limits(result), *_others(result)]
        parts[0] = "Not lossless by choice. " * (verdict == "lossy") + parts[0]
    return " ".join([f"{'; '.join(parts)}.", *_warnings(result)])


def _advice(result: dict[str, Any]) -> list[str]:
    """What to do, with its numbers, and what replay says beside it."""
    ci95, used, pick = result["speedup"]["ci95"], _used(result), result["gamma_pick"] if result["gamma_sweep"] else None
    measured, with_used = _measured(result, ""), _measured(result)
    replayed = [] if pick is None else [_replayed(result, pick)]
    if ci95 is None:
        return [f"Too few prompts to say: {with_used}", *([] if pick is None or pick["in_sample"] else replayed)]
    if pick is not None and _better(result, pick) and _low(pick["ci95"]) > 1 and 0 not in pick["gammas"]:
        expected = f"{_gammas(pick)}: {_expected(result, pick)}"
        if ci95[0] <= 1:
            return [f"Try {expected}, {with_used}"]
        replayed = replayed if pick["in_sample"] else [f"try {expected}"]
    if ci95[0] > 1:
        return [f"{'Use' if steady(result) else 'Try'} {used}: {measured}", *replayed]
    if ci95[1] >= 1 or not steady(result):
        return [f"No gain is shown: {with_used}", *replayed]
    if pick is None or not _hopeless(pick):  # another gamma may gain
        return [f"Do not use this drafter here with {used}: {measured}", *replayed]
    return [f"Do not use this drafter here: {with_used}", *replayed]


def _measured(result: dict[str, Any], used: str | None = None) -> str:
    """The measured speedup, its interval, and of what it is; `used` is "" where that was said before."""
    used = f" with {_used(result)}" if used is None else used
    ci95 = result["speedup"]["ci95"]
    one = ", of one request" * (ci95 is None and result["counts"]["prompts"] == 1)
    return f"{result['speedup']['measured']:.2f}x{within(ci95)} measured{used} in {where(result)}{one}"


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
        return f"{_expected(result, pick)} with {_gammas(pick)}"
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


def _others(result: dict[str, Any]) -> Iterator[str]:
    """That prefill takes the gain; peers that were faster; what requests that arrive over time wait for their first
    token, at the highest rate."""
    whole, ci95 = result["speedup"]["end_to_end"], result["speedup"]["end_to_end_ci95"]
    if _low(result["speedup"]["ci95"]) > 1 and (whole < 1 if ci95 is None else ci95[0] <= 1):
        yield f"with prefill {whole:.2f}x{within(ci95)}"
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


def _warnings(result: dict[str, Any]) -> Iterator[str]:
    """Sentences on what the numbers do not cover."""
    verdict, failed = word(result["lossless"]), result["counts"]["failed"]
    if verdict in ("untested", "inconclusive"):
        yield f"Losslessness is {verdict}."
    if result["lossless"]["alpha_own"]["passed"] is False:
        yield "Alpha is NOT the drafter's own: alpha and all that follows from it are those of an error."
    if not steady(result):
        yield "The machine was not steady: measure again."
    if result["status"] != "complete":
        yield f"The run is {result['status']}."
    elif failed:
        yield f"{failed} request{'s' * (failed > 1)} failed."
