"""Which verdicts strict=true accepts, and the verdict on a run that is one of several."""

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


def of_several(lossless: Mapping[str, Any], runs: int) -> dict[str, Any]:
    """The verdict on one of several `runs`, of which the worst is looked at: one that failed by its p-value alone has
    passed if that is not small for the smallest of so many (Bonferroni)."""
    by_chance = lossless["detail"].get("by_chance")
    if word(lossless) != "failed" or by_chance is None or by_chance * runs < lossless["threshold"]:
        return dict(lossless)
    told = f"a p-value of {by_chance:.2g} is not rare among {runs}"
    return {**lossless, "verdict": "passed", "passed": True, "reason": told}
