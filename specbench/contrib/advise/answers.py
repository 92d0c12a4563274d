"""What was measured, as answers: on or off at each load, what it gains, and what it would take to gain more."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specbench.contrib.advise.bench import Stage
from specbench.contrib.advise.race import PLAIN, Race, break_even
from specbench.results.reader import read_result
from specbench.results.wording import needs, steady, unsteady, within
from specbench.stats.bootstrap import FEWEST, cluster_weights, intervals_of
from specbench.stats.latency import DECODERS, enough

RECITES = 0.25  # share of new tokens that stand earlier in prompt or text: the data are easily guessed
DELAYS = ("first_token", "per_output_token")
PERCENTILES = (50, 99)
SAMPLES, SHOWN = 400, 3  # of a bootstrap; ways whose reason is told
MOST = 10**9
GOES_ON = "the same command goes on, with more --minutes"
LoadAnswer = dict[str, Any]


def load_answer(load: str, own: Mapping[str, Any]) -> LoadAnswer:
    """The answer at one load, from what was kept of it."""
    found: LoadAnswer = {
        "load": load,
        "batch_size": own["rows"],
        "rate": own["rate"],
        "on": False,
        "way": own.get("winner"),
    }
    stages, winner = own["stages"], own.get("winner")
    if winner is None:
        gains = {way: gain for stage in stages.values() for way, gain in stage.get("gains", {}).items()}
        way = max(gains, key=lambda way: gains[way][0], default=None)
        gain, ci95 = gains.get(way, (None, None))
        verdicts = {way: told for stage in stages.values() for way, told in stage["verdicts"].items()}
        why = _why_none(own, way)
        return found | {"gain": gain, "ci95": ci95, "verdict": verdicts.get(way), "why": why, "fresh": False}
    stage = stages.get("measurement", {"units": []})
    race = Race([winner, PLAIN], MOST)
    for unit in stage["units"]:
        race.add(unit)
    if not race.units or not stage["folders"].get(winner):
        why = f"there was no time, or no prompts were left, to measure the winner: {GOES_ON}"
        return found | {"gain": None, "ci95": None, "verdict": None, "fresh": True, "why": why}
    result = read_result(Path(stage["folders"][winner][-1]))
    gain, ci95 = race.gain(winner)
    verdict, requests = stage["verdicts"][winner], len(race.units) * own["unit"]
    failed = stage.get("reasons", {}).get(winner, "").startswith("failed")
    on = ci95 is not None and ci95[0] > 1 and verdict != "failed" and not failed
    found |= {
        "on": on, "gain": gain, "ci95": ci95, "verdict": verdict, "fresh": True, "words": own["words"],
        "rivals": own.get("rivals", []), "units": len(race.units), "requests": requests,
        "needs": needs(ci95, requests, len(race.units)), "steady": steady(result),
        "tokens_per_second": result["throughput"], "waits": waits(stage["waits"], winner),
        "goodput": goodput(result), "more": more(result) if own["rate"] is None else "",
        "folder": stage["folders"][winner][-1], "notes": [*answer_notes(result)],
    }  # fmt: skip
    return found | {"why": stage["reasons"][winner] if failed else _why(found)}


def _why_none(own: Mapping[str, Any], best: str | None) -> str:
    """Why there is nothing to measure, in words."""
    stages, told = own["stages"], dict[str, str]()
    if not stages:
        return f"no way fits: {[*own['refused'].values()][-1]}"
    for stage in stages.values():
        told |= stage.get("reasons", {})
    if any(way not in told for stage in stages.values() for way in stage["ways"]):
        return f"the time was over before a way was chosen: {GOES_ON}"
    others = [f"{way}: {reason}" for way, reason in told.items() if not reason.startswith("slower")]
    lost = "all ways lost against plain decoding in the pilot" if not others else "no way was left after the pilot"
    return "; ".join([lost, *([f"the best was {best}"] if best else []), *others[:SHOWN]])


def _why(found: LoadAnswer) -> str:
    """On or off, in words."""
    if found["verdict"] == "failed":
        return "the output is not the target's: the verdict FAILED"
    if found["on"]:
        return "its whole interval is above 1" + ", but the machine was not steady" * (not found["steady"])
    if not found["ci95"]:
        return f"too few requests to know: {GOES_ON}"
    told = "it loses" if found["ci95"][1] < 1 else "no gain is shown"
    return f"{told}; {found['needs']}" if found["needs"] and found["ci95"][1] >= 1 else told


def answer_notes(result: Mapping[str, Any]) -> Iterator[str]:
    """What makes the numbers doubtful."""
    if not steady(result):
        yield f"the machine was not steady: {'; '.join(unsteady(result))}"
    if (recited := result["recited"] or 0) >= RECITES:
        yield f"{recited:.0%} of the new tokens stand earlier in prompt or text: other data may be harder to guess"
    yield from result["notes"]


def waits(units: Sequence[Stage], way: str) -> dict[str, Any]:
    """Percentiles of both decoders and their ratios (ours over plain decoding's) with intervals over units."""
    found: dict[str, Any] = {}
    for place, delay in enumerate(DELAYS):
        tables = [[np.array([row[place] for row in unit[way][decoder] if row[place] is not None], float)
                   for decoder in DECODERS] for unit in units if way in unit]  # fmt: skip
        if not tables or not all(len(own) for unit in tables for own in unit):
            continue
        point = _percentiles(tables, [1] * len(tables))
        samples = None
        if len(tables) >= FEWEST:
            each = [_percentiles(tables, row) for block in cluster_weights(len(tables), SAMPLES) for row in block]
            samples = {name: np.array([own[name] for own in each]) for name in point}
        intervals = intervals_of(lambda s: s, [point], [samples], dict.fromkeys(point, len(tables)))
        count = sum(len(unit[0]) for unit in tables)
        found[delay] = {
            f"p{p}": {**{d: point[f"{d} p{p}"] for d in DECODERS}, "ratio": point[f"ratio p{p}"],
                      "ci95": intervals[f"ratio p{p}"] if enough(p, count) else None}
            for p in PERCENTILES
        }  # fmt: skip
    return found


def _percentiles(tables: Sequence[Sequence[Any]], times: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for place, decoder in enumerate(DECODERS):
        values = np.concatenate([unit[place] for unit, count in zip(tables, times, strict=True) for _ in range(count)])
        found |= {f"{decoder} p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return found | {f"ratio p{p}": found[f"speculative p{p}"] / found[f"baseline p{p}"] for p in PERCENTILES}


def goodput(result: Mapping[str, Any]) -> dict[str, Any]:
    """Of both decoders, if requests arrive over time and have limits."""
    rates = result["latency_by_rate"]
    return {name: served["goodput"] for name, served in rates[0]["decoders"].items()} if rates else {}


def more(result: Mapping[str, Any]) -> str:
    """What would gain more, by tau / (g c + v + o), scaled to what was measured; "" if that is not known."""
    cost, counts, tau = result["cost"], result["counts"], result["block_efficiency"]["mean"]
    if not counts["drafted"] or not cost["target_step_seconds"]:
        return ""
    g, measured = counts["drafted"] / counts["rounds"], result["speedup"]["measured"]
    drafting, v, o = g * (cost["c"] or 0.0), cost["v"], cost["o"]
    whole = drafting + v + o
    spared = {"drafts cost nothing": drafting, "a call on g + 1 tokens cost as much as on one": v - 1,
              "nothing were done between calls": o}  # fmt: skip
    gains = {told: measured * whole / (whole - part) for told, part in spared.items() if part > 0.02 * whole}
    gains["every guess were accepted"] = measured * (g + 1) / tau
    return (
        f"A round keeps tau = {tau:.2f} tokens and takes {whole:.2f} target steps: {drafting:.2f} of drafting, {v:.2f} "
        f"of verifying, {o:.2f} of the rest. It would gain "
        f"{', '.join(f'{gain:.2f}x if {told}' for told, gain in gains.items())}."
    )


def answer_sentence(found: LoadAnswer) -> str:
    """An answer as one line."""
    gain = "" if found["gain"] is None else f": {found['gain']:.2f}x plain decoding{within(found['ci95'])}"
    gain += " in the pilot" if gain and not found["fresh"] else ""
    verdict = f", verdict {found['verdict']}" if found["verdict"] else ""
    others = found.get("rivals") or []
    names = ", ".join(others) if len(others) <= SHOWN else f"{len(others)} other ways"
    rivals = f"; the pilot could not tell it from {names}, which may be as fast or faster" if others else ""
    way = f" with {found['way']}" if found["way"] else ""
    return f"{found['load']}: {'ON' if found['on'] else 'OFF'}{way}{gain}{verdict}; {found['why']}{rivals}."


def crossings(found: Sequence[LoadAnswer]) -> Iterator[str]:
    """The break-even batch size at each rate."""
    for rate in dict.fromkeys(each["rate"] for each in found):
        gains = {each["batch_size"]: each["gain"] for each in found if each["rate"] == rate and each["gain"]}
        if len(gains) < 2:
            continue
        at, told = break_even(gains), f"At {rate:g} requests a second: " if rate else ""
        if at is not None:
            yield f"{told}Break-even at a batch size of about {at:.1f}, on a line between those that were measured."
        elif min(gains.values()) > 1:
            yield f"{told}Break-even is above a batch size of {max(gains)}, the largest that was measured."
        elif max(gains.values()) <= 1:
            yield f"{told}Break-even is below a batch size of {min(gains)}, the smallest that was measured."
