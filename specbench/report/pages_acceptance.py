"""How guesses were accepted: shown of runs that have `acceptance` in results.json."""

from specbench.report.sections import Report
from specbench.storage.read import StoredRun


def acceptance(report: Report, run: StoredRun) -> None:
    """Adds the sections on acceptance; none to an earlier version's run."""
