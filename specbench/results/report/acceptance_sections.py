"""Which guesses are accepted: sections of runs that have `acceptance` in results.json."""

from functools import partial

from specbench.results.acceptance_tables import check_of, classes_table
from specbench.results.fields import at
from specbench.results.reader import StoredRun
from specbench.results.report import acceptance_figures
from specbench.results.report.html_page import Report


def add_acceptance(report: Report, run: StoredRun) -> None:
    """Adds a section on acceptance; none where nothing was drafted."""
    found = run.result["acceptance"]
    if not found or not found["conditional"]:
        return
    alpha, told = at(run.result, "alpha/mean"), "Theorem 3.8 takes each guess to be accepted with probability alpha."
    drawn = [
        report.figure("accepted_lengths", "Rounds by length; the numbers count them.",
                      partial(acceptance_figures.lengths_figure, found)),
        report.figure("acceptance_by_position", f"With 95 % intervals. {told}",
                      partial(acceptance_figures.positions_figure, found, alpha)),
    ]  # fmt: skip
    if found["by_entropy"]:
        caption = "Where a model is sure, and where it is not; with 95 % intervals."
        drawn.append(report.figure("alpha_by_entropy", caption, partial(acceptance_figures.entropy_figure, found)))
    if found["calibration"]:
        error = found["calibration"]["error"]
        caption = f"Calibration of the drafter: the expected error is {error:.3f}, along the target's own text."
        drawn.append(report.figure("calibration", caption, partial(acceptance_figures.calibration_figure, found)))
    texts = [f"{told}." for told in check_of(run.result)]
    kinds = classes_table(run.result)
    report.section("Which guesses are accepted", texts=texts, figures=drawn, tables=[kinds] if kinds else [], grid=True)
