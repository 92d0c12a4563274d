"""The outcomes on the terminal, as JSON, and as one page."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from specbench.contrib.gpu_check.check import FAILED, PASSED, UNCLEAR, Number, Outcome, Phase
from specbench.results.atomic_files import write_text
from specbench.results.report.html_table import PageTable
from specbench.results.report.page import rendered

COLOURS = {PASSED: "green", FAILED: "red", UNCLEAR: "yellow"}
KINDS = {PASSED: "good", FAILED: "bad", UNCLEAR: "dim"}  # of the page's sentences


def as_json(outcomes: Sequence[Outcome], facts: Mapping[str, Any], command: str, seconds: float) -> dict[str, Any]:
    """The contents of results.json."""
    return {
        "command": command,
        "seconds": round(seconds, 1),
        "verdicts": dict(Counter(outcome.verdict for outcome in outcomes)),
        "facts": dict(facts),
        "phases": [outcome.as_dict() for outcome in outcomes],
    }


def write(folder: Path, found: dict[str, Any], outcomes: Sequence[Outcome], phases: Mapping[int, type[Phase]]) -> None:
    """Writes results.json and report.html."""
    write_text(folder / "results.json", json.dumps(found, indent=1) + "\n")
    cards = [{"name": name, "value": str(count), "note": "checks"} for name, count in found["verdicts"].items()]
    html = rendered(
        title="The checks of a GPU",
        subtitle=_subtitle(found["facts"], found["command"], found["seconds"]),
        cards=cards,
        notes=[{"kind": KINDS[o.verdict], "text": f"{o.number}. {o.title}: {o.verdict}"} for o in outcomes],
        sections=[_section(outcome, phases[outcome.number]) for outcome in outcomes],
    )
    write_text(folder / "report.html", html)


def _subtitle(facts: Mapping[str, Any], command: str, seconds: float) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    commit = (facts.get("git_sha") or "unknown")[:7] + (" with changes" if facts.get("dirty") else "")
    card = facts.get("card", {}).get("name", "unknown card")
    return f"{card}; CUDA {facts.get('cuda', 'unknown')}; {versions}; commit {commit}; {command}; {seconds:.0f} s"


def _section(outcome: Outcome, phase: type[Phase]) -> dict[str, Any]:
    told = f"{outcome.verdict.capitalize()}, after {outcome.seconds:.0f} of {outcome.allowed_seconds:.0f} s."
    rows = [dict(zip(("", "value", "unit", "limit", "verdict", "remark"), cells(n), strict=True))
            for n in outcome.numbers]  # fmt: skip
    texts = [phase.meaning, told, *([outcome.error] if outcome.error else [])]
    title = f"{outcome.number}. {outcome.title}"
    return {"title": title, "texts": texts, "figures": [], "tables": [PageTable(rows)] if rows else [], "samples": []}


def cells(number: Number) -> tuple[str, ...]:
    """Name, value, unit, limit, verdict and remark of a number, as text."""
    value = "-" if number.value is None else f"{number.value:,.4g}"
    limit = "" if number.limit is None else "{} {:g}".format(*number.limit)
    return number.name, value, number.unit, limit, number.verdict, number.remark


def shown(outcome: Outcome) -> Group:
    """A phase's verdict, and its numbers that have a limit, or all if none has."""
    colour = COLOURS[outcome.verdict]
    title = Text(f"{outcome.number}. {outcome.title}: ").append(outcome.verdict, style=colour)
    found = Table(box=None, show_header=False, padding=(0, 2))
    for justify in ("left", "right", "left", "left", "left"):
        found.add_column(justify=justify)
    judged = [number for number in outcome.numbers if number.limit is not None]
    for number in judged or outcome.numbers:
        *texts, verdict, remark = cells(number)
        word = Text(verdict, style=COLOURS.get(verdict, "dim"))
        found.add_row(*map(Text, texts), word if number.value is not None else Text(f"{verdict}: {remark[:60]}"))
    if outcome.error:
        found.add_row(Text(outcome.error.splitlines()[-1][:110], style=colour))
    return Group(title, found)
