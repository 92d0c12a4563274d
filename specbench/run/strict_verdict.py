"""Which verdicts strict=true accepts, and what a verdict is worth as one of several."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench.errors import VerdictError
from specbench.results.wording import word

GOOD = ("passed", "lossy")


def refuse_verdict(strict: bool, result: dict[str, Any], folder: Path) -> None:
    """Raises VerdictError if `strict` and the verdict of a result is not good."""
    if strict and (found := word(result["lossless"])) not in GOOD:
        raise VerdictError(f"strict=true: the verdict is {found} ({result['lossless']['reason']}), see {folder}")


def as_one_of(tests: int, lossless: Mapping[str, Any]) -> Mapping[str, Any]:
    """A verdict as one of so many tests, the worst of which counts: by Bonferroni's method its p-value is multiplied by
    their number, so that all together fail an exact decoder no more often than one. Faults fail as they do."""
    p, level = lossless["statistic"], lossless["threshold"]
    if lossless["method"] != "martingale" or not p or not level:
        return lossless
    found = {**lossless, "statistic": min(1.0, tests * p)}
    if lossless["verdict"] == "failed" and p < level <= tests * p and not lossless["detail"].get("impossible"):
        told = f"its p-value {p:.2g} is no failure as one of {tests} tests: below {level / tests:.2g} is"
        found |= {"verdict": "passed", "passed": True, "reason": told}
    return found
