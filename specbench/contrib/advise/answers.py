"""What was measured, as answers: on or off at each load, what it gains, and what it would take to gain more."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from specbench.contrib.advise.bench import last_pilot
from specbench.contrib.advise.race import FIRST_LOOK
from specbench.results.reader import read_result
from specbench.results.wording import needs, steady, times, unsteady, within
from specbench.stats.estimates import Interval
from specbench.stats.latency import DECODERS

RECITES = 0.25  # share of new tokens that stand earlier in prompt or text: the data are easily guessed
DELAYS, PERCENTILES = ("first_token", "per_token"), ("p50", "p99")
SHOWN = 3  # ways whose reason is told
OF_A_ROUND = ("gamma_policy", "verifier=")  # overrides that other engines have no like of
LoadAnswer = dict[str, Any]


def load_answer(load: str, own: Mapping[str, Any]) -> LoadAnswer:
    """The answer at one load, from what was kept of it."""
    found: LoadAnswer = {
        "load": load,
        "batch_size": own["rows"],
        "rate": own["rate"],
        "on": False,
        "fits": bool(own["stages"]),
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
    units = sum(winner in unit for unit in stage["units"])
    if not units or not stage["folders"].get(winner):
        why = _ended(own, "to measure the winner")
        return found | {"gain": None, "ci95": None, "verdict": None, "fresh": True, "why": why}
    parts = [read_result(Path(folder)) for folder in stage["folders"][winner]]
    result = max(parts, key=lambda part: part["counts"]["tokens"])
    gain, ci95 = stage["gains"][winner]
    verdict, requests = stage["verdicts"][winner], units * own["unit"]
    failed = stage.get("reasons", {}).get(winner, "").startswith("failed")
    on = ci95 is not None and ci95[0] > 1 and verdict != "failed" and not failed
    found |= {
        "on": on, "gain": gain, "ci95": ci95, "verdict": verdict, "fresh": True, "words": own["words"],
        "rivals": rivals(own),
        "end_to_end": None if own["rate"] or parts[1:] else result["speedup"]["end_to_end"],
        "units": units, "requests": requests, "needs": needs(ci95, requests, units), "steady": all(map(steady, parts)),
        "tokens_per_second": tokens_per_second(parts), "waits": waits(result),
        "goodput": goodput(result), "more": more(result) if own["rate"] is None else "",
        "folder": stage["folders"][winner][-1], "constant": best_constant(own), "notes": [*answer_notes(own, parts)],
        "uncompiled": uncompiled(result),
        "models": {role: result["config"][role] for role in ("target", "drafter")},
    }  # fmt: skip
    return found | {"why": stage["reasons"][winner] if failed else _why(own, found)}


def _why_none(own: Mapping[str, Any], best: str | None) -> str:
    """Why there is nothing to measure, in words."""
    stages, told = own["stages"], dict[str, str]()
    if not stages:
        return f"no way fits: {[*own['refused'].values()][-1]}"
    for stage in stages.values():
        told |= stage.get("reasons", {})
    if any(way not in told for stage in stages.values() for way in stage["ways"]):
        return _ended(own, "to choose a way")
    others = [f"{way}: {reason}" for way, reason in told.items() if not reason.startswith("slower")]
    lost = "all ways lost against plain decoding in the pilot" if not others else "no way was left after the pilot"
    return "; ".join([lost, *([f"the best was {best}"] if best else []), *others[:SHOWN]])


def _ended(own: Mapping[str, Any], what: str) -> str:
    """What ended the decoding at a load too early, and what helps."""
    if own.get("ended") == "prompts":
        return f"too few prompts {what}: give more (data.count), or a smaller batch_size"
    return f"too little time {what}: the same command goes on, with more --minutes"


def _why(own: Mapping[str, Any], found: LoadAnswer) -> str:
    """On or off, in words."""
    if found["verdict"] == "failed":
        return "the output is not the target's: the verdict FAILED"
    if found["on"]:
        told = "95 % interval above 1" + ", but the machine was not steady" * (not found["steady"])
        return f"{told}; {found['needs']}" if found["needs"] else told
    if not found["ci95"]:
        return _ended(own, "to know")
    told = "it loses" if found["ci95"][1] < 1 else "no gain is shown"
    return f"{told}; {found['needs']}" if found["needs"] and found["ci95"][1] >= 1 else told


def rivals(own: Mapping[str, Any]) -> list[str]:
    """The ways that were not told from the winner: those that no test dropped, without those whose interval is below
    the winner's in a stage that tried both, on the same prompts."""
    slower = set[str]()
    for gains in (stage.get("gains", {}) for stage in own["stages"].values()):
        _, of_winner = gains.get(own["winner"], (None, None))
        slower |= {way for way, (_, of_way) in gains.items() if of_way and of_winner and of_way[1] < of_winner[0]}
    return [way for way in own.get("rivals", []) if way not in slower]


def answer_notes(own: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What makes the numbers doubtful, of all parts of a measurement."""
    if len(parts) > 1:
        yield f"waiting times and goodput are of the largest of {len(parts)} parts, tokens/s of all of them"
    if parts[0]["choices"]["data"] == "stdlib":
        most = parts[0]["config"]["max_new_tokens"]
        yield (f"measured on Python source, and at most {most} new tokens: other prompts gain more or less; give "
               "yours, as by data=jsonl data.path=F")  # fmt: skip
    pilot, first = last_pilot(own["stages"]), FIRST_LOOK[own["unit"] > 1]
    if len(pilot.get("left", ())) > 1 and len(pilot["units"]) < first:
        yield (f"the pilot ended after {len(pilot['units'])} units, and no way is dropped before {first}: with more "
               "--minutes, and prompts, the choice is surer")  # fmt: skip
    if reasons := dict.fromkeys(reason for part in parts for reason in unsteady(part)):
        yield f"the machine was not steady: {'; '.join(reasons)}"
    if (recited := max(part.get("recited") or 0 for part in parts)) >= RECITES:
        yield f"{recited:.0%} of the new tokens stand earlier in prompt or text: other data may be harder to guess"
    if own.get("first_turns"):
        yield "of prompts of several turns the first turn alone was decoded"
    if any(map(uncompiled, parts)):
        yield ("measured without compiled programs, which a long run makes: with them (executor=compiled) "
               "the gain is another")  # fmt: skip
    gammas = of_gammas(own, own["words"])
    if len(gammas) > 1 and gammas[max(gammas)][1] == own["words"]:
        yield f"gamma {max(gammas)} is the largest tried"
    tokens = sum(part["counts"]["tokens"] for part in parts) / sum(part["counts"]["prompts"] for part in parts)
    for decoder, served in tokens_per_second(parts).items():
        if (offered := (own["rate"] or 0.0) * tokens) > served:
            name = decoder.replace("baseline", "plain")
            yield (f"{offered:.0f} tokens a second are asked for, and {name} decoding gives {served:.0f}: the queue "
                   "grows, and with it the times, by the number of requests")  # fmt: skip
    yield from dict.fromkeys(note for part in parts for note in part["notes"])


def uncompiled(result: Mapping[str, Any]) -> bool:
    """Whether a run had no compiled programs, where `executor=auto` makes such on a CPU if a run is long enough."""
    programs, settings = result["executor"].get("programs", {}), result["config"]["executor"]
    could = settings.get("programs") and settings.get("compile") == "auto" and result["choices"]["cache"] != "dynamic"
    return bool(could) and "decision" in programs and not programs["used"]


def tokens_per_second(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Tokens per second of both decoders, over all parts of a measurement."""
    found = {}
    for name, counted in zip(DECODERS, ("tokens", "baseline_tokens"), strict=True):
        tokens = np.array([part["counts"][counted] for part in parts])
        rates = np.array([part["throughput"][f"{name}_tokens_per_second"] for part in parts])
        found[name] = float(tokens.sum() / (tokens / rates).sum())
    return found


def of_gammas(own: Mapping[str, Any], words: Sequence[str]) -> dict[int, tuple[float, list[str]]]:
    """The ways that were tried which differ from these overrides in gamma alone, by gamma: their gain before the
    measurement, and their overrides."""
    found, others = dict[int, tuple[float, list[str]]](), dict(word.split("=", 1) for word in words) | {"gamma": ""}
    for stage in (stage for name, stage in own["stages"].items() if name != "measurement"):
        for way, its in stage["ways"].items():
            settings = dict(word.split("=", 1) for word in its)
            if settings | {"gamma": ""} == others:
                gamma, gain = int(settings.get("gamma", 0)), stage.get("gains", {}).get(way, (0.0, None))[0]
                found[gamma] = max(found.get(gamma, (0.0, its)), (gain, its))
    return found


def best_constant(own: Mapping[str, Any]) -> list[str]:
    """The overrides of the winner, or, if it has a policy or a verifier, without them and with the constant gamma that
    gained most."""
    words = [word for word in own["words"] if not word.startswith(OF_A_ROUND)]
    if words == own["words"]:
        return words
    return max(of_gammas(own, words).values(), default=(0.0, words))[1]


def waits(result: Mapping[str, Any]) -> dict[str, Any]:
    """Percentiles of both decoders and their ratios (ours over plain decoding's); with intervals if requests arrive
    over time. None of a delay that a decoder has not, as where each request ends in its first round."""
    of_rate, found = [served["ratio"] for served in result["latency_by_rate"]], dict[str, Any]()
    for delay, p in product(DELAYS, PERCENTILES):
        ours, plain = (result["latency"][decoder][delay][p] for decoder in DECODERS)
        ci95 = [ratio[delay][p]["ci95"] for ratio in of_rate if ratio[delay][p]]
        if plain and ours is not None:
            entry = {"speculative": ours, "baseline": plain, "ratio": ours / plain, "ci95": ci95[0] if ci95 else None}
            found.setdefault(delay, {})[p] = entry
    return found


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
    of_time, plain = ("time from arrival to last token: ", "") if found["rate"] else ("", " plain decoding")
    told, ci95 = gain_text(found)
    gain = "" if found["gain"] is None else f": {of_time}{told}{plain}{within(ci95)}"
    gain += " in the pilot" if gain and not found["fresh"] else ""
    gain += f", with prefill {times(found['end_to_end'])}" if found.get("end_to_end") else ""
    verdict = f", verdict {found['verdict']}" if found["verdict"] else ""
    others = found.get("rivals") or [] if advice(found) != "OFF" else []
    names = ", ".join(others) if len(others) <= SHOWN else f"{len(others)} other ways"
    untold = f"; it could not be told from {names}, which may be as fast or faster" if others else ""
    way = f" with {found['way']}" if found["way"] else ""
    return f"{found['load']}: {advice(found)}{way}{gain}{verdict}; {found['why']}{untold}."


def advice(found: LoadAnswer) -> str:
    """ON, or OFF: since it loses or nothing fits, or as long as its interval holds 1 or there is none."""
    ci95 = found["ci95"]
    if found["on"]:
        return "ON"
    if found["verdict"] == "failed" or not found["fits"]:
        return "OFF"
    if not ci95:
        return "OFF, not known"
    return "OFF, not decided" if ci95[0] <= 1 <= ci95[1] else "OFF"


def gain_text(found: LoadAnswer) -> tuple[str, Interval]:
    """The gain at a load and its interval; of requests that arrive over time it is one of waiting, and below 1 both are
    told as their inverses."""
    gain, ci95 = found["gain"], found["ci95"]
    if not (found["rate"] and gain):
        return times(gain), ci95
    if gain >= 1:
        return f"{times(gain)} shorter", ci95
    return f"{times(1 / gain)} longer", ci95 and (1 / ci95[1], 1 / ci95[0])


def crossings(found: Sequence[LoadAnswer]) -> Iterator[str]:
    """The break-even batch size at each rate, as far as intervals of measurements tell it."""
    for rate in dict.fromkeys(each["rate"] for each in found):
        own = sorted((each for each in found if each["rate"] == rate), key=lambda each: each["batch_size"])
        if len(own) < 2:
            continue
        sides = {each["batch_size"]: _side(each) for each in own}
        told = f"At {rate:g} requests a second: " if rate else ""
        between = [f"{a} and {b}" for a, b in pairwise(sides) if (sides[a], sides[b]) == ("above", "below")]
        unsure = [size for size in sides if sides[size] not in ("above", "below")]
        if between:
            yield f"{told}Break-even lies between batch {between[0]}."
        elif unsure:
            yield f"{told}Break-even is not known: at batch {unsure[0]} {sides[unsure[0]]}."
        elif {*sides.values()} == {"above"}:
            yield f"{told}Break-even is above batch {max(sides)}, the largest that was measured."
        elif {*sides.values()} == {"below"}:
            yield f"{told}Break-even is below batch {min(sides)}, the smallest that was measured."


def _side(found: LoadAnswer) -> str:
    """Whether a gain is above or below 1; else why that is not known."""
    if found["verdict"] == "failed":
        return "the verdict failed"
    if not found["fresh"] or not found["ci95"]:
        return "there is no interval" if found["fresh"] else "nothing was measured after the pilot"
    low, high = found["ci95"]
    return "above" if low > 1 else "below" if high < 1 else "the interval holds 1"
