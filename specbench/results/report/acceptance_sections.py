"""Which guesses are accepted: sections of runs that have `acceptance` in results.json."""

from functools import partial

from specbench.results.acceptance_tables import check_of
from specbench.results.reader import StoredRun
from specbench.results.report import acceptance_figures
from specbench.results.report.html_page import Report
from specbench.results.report.html_table import PageTable
from specbench.results.tables import at, number


def acceptance(report: Report, run: StoredRun) -> None:
    """Adds a section on acceptance; none to the page of an earlier version's run, or where nothing was drafted."""
    found = run.result.get("acceptance")
    if not found or not found["conditional"]:
        return
    alpha, told = at(run.result, "alpha/mean"), "Theorem 3.8 takes each guess to be accepted with probability alpha."
    drawn = [
        report.figure("accepted_lengths", "Rounds by length; the numbers count them.",
                      partial(acceptance_figures.lengths, found)),
        report.figure("acceptance_by_position", f"With 95 % intervals. {told}",
                      partial(acceptance_figures.by_position, found, alpha)),
    ]  # fmt: skip
    if found["by_entropy"]:
        caption = "Where a model is sure, and where it is not; with 95 % intervals."
        drawn.append(report.figure("alpha_by_entropy", caption, partial(acceptance_figures.by_entropy, found)))
    if found["calibration"]:
        error = found["calibration"]["error"]
        caption = f"Calibration of the drafter: the expected error is {error:.3f}, along the target's own text."
        drawn.append(report.figure("calibration", caption, partial(acceptance_figures.calibration, found)))
    texts = [f"{told}." for told in check_of(run.result)]
    total = sum(own["n"] for own in found["by_token_class"].values())
    kinds = [
        {"kind of guess": name, "tested": f"{own['n']:,}", "share": f"{own['n'] / total:.1%}",
         "accepted": number(own["mean"], 3), "standard error": number(own["stderr"], 3)}
        for name, own in found["by_token_class"].items()
    ]  # fmt: skip
    report.section("Which guesses are accepted", texts=texts, figures=drawn, tables=[PageTable(kinds)], grid=True)
