"""One self-contained page from finished runs, and its figures as PNG and SVG."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from specbench.errors import visible
from specbench.results.atomic_files import write_text
from specbench.results.comparison_tables import ranking
from specbench.results.reader import StoredRun
from specbench.results.recommendation import verdict_sentence
from specbench.results.report import run_description as facts
from specbench.results.report.comparison_sections import add_rankings, comparisons
from specbench.results.report.html_page import PAGE, Report, cut
from specbench.results.report.run_sections import add_run, cards
from specbench.results.report.sweep_sections import add_runs
from specbench.results.wording import unsteady, verdict_text, word

MOST_NAMES = 3  # of runs that a note names
LEGEND = {  # of the marked text: the class of a token, and what it is
    "a": "an accepted guess",
    "r": "a rejected guess, not in the text",
    "o": "the target's own token in its place",
    "b": "the bonus token, after a round without a rejection",
    "prompt": "the end of the prompt",
}
ORDER = (
    "Runs of a sweep come one after the other, and the machine changes meanwhile: python -m specbench.compare decodes "
    "every prompt in all ways in turn, and tests the differences."
)


def write_report(folder: Path, runs: Sequence[StoredRun]) -> Path:
    """Writes report.html and figures/ into the folder; returns the page's path. Of a comparison's folder the ranking
    comes first. Raises ConfigError."""
    report, one = Report(folder, runs), len(runs) == 1
    compared = [] if one else comparisons(folder, runs)
    if one:
        add_run(report)
        leads = [verdict_sentence(runs[0].result)]
    else:
        add_rankings(report, compared)
        add_runs(report, compared=bool(compared))
        leads = [ranking(found) for found in compared] or facts.fastest(runs)
    results, first = [run.result for run in runs], runs[0].result
    whole = "The whole configuration" if one else "The configuration that all of them share"
    html = rendered(
        title=f"{first['name']}: {folder.name}" if one else f"{first['name']}: {len(runs)} runs",
        leads=leads,
        subtitle="" if one or compared else ORDER,
        facts=facts.facts(results),
        commands=facts.commands(runs, together=not one),
        folded={whole: facts.configuration(results)},
        cards=cards(first) if one else [],
        notes=_notes(runs),
        sections=report.sections,
    )
    write_text(folder / PAGE, html)
    return folder / PAGE


def rendered(**contents: Any) -> str:
    """The page with this title, leads, subtitle, facts, commands, folded texts, cards, notes and sections."""
    templates = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=templates, autoescape=True, finalize=_printable).get_template("page.html")
    empty: dict[str, Any] = {"leads": [], "facts": {}, "commands": [], "folded": {}, "legend": LEGEND}
    return page.render(**empty | contents)


def _printable(value: Any) -> Any:
    """A text of the page without control characters, before it is escaped; an SVG element as it is."""
    return visible(value, layout=True) if isinstance(value, str) and not isinstance(value, Markup) else value


def _notes(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """Warnings of the runs, and what they do not have in common."""
    found: dict[tuple[str, str], list[str]] = {}  # kind and text: the runs that it is said of
    for run in runs:
        for kind, text in _of_run(run, len(runs) == 1):
            found.setdefault((kind, text), []).append(run.label)
    common = [{"kind": "bad", "text": told} for told in facts.unlike([run.result for run in runs])]
    return common + [{"kind": kind, "text": _whose(names, len(runs)) + text} for (kind, text), names in found.items()]


def _of_run(run: StoredRun, alone: bool) -> Iterator[tuple[str, str]]:
    """Kind and text of each note on a run; that its verdict is good is said of one that stands alone."""
    result, judged = run.result, word(run.result["lossless"])
    if judged != "passed" or alone:
        kind = {"passed": "good", "lossy": "dim"}.get(judged, "bad")
        yield kind, f"lossless: {verdict_text(result['lossless'])[0]}"
    if reasons := unsteady(result):
        yield "bad", f"the machine was not steady{': ' + '; '.join(reasons) if alone else ', see its page'}"
    for note in result["notes"]:
        yield "bad", note
    if result["status"] != "complete":
        yield "bad", f"{result['status']}: these are the requests that were finished"
    if told := cut(run):
        yield "dim", told


def _whose(names: Sequence[str], runs: int) -> str:
    """Of which runs a note is, before its text."""
    if runs == 1:
        return ""
    if len(names) == runs:
        return "all runs: "
    return f"{'; '.join(names) if len(names) <= MOST_NAMES else f'{len(names)} of {runs} runs'}: "
