"""Results in words: verdicts, intervals, numbers, and the accounting of the speedup."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

from specbench.results.fields import FACTORS

STYLES = {"passed": "green", "lossy": "yellow"}  # of verdicts; others are red
DOUBTS = {"lossy": "; not lossless by choice", "untested": "; losslessness is untested",
          "inconclusive": "; losslessness is inconclusive"}  # fmt: skip
DRAWS = {"tested": "at tested positions towards the drafter", "recovered": "in recovered tokens (another temperature)",
         "bonus": "in bonus tokens (likewise)"}  # fmt: skip
WORDS = {"passed": "yes", "lossy": "no", "failed": "FAILED"}  # in tables
MOST_NAMES = 4  # of ways in a sentence
WANTED = 0.05  # +- of a speedup that is called known


def word(lossless: Mapping[str, Any]) -> str:
    """The verdict of a result: "passed", "failed", "untested", "inconclusive" or "lossy"."""
    return str(lossless["verdict"])


def verdict_text(lossless: Mapping[str, Any]) -> tuple[str, str]:
    """(sentence, colour) for the losslessness verdict of a result, and for that on its alpha."""
    found = word(lossless)
    told = [lossless["reason"], *_tested(lossless), *_detectable(lossless), alpha_text(lossless["alpha_own"])]
    opening = {"lossy": "not lossless by choice", "failed": "FAILED"}.get(found, found)
    wrong = lossless["alpha_own"]["passed"] is False
    return f"{opening}: {'; '.join(part for part in told if part)}", STYLES.get("" if wrong else found, "bold red")


def alpha_text(own: Mapping[str, Any]) -> str:
    """Whether alpha is the drafter's own, in words; empty if no guess was tested."""
    if own["passed"] is None:
        return f"alpha is not tested: {own['reason']}" if own["reason"] else ""
    distance = "" if own["largest"] is None else f"q within {own['largest']:.1g} of its own, limit {own['limit']:.1g}"
    if distance and own["mean_limit"] is not None and own["total_variation"] > own["mean_limit"]:
        distance = f"q on average {own['total_variation']:.1g} from its own, limit {own['mean_limit']:.1g}"
    if own["passed"]:
        return f"alpha is the drafter's own: {distance}"
    return f"ALPHA IS NOT THE DRAFTER'S OWN: {own['reason']} ({distance})"


def _tested(lossless: Mapping[str, Any]) -> Iterator[str]:
    """What the verdict was made from."""
    detail = lossless["detail"]
    if lossless["method"] == "beams":
        yield f"all beams of {detail['equal']} of {detail['requests']} requests are plain beam search's"
        right = detail["scored_again"] - detail["wrong_scores"]
        yield f"{right} of {detail['scored_again']} best scores are the stock module's"
    elif "equal" in detail:
        yield f"{detail['equal']} of {detail['requests']} outputs equal plain decoding's"
    if "wrong" in detail:
        yield f"{detail['tokens'] - detail['wrong']:,} of {detail['tokens']:,} tokens are the stock module's"
    if detail.get("ties"):
        largest = detail.get("largest_tie")  # results of earlier versions have none
        far = "" if largest is None else f" of at most {largest:.2g} in logits"
        yield f"{detail['ties']} text{'s' * (detail['ties'] > 1)} parted at ties{far}"
    if 0 < (tokens := detail.get("tokens", 0)) < detail.get("of_tokens", 0):
        yield f"{tokens:,} of {detail['of_tokens']:,} tokens were read again"
    counted = lossless.get("passed") is False and "by_chance" not in detail  # a fault decided, whose number is a count
    if "tested" in detail and not counted and lossless["statistic"] is not None and word(lossless) != "untested":
        yield f"p-value {lossless['statistic']:.2g} (below {lossless['threshold']:g} fails)"
    if (tv := lossless["decoder_tv"]) and tv["largest"] is not None:
        # p of a long run is not kept of all.
        where = f" at {tv['positions']:,} of {tokens:,} tokens" if tv["positions"] < tokens else ""
        limit = f"limit {tv['largest_limit']:.1g}"
        yield f"the decoder's p is within {tv['largest']:.1g} of the stock module's{where}, {limit}"


def _detectable(lossless: Mapping[str, Any]) -> Iterator[str]:
    """What the run would have found."""
    found = lossless["detectable"]
    all_or = f"lenience {found['lenience']:.2f}" if found["lenience"] else "a verifier that accepts every guess"
    names = [all_or] if found["lenience"] is not None else []
    tvs = [f"{tv:.3f} {DRAWS[kind]}" for kind, tv in found["by_kind"].items() if tv is not None and kind in DRAWS]
    names += [f"a total variation of {', '.join(tvs)}"] if tvs else []
    if names:
        yield f"it would have found {' or '.join(names)}"


def account(result: Mapping[str, Any]) -> str:
    """The accounting as a sentence whose numbers multiply to the measured speedup, up to those that are 1.00 and left
    out."""
    factors = {name: entry["factor"] for name, entry in result["speedup"]["accounting"].items()}
    counts, cost = result["counts"], result["cost"]
    verify = f"verifying {counts['verified'] / counts['rounds']:.1f} tokens costs {cost['v']:.2f} steps"
    parts = [f"3.8 says {factors.pop('theorem_3_8'):.2f}x"]
    parts += [f"{verify if name == 'verify' else FACTORS[name][0]} x{factor:.2f}" for name, factor in factors.items()
              if abs(factor - 1) >= 0.005]  # fmt: skip
    return f"{'; '.join(parts)} -> {result['speedup']['measured']:.2f}x measured"


def within(ci95: Sequence[float] | None, digits: int = 2) -> str:
    """An interval behind a number; nothing where there is none."""
    return "" if ci95 is None else f" ({interval(ci95, digits)})"


def times(value: float | None) -> str:
    """A ratio of speeds; "-" for None."""
    return "-" if value is None else f"{value:.2f}x"


def steady(result: Mapping[str, Any]) -> bool:
    """Whether the machine was the same all through the run, or that is not known."""
    return not result["machine"] or bool(result["machine"]["steady"])


def unsteady(result: Mapping[str, Any]) -> list[str]:
    """Why the machine was not the same all through the run; empty if it was, or if that is not known."""
    reasons: list[str] = result["machine"]["reasons"] if result["machine"] else []
    return reasons


def interval(ci95: Sequence[float] | None, digits: int = 2) -> str:
    """A 95 % interval in words; "too few prompts" where there are fewer of them, or groups of rows, than it needs."""
    return "too few prompts" if ci95 is None else f"{ci95[0]:.{digits}f} to {ci95[1]:.{digits}f}"


def where(result: Mapping[str, Any]) -> str:
    """By how many processes a run was decoded, or how many were pooled."""
    if (count := (result["repeats"] or {"processes": 1})["processes"]) > 1:
        return f"{count} processes"
    if (count := result["provenance"].get("processes", 1)) > 1:  # it was continued
        return f"{count} processes, one after the other"
    workers = len(result["workers"])
    return f"{workers} workers" if workers > 1 else "one process"


def needs(ci95: Sequence[float] | None, requests: int, units: int) -> str:
    """How many requests a speedup within +- WANTED needs, from its interval over so many, in `units` whose times are
    independent; "" if they were enough, or there is no interval. Units of several requests are taken to be as many
    with more requests, as groups of rows are."""
    from specbench.stats.bootstrap import units_needed  # which loads torch

    if ci95 is None:
        return ""
    many = ceil((units_needed((ci95[0], ci95[1]), units, WANTED, units < requests) or 0) * requests / units)
    return f"the speedup within +-{WANTED:.0%} needs about {many:,} requests" if many > requests else ""


def speedup_text(result: Mapping[str, Any]) -> str:
    """The interval of the measured speedup in words, and of how many processes it is."""
    ci95, repeats = result["speedup"]["ci95"], result["repeats"]
    few = "processes or prompts for" if repeats else "prompts, or groups of rows, for"
    told = f"too few {few} an interval" if ci95 is None else f"95 % interval {interval(ci95)}"
    if not repeats:
        return f"{told}; {where(result)}"
    sd = repeats["sd"]["speedup"]
    between = "" if sd is None else f"; between processes sd {sd:.1%}"
    return f"{told}; {repeats['processes']} process{'es' * (repeats['processes'] > 1)}{between}"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def number(value: float | None, digits: int) -> str:
    """A number with so many digits after the point; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def estimate(value: Any) -> str:
    """A value of a result as text; an estimate with its standard error."""
    if isinstance(value, dict):
        error = "" if value.get("stderr") is None else f" ± {value['stderr']:.3f}"
        return "-" if value.get("mean") is None else f"{value['mean']:.3f}{error}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def none_left(runs: int, what: str) -> str:
    """What is said instead of a ranking if no output is the target's."""
    return f"use none: the output of {f'all {runs} {what}' if runs > 1 else 'the run'} FAILED the losslessness test"


def left_out(failed: int) -> str:
    """How many runs are not ranked, since their output is not the target's."""
    return f" ({failed} more FAILED the losslessness test)" if failed else ""


@dataclass(frozen=True)
class WayNumbers:
    """One way of decoding in a headline: its name, its speed over plain decoding's, and its whole result."""

    name: str
    speedup: float
    ci95: Sequence[float] | None
    result: Mapping[str, Any]
    clusters: int  # of prompts
    processes: int = 1
    process_share: float = 0.0  # of the interval's squared width, in logarithms

    def wider(self, ways: int) -> Sequence[float] | None:
        """Its interval, so wide that all those of so many ways hold the truth in 95 % of cases (Bonferroni): each of
        its two parts, of processes and of prompts, by its own quantile of Student's t."""
        from specbench.stats.bootstrap import student  # which loads torch

        if self.ci95 is None or self.ci95[0] <= 0:
            return self.ci95
        of_processes, of_prompts = (
            (student(max(size - 1, 1), 0.05 / ways) / student(max(size - 1, 1))) ** 2
            for size in (self.processes, self.clusters)
        )
        growth = sqrt(self.process_share * of_processes + (1 - self.process_share) * of_prompts)
        (low, high), middle = self.ci95, sqrt(self.ci95[0] * self.ci95[1])
        factor = (high / low) ** (growth / 2)
        return middle / factor, middle * factor

    @property
    def drafts(self) -> bool:
        """Whether it drafted anything: with gamma 0 it decodes plainly."""
        return bool(self.result["counts"]["drafted"])

    @property
    def measured(self) -> str:
        """Its speedup in words."""
        return f"{self.speedup:.2f}x plain decoding's speed{within(self.ci95)}"


def no_gain(ways: Sequence[WayNumbers]) -> str:
    """What is said instead of a ranking, if no way has an interval above 1 (for all of them together) or the fastest
    one drafts nothing; empty if one gains, or if nothing is known of that. The fastest way is the first one."""
    fastest, drafting = ways[0], [way for way in ways if way.drafts]
    wide = [way.wider(len(ways)) for way in drafting]
    if fastest.drafts and (fastest.ci95 is None or any(own and own[0] > 1 for own in wide)):
        return ""
    if not drafting:
        return f"Nothing was drafted: {fastest.name} measured {fastest.measured}"
    best = drafting[0]
    if not fastest.drafts and (wide[0] is None or wide[0][0] > 1):
        told = f"The fastest way drafts nothing: {fastest.name}, {fastest.speedup:.2f}x"
        return f"{told}; best of those that draft: {best.name}, {best.measured}"
    chance = f", which may be chance among {len(ways)} ways" if best.ci95 and best.ci95[0] > 1 else ""
    more = "processes" if best.process_share > 0.5 else "prompts"
    unsure = chance or (fastest.drafts and best.speedup > 1)  # more of them may show a gain
    told = f"No gain is shown: leave it off, or measure more {more}" if unsure else "None gains: leave it off"
    told += f" (best: {best.name}, {best.measured}{chance})"
    return told if fastest.drafts else f"{told}; {fastest.name} drafts nothing and measured {fastest.speedup:.2f}x"


def slower(ways: Sequence[WayNumbers]) -> str:
    """Which ways are slower than plain decoding, by intervals that hold for all of them together."""
    names = [way.name for way in ways if (wider := way.wider(len(ways))) is not None and wider[1] < 1]
    if not names:
        return ""
    whose = "all ways" if len(names) == len(ways) > 1 else f"{len(names)} ways"
    return f"; slower than plain decoding: {', '.join(names) if len(names) <= MOST_NAMES else whose}"


def doubts(results: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> str:
    """What is to be known of the run that is named first, and of the machine while all of them ran."""
    shaky = sum(bool(unsteady(result)) for result in results)
    told = DOUBTS.get(word(best["lossless"]), "")
    return told + (f"; the machine was not steady in {shaky} of {len(results)} runs" if shaky else "")


def capital(told: str) -> str:
    """A text that begins with a capital letter."""
    return told[0].upper() + told[1:]


def label(keys: Mapping[str, str]) -> str:
    """Swept keys with their values, in words."""
    return ", ".join(f"{key.split('.')[-1]} {value}" for key, value in keys.items())


def p_value(value: float | None) -> str:
    """A p-value; "-" where there were too few prompts for one."""
    return "-" if value is None else "<.001" if value < 0.001 else f"{value:.3f}"[0 if value >= 0.9995 else 1 :]
