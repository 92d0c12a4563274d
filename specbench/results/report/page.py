"""One self-contained page from finished runs, and its figures as PNG and SVG."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from specbench.results.comparison_tables import ranking
from specbench.results.reader import StoredRun
from specbench.results.recommendation import answer, details
from specbench.results.report import run_description as description
from specbench.results.report.html_page import write_page
from specbench.results.report.run_sections import cards, run_sections
from specbench.results.report.sweep_sections import comparisons, ranking_sections, sweep_sections
from specbench.results.wording import unsteady, verdict_text, word

MOST_NAMES = 3  # of runs that a note names
ORDER = (
    "Runs of a sweep come one after the other, and the machine changes meanwhile: python -m specbench.compare decodes "
    "every prompt in all ways in turn, and tests the differences."
)


def write_report(folder: Path, runs: Sequence[StoredRun]) -> Path:
    """Writes report.html and figures/ into the folder; returns the page's path. Of a comparison's folder the ranking
    comes first. Raises ConfigError."""
    one, results = len(runs) == 1, [run.result for run in runs]
    compared = [] if one else comparisons(folder, runs)
    if one:
        leads, sections, first = (
            answer(results[0]).lines,
            [*run_sections(runs[0])],
            int(results[0]["counts"]["drafted"] > 0),
        )
    else:
        leads = [ranking(found) for found in compared] or description.fastest(runs)
        sections = [*ranking_sections(compared, folder), *sweep_sections(runs, folder, heat_maps=not compared)]
        first = 2 * len(compared) or 1
    return write_page(
        folder,
        title=f"{results[0]['name']}: {folder.name if one else f'{len(runs)} runs'}",
        leads=leads,
        next=answer(results[0]).command if one else "",
        subtitle="" if one or compared else ORDER,
        first=first,
        facts=description.facts(results),
        commands=description.commands(runs, together=not one),
        shared=not one,
        configuration=description.configuration(results),
        cards=cards(results[0]) if one else [],
        notes=notes(runs),
        sections=sections,
    )


def notes(runs: Sequence[StoredRun]) -> list[tuple[str, str]]:
    """Kind ("good", "bad" or "dim") and text of warnings: what the runs do not have in common, and what is to be known
    of each."""
    found: dict[tuple[str, str], list[str]] = {}  # kind and text: the runs that it is said of
    for run in runs:
        for note in _of_run(run, len(runs) == 1):
            found.setdefault(note, []).append(run.label)
    common = [("bad", told) for told in description.unlike([run.result for run in runs])]
    if len(runs) == 1:
        return [*common, *found]
    for (kind, text), names in found.items():
        whose = "; ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} of {len(runs)} runs"
        common.append((kind, f"{'all runs' if len(names) == len(runs) else whose}: {text}"))
    return common


def _of_run(run: StoredRun, alone: bool) -> Iterator[tuple[str, str]]:
    """The notes on a run; that its verdict is good is said of one that stands alone."""
    result, judged = run.result, word(run.result["lossless"])
    if judged != "passed" or alone:
        kind = {"passed": "good", "lossy": "dim"}.get(judged, "bad")
        yield kind, f"lossless: {verdict_text(result['lossless'])[0]}"
    if alone and (told := details(result)):
        yield "dim", told
    if reasons := unsteady(result):
        yield "bad", f"the machine was not steady{': ' + '; '.join(reasons) if alone else ', see its page'}"
    for note in result["notes"]:
        yield "bad", note
    if result["status"] != "complete":
        yield "bad", f"{result['status']}: these are the requests that were finished"
    rounds, whole = len(run.rounds), run.counts["rounds"]
    if rounds < whole:
        told = f"the first {rounds:,} of {whole:,} rounds; numbers are of all."
        yield "dim", f"Times of rounds and the coloured text are of {told}"
