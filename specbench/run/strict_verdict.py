"""Which verdicts strict=true accepts."""

from pathlib import Path
from typing import Any

from specbench.errors import VerdictError
from specbench.results.wording import word

GOOD = ("passed", "lossy")


def refuse_verdict(strict: bool, result: dict[str, Any], folder: Path) -> None:
    """Raises VerdictError if `strict` and the verdict of a result is not good."""
    if strict and (found := word(result["lossless"])) not in GOOD:
        raise VerdictError(f"strict=true: the verdict is {found} ({result['lossless']['reason']}), see {folder}")
