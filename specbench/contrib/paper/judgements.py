"""What our runs say of the paper's claims: "agrees", "differs" or "cannot tell", and how much they could have told.

A quantity agrees with a formula if its 95 % interval lies within a margin of it, and differs if it lies outside; one
that does neither tells nothing. A claim that one number is larger than another agrees if their difference is above 0 by
1.96 standard errors. Without errors, or where they are 0 since all texts are alike, nothing is told.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specbench import theory
from specbench.contrib.paper.measured import MeasuredResult, counted_operations

AGREES, DIFFERS, CANNOT_TELL = "agrees", "differs", "cannot tell"
MARGIN = 0.1  # of a formula: an interval that lies within agrees with it
LEAST = 1e-9  # of a standard error
Z, POWER = 1.96, 2.8  # standard errors of a 95 % interval, and of what it finds in 80 % of experiments


def known(*errors: float | None) -> bool:
    """Whether there are standard errors, and none is 0 up to rounding, as of texts that are all alike."""
    return all(error is not None and error > LEAST for error in errors)


@dataclass(frozen=True)
class Judgement:
    """A claim, the word on it, and with which numbers."""

    claim: str
    word: str
    why: str


def of_formula(value: float, low: float, high: float, expected: float) -> str:
    """Whether a value with its 95 % interval is that of a formula."""
    if max(high - expected, expected - low) <= MARGIN * expected:
        return AGREES
    return CANNOT_TELL if low <= expected * (1 + MARGIN) and high >= expected * (1 - MARGIN) else DIFFERS


def of_order(difference: float, error: float | None) -> str:
    """Whether a difference is above 0."""
    if error is None or abs(difference) <= Z * error:
        return CANNOT_TELL
    return AGREES if difference > 0 else DIFFERS


def theorem_3_8(result: MeasuredResult) -> str:
    """Whether a run's speedup is that of Theorem 3.8."""
    speedup = result["speedup"]
    if speedup["theorem_3_8"] is None or speedup["ci95"] is None:
        return "-"
    low, high = speedup["ci95"]
    word = of_formula(speedup["measured"], low, high, speedup["theorem_3_8"])
    return word if word != CANNOT_TELL else f"{word} (+-{(high - low) / 2 / speedup['measured']:.0%})"


def equation_1(result: MeasuredResult) -> str:
    """Whether a run's tokens a call are those of equation 1 at its alpha."""
    alpha, tokens, gamma = result["alpha"], result["block_efficiency"], result["gamma"]
    if alpha["mean"] is None or gamma is None or not known(alpha["stderr"], tokens["stderr"]):
        return "-"
    expected = theory.expected_tokens(alpha["mean"], gamma)
    slope = theory.expected_tokens(min(1.0, alpha["mean"] + 1e-4), gamma) - expected
    error = Z * math.hypot(tokens["stderr"], slope / 1e-4 * alpha["stderr"])
    return of_formula(tokens["mean"], tokens["mean"] - error, tokens["mean"] + error, expected)


def operations(result: MeasuredResult) -> str:
    """Whether the operations that a run counted are those of Theorem 3.11."""
    counted, predicted, tokens = counted_operations(result), result["operations_factor"], result["block_efficiency"]
    if counted is None or predicted is None or not known(tokens["stderr"]):
        return "-"
    error = Z * counted * tokens["stderr"] / tokens["mean"]
    return of_formula(counted, counted - error, counted + error, predicted)


def orders(
    claim: str,
    results: Sequence[MeasuredResult],
    key: Callable[[MeasuredResult], Any],
    alike: Callable[[MeasuredResult], Any],
    path: str = "alpha",
) -> list[Judgement]:
    """The claim that an estimate rises with `key`, for runs that are `alike` and neighbours by it. Their errors are
    taken as independent, which is too much for runs on the same prompts: some "cannot tell" could be told."""
    groups: dict[str, list[MeasuredResult]] = {}
    for result in results:
        if key(result) is not None and result[path]["mean"] is not None:
            groups.setdefault(repr(alike(result)), []).append(result)
    told = []
    for own in groups.values():
        own.sort(key=key)
        for low, high in pairwise(own):
            if key(low) == key(high):
                continue
            difference, errors = high[path]["mean"] - low[path]["mean"], (low[path]["stderr"], high[path]["stderr"])
            error = math.hypot(*errors) if known(*errors) else None
            seen = "no error: few texts, or all alike" if error is None else f"{POWER * error:.3f} would have been seen"
            why = f"{_named(high)} over {_named(low)}: {difference:+.3f}; {seen}"
            told.append(Judgement(claim, of_order(difference, error), why))
    return told


def _named(result: MeasuredResult) -> str:
    """A run by what the paper's claims are about."""
    config, choices = result["config"], result["choices"]
    lenience = "" if config["lenience"] == 1 else f", l {config['lenience']:g}"
    rule = "" if choices["verifier"] == "speculative" else f", {choices['verifier']}"
    return f"{choices['drafter']} at T {config['temperature']:g}{lenience}{rule}"


def of_formulas(claim: str, words: Sequence[str]) -> list[Judgement]:
    """The claim that a formula holds, from the word on each run."""
    words = [word.partition(" (")[0] for word in words if word != "-"]
    if not words:
        return []
    word = DIFFERS if DIFFERS in words else AGREES if {*words} == {AGREES} else CANNOT_TELL
    counts = ", ".join(f"{words.count(word)} {word}" for word in (AGREES, DIFFERS, CANNOT_TELL) if word in words)
    return [Judgement(claim, word, f"of {len(words)} runs {counts} (within {MARGIN:.0%})")]


def above_zero(results: Sequence[MeasuredResult]) -> list[Judgement]:
    """Section 3.6: even a trivial drafter, of counts of tokens, has an alpha above 0."""
    found = []
    for result in results:
        alpha = result["alpha_on_target_text"]
        if "gram" in result["choices"]["drafter"] and known(alpha["stderr"]):
            word, why = of_order(alpha["mean"], alpha["stderr"]), f"{_named(result)}: {alpha['mean']:.3f}"
            found.append(Judgement("a trivial drafter has alpha above 0 (section 3.6)", word, why))
    return found


def best_of_oracle(c: float) -> tuple[float, float]:
    """By what factor an oracle beats the best constant gamma at most (section 3.5), and at which alpha."""
    alphas = [number / 200 for number in range(1, 200)]
    best = {a: theory.walltime_improvement(a, theory.optimal_gamma(a, c), c) for a in alphas}
    return max((theory.oracle_improvement(a, c) / best[a], a) for a in alphas)


def oracle_lines() -> list[str]:
    """Section 3.5's "up to 60 %", by the formulas, as lines of the page of Figure 3."""
    found = {c: best_of_oracle(c) for c in (0.01, 0.05, 0.1)}
    told = "; ".join(f"c {c:g}: {ratio - 1:.0%}, at alpha {alpha:.2f}" for c, (ratio, alpha) in found.items())
    return [f"Section 3.5: an oracle that chooses each round's gamma gains up to about 60 % on the best constant one. "
            f"By the formulas at most: {told}."]  # fmt: skip


def memory_lines(results: Sequence[MeasuredResult]) -> list[str]:
    """Section 3.4: the target's weights are read once a call, so accesses to memory fall by the tokens of a call."""
    told = []
    for result in results:
        alpha, gamma, tokens = result["alpha"]["mean"], result["gamma"], result["block_efficiency"]["mean"]
        if alpha is not None and gamma:
            expected = theory.expected_tokens(alpha, gamma)
            told.append(f"{_named(result)}, gamma {gamma}: {tokens:.2f} times fewer, by equation 1 {expected:.2f}.")
    return (
        ["Section 3.4, reads of the target's weights for each token:", *(f"- {line}" for line in told)] if told else []
    )


def judged(name: str, results: Sequence[MeasuredResult]) -> list[Judgement]:
    """What the runs of a table or figure say of its claims."""

    def size(result: MeasuredResult) -> float | None:
        return result.get("c_hat")

    def pair(result: MeasuredResult) -> Any:
        return result["choices"]["target"], result["choices"]["drafter"], result["gamma"], result["config"]["lenience"]

    def target(result: MeasuredResult) -> Any:
        return result["choices"]["target"], result["config"]["temperature"]

    def colder(result: MeasuredResult) -> float:
        return -float(result["config"]["temperature"])

    def lenient(result: MeasuredResult) -> float:
        return -float(result["config"]["lenience"])

    def iterative(result: MeasuredResult) -> bool:
        return bool(result["choices"]["verifier"] == "speculative")

    text = "alpha_on_target_text"
    found = of_formulas("equation 1 gives the tokens of a call", [*map(equation_1, results)])
    if name in ("table2", "table4", "figure5"):
        found += of_formulas("Theorem 3.8 gives the measured speedup", [*map(theorem_3_8, results)])
    if name in ("table1", "figure4"):
        found += of_formulas("Theorem 3.11 gives the counted operations", [*map(operations, results)])
    if name == "table3":
        found = orders("a larger drafter has a larger alpha (section 4.2)", results, size, target, text)
        found += orders("alpha is larger at T = 0 than at T = 1 (section 4.2)", results, colder, pair, text)
        found += above_zero(results)
    if name == "table5":
        found = orders("more lenience raises alpha (A.5)", results, lenient, lambda r: (*target(r), *pair(r)[:2]))
    if name == "appendix_a2":
        found = orders("speculative sampling accepts more than rejection sampling (A.2)", results, iterative,
                       lambda r: (*target(r), *pair(r)))  # fmt: skip
    return found
