"""The sentence that a run's output begins with: whether to use the drafter, with which gamma, and what limits it.

"Use" and "do not use" need a 95 % interval beside 1, on a steady machine, and are said of what was measured; a gain
that only replay expects is one to try. Nothing is recommended by a run whose output is not the target's, unless that
is a setting.
"""

from collections.abc import Iterator
from math import log
from typing import Any

from specbench.results.fields import FACTORS
from specbench.results.wording import where, word

WORTH = 0.01  # smaller gains of another gamma, by replay, are none
SMALL = 0.02  # smaller losses are not named


def verdict_sentence(result: dict[str, Any]) -> str:
    """The answer of a run in one sentence, or a few, from the contents of results.json."""
    found = word(result["lossless"])
    if found == "failed":
        return _sentence(f"{_failed(result)}: {_measured(result)}, of a wrong output", [], _warnings(result))
    if not result["counts"]["drafted"]:
        return _sentence(f"Nothing was drafted: {_measured(result)}", [], _warnings(result))
    advice, others = _advice(result)
    if found == "lossy":
        advice = f"Not lossless by choice. {advice}"
    return _sentence(advice, others, _warnings(result))


def _sentence(opening: str, others: list[str], warnings: Iterator[str]) -> str:
    return " ".join([f"{'; '.join([opening, *others])}.", *warnings])


def _failed(result: dict[str, Any]) -> str:
    reason = result["lossless"]["reason"]
    return "Do not use this: the output FAILED the losslessness test" + (f" ({reason})" if reason else "")


def _advice(result: dict[str, Any]) -> tuple[str, list[str]]:
    """What to do, with its numbers; and what else is to be said of it."""
    ci95, pick, used = result["speedup"]["ci95"], _pick(result), _used(result)
    measured, with_used = _measured(result, ""), _measured(result)
    others = [*_limits(result), *_end_to_end(result), *_peers(result), *_load(result)]
    replayed = [] if pick is None else [_replayed(result, pick)]
    if ci95 is None:
        shown = [] if pick is None or pick["in_sample"] else replayed
        return f"Too few prompts to say: {with_used}", [*shown, *others]
    use = "Use" if _steady(result) else "Try"
    better = pick is not None and _better(result, pick) and _above_one(pick["ci95"]) and 0 not in pick["gammas"]
    if pick is not None and better and ci95[0] <= 1:
        return f"Try {_gammas(pick)}: {_expected(result, pick)}, {with_used}", others
    if pick is not None and better and not pick["in_sample"]:
        replayed = [f"try {_gammas(pick)}: {_expected(result, pick)}"]
    if ci95[0] > 1:
        return f"{use} {used}: {measured}", [*replayed, *others]
    if ci95[1] >= 1 or not _steady(result):
        return f"No gain is shown: {with_used}", [*replayed, *others]
    if pick is None or not _hopeless(pick):  # another gamma may gain
        return f"Do not use this drafter here with {used}: {measured}", [*replayed, *others]
    return f"Do not use this drafter here: {with_used}", [*replayed, *others]


def _measured(result: dict[str, Any], used: str | None = None) -> str:
    """The measured speedup, its interval, and of what it is; `used` is "" where that was said before."""
    used = f" with {_used(result)}" if used is None else used
    interval = _interval(result["speedup"]["ci95"])
    few = "" if interval or result["counts"]["prompts"] != 1 else ", of one request"
    return f"{result['speedup']['measured']:.2f}x{interval} measured{used} in {where(result)}{few}"


def _used(result: dict[str, Any]) -> str:
    """The gamma of the run, or the policy that varied it."""
    if result["gamma"] is not None:
        return f"gamma {result['gamma']}"
    policy = result["choices"].get("gamma_policy")
    return f"gamma_policy={policy}" if policy and policy != "fixed" else "its gammas"


def _interval(ci95: list[float] | None) -> str:
    return "" if ci95 is None else f" ({ci95[0]:.2f} to {ci95[1]:.2f})"


def _pick(result: dict[str, Any]) -> dict[str, Any] | None:
    """The best constant gamma by replay; None without replay."""
    pick: dict[str, Any] | None = result["gamma_pick"]
    return pick if result["gamma_sweep"] else None


def _gammas(pick: dict[str, Any]) -> str:
    """What replay chose, on each half of the prompts if it had halves."""
    return f"gamma {' or '.join(str(gamma) for gamma in dict.fromkeys(pick['gammas']))}"


def _expected(result: dict[str, Any], pick: dict[str, Any]) -> str:
    """What replay expects of its pick."""
    remarks = ["in-sample, so too high"] * pick["in_sample"] + ["first process"] * bool(result["repeats"])
    return f"{pick['speedup']:.2f}x{_interval(pick['ci95'])} expected" + (f" ({', '.join(remarks)})" if remarks else "")


def _better(result: dict[str, Any], pick: dict[str, Any]) -> bool:
    """Whether replay expects more of its pick than of the gamma that was used, or of the policy as measured."""
    own = [entry["speedup"] for entry in result["gamma_sweep"] if entry["gamma"] == result["gamma"]]
    if {*pick["gammas"]} == {result["gamma"]}:
        return False
    return bool(pick["speedup"] > (own or [result["speedup"]["measured"]])[0] * (1 + WORTH))


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
    return not any(pick["gammas"]) or _below_one(pick["ci95"])


def _above_one(ci95: list[float] | None) -> bool:
    return ci95 is not None and ci95[0] > 1


def _below_one(ci95: list[float] | None) -> bool:
    return ci95 is not None and ci95[1] < 1


def _steady(result: dict[str, Any]) -> bool:
    return not result["machine"] or bool(result["machine"]["steady"])


def _limits(result: dict[str, Any]) -> Iterator[str]:
    """Why there is no gain even by Theorem 3.8; otherwise the largest cause of what is lost against it."""
    factors = result["speedup"]["accounting"]
    theorem = factors.get("theorem_3_8")
    if theorem and _below_one(theorem["ci95"]) and not _above_one(result["speedup"]["ci95"]):
        yield _too_slow(result, theorem["factor"])
        return
    if theorem and result["speedup"]["measured"] >= theorem["factor"]:
        return  # nothing is lost
    losses = {
        name: -log(own["factor"]) for name, own in factors.items() if name != "theorem_3_8" and 0 < own["factor"] < 1
    }
    shown = [name for name in losses if FACTORS[name][1] and _below_one(factors[name]["ci95"])]
    worst = max(shown, key=lambda name: losses[name], default="")
    if not worst or losses[worst] < SMALL:
        return
    what = "most of the loss" if losses[worst] > sum(losses.values()) / 2 else "the largest loss shown"
    yield f"{what} against Theorem 3.8 is {FACTORS[worst][1]} (x{factors[worst]['factor']:.2f})"


def _too_slow(result: dict[str, Any], factor: float) -> str:
    """Why Theorem 3.8 says below 1: by Corollary 3.9 some gamma gains if alpha is above c, so then the gamma is why."""
    alpha, c = result["alpha"]["mean"], result["cost"]["c"]
    if alpha <= c:
        return f"alpha {alpha:.2f} is too low for c {c:.2f} (Theorem 3.8: {factor:.2f}x)"
    long = "the policy's gammas are" if result["gamma"] is None else f"gamma {result['gamma']} is"
    return f"by Theorem 3.8 {long} too long for alpha {alpha:.2f} and c {c:.2f} ({factor:.2f}x)"


def _end_to_end(result: dict[str, Any]) -> Iterator[str]:
    """That prefill takes the gain, if it does."""
    whole, interval = result["speedup"]["end_to_end"], result["speedup"]["end_to_end_ci95"]
    lost = whole < 1 if interval is None else interval[0] <= 1
    if _above_one(result["speedup"]["ci95"]) and lost:
        yield f"with prefill {whole:.2f}x{_interval(interval)}"


def _peers(result: dict[str, Any]) -> Iterator[str]:
    """Peers that were faster."""
    for name, over in result["speedup_over"].items():
        if _below_one(over["ci95"]):
            yield f"{name} is faster: {over['measured']:.2f}x{_interval(over['ci95'])} of it"


def _load(result: dict[str, Any]) -> Iterator[str]:
    """What requests that arrive over time wait for their first token, at the highest rate."""
    rates = result["latency_by_rate"]
    if not rates:
        return
    entry = max(rates, key=lambda entry: entry["rate"] or 0)
    ratio = entry["ratio"]["first_token"]["p50"]
    if ratio is not None and ratio["ci95"] is not None:
        rate = "" if entry["rate"] is None else f" at {entry['rate']:g}/s"
        share = f"{ratio['factor']:.2f}{_interval(ratio['ci95'])}"
        yield f"the median first token{rate} takes {share} of plain decoding's time"


def _warnings(result: dict[str, Any]) -> Iterator[str]:
    """Sentences on what the numbers do not cover."""
    found = word(result["lossless"])
    if found in ("untested", "inconclusive"):
        yield f"Losslessness is {found}."
    if result["lossless"]["alpha_own"]["passed"] is False:
        yield "Alpha is NOT the drafter's own: alpha and all that follows from it are those of an error."
    if not _steady(result):
        yield "The machine was not steady: measure again."
    if result["status"] != "complete":
        yield f"The run is {result['status']}."
    elif failed := result["counts"]["failed"]:
        yield f"{failed} request{'s' * (failed > 1)} failed."
