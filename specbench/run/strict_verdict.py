"""Which verdicts strict=true accepts, and what a verdict is worth as one of several."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench.errors import VerdictError
from specbench.results.wording import alpha_text, word

GOOD = ("passed", "lossy")


def refuse_verdict(strict: bool, result: dict[str, Any], folder: Path) -> None:
    """Raises VerdictError if `strict` and a verdict of a result is not good."""
    lossless = result["lossless"]
    if strict and word(lossless) not in GOOD:
        raise VerdictError(f"strict=true: the verdict is {word(lossless)} ({lossless['reason']}), see {folder}")
    if strict and not is_good(lossless):
        raise VerdictError(f"strict=true: {alpha_text(lossless['alpha_own'])}, see {folder}")


def is_good(lossless: Mapping[str, Any]) -> bool:
    """Whether the verdict is good, and that on alpha not bad."""
    return word(lossless) in GOOD and lossless["alpha_own"]["passed"] is not False


def of_several(lossless: Mapping[str, Any], tests: int) -> dict[str, Any]:
    """A verdict as one of so many tests, the worst of which counts: by Bonferroni's method its p-value is multiplied by
    their number. One that failed by its p-value alone has passed if that is not small among so many."""
    by_chance, found = lossless["detail"].get("by_chance"), dict(lossless)
    if lossless["method"] == "martingale" and lossless["statistic"] is not None:
        found["statistic"] = min(1.0, tests * lossless["statistic"])
    if word(lossless) == "failed" and by_chance is not None and by_chance * tests >= lossless["threshold"]:
        told = f"its p-value {by_chance:.2g} is no failure as one of {tests} tests"
        found |= {"verdict": "passed", "passed": True, "reason": told}
    return found
