"""One table or figure of the paper as text and as a figure: printed, formula and ours next to one another."""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from specbench.contrib.paper.judgements import judged, memory_lines, oracle_lines
from specbench.contrib.paper.measured import OURS, our_rows
from specbench.contrib.paper.notes import BANDS, NOTES
from specbench.contrib.paper.published import CLAIMS, ELSEWHERE, Claim
from specbench.contrib.paper.theory_figures import figure_2, figure_3, figure_4
from specbench.results.fields import at
from specbench.results.reader import StoredRun
from specbench.results.report.figures import timeline
from specbench.results.report.style import HALF, INK, MARKERS, MEASURED, OTHER, SERIES, THEORY, style

FIGURES = {"figure2": figure_2, "figure3": figure_3, "figure4": figure_4, "table1": figure_4}
CALLS = 12  # of a text, in Figure 1
MARKS = "(kept guesses)[correction]{rejected guess}"


def page(name: str, runs: Sequence[StoredRun]) -> str:
    """Everything of a table or figure in Markdown."""
    told = [f"# {name}\n"]
    if claims := CLAIMS[name]():
        told += ["Printed, and by the formula:\n", printed_table(claims), errors(claims)]
    if name in ELSEWHERE:
        source, others = ELSEWHERE[name]
        told += [
            f"Not the paper's: printed in {source}, and by the formula:\n",
            printed_table(others()),
            errors(others()),
        ]
    if name in NOTES:
        told += [f"Not the paper's: printed in {NOTES[name].source}.\n"]
        told += [f"{caption}:\n\n{paper_table(rows)}" for caption, rows in NOTES[name].tables().items()]
    rows = our_rows(name, runs)
    told += ["Ours:\n", paper_table(rows) if rows else "No run of this folder belongs here.\n"]
    results = [run.result for run in runs if OURS[name].takes(run.result)]
    if claims_of_ours := judged(name, results):
        told += ["What our runs say of the paper's claims:\n", paper_table([vars(claim) for claim in claims_of_ours])]
    told += oracle_lines() if name == "figure3" else memory_lines(results) if name == "table1" else []
    if name == "figure1":
        told += [traces(runs)]
    return "\n".join(told)


def printed_table(claims: Sequence[Claim]) -> str:
    """Claims as a Markdown table."""
    return paper_table([_cells(claim) for claim in claims])


def _cells(claim: Claim) -> dict[str, str]:
    expected, span = claim.expected(), claim.span()
    formula = "-" if expected is None else f"{expected:.3f}"
    inputs = "-" if span is None or span[1] - span[0] < 1e-9 else f"{span[0]:.2f} to {span[1]:.2f}"
    judged = {**claim.where, "what": claim.what, "printed": claim.printed, "formula": formula}
    return judged | {"inputs unrounded": inputs, "": claim.judgement()}


def errors(claims: Sequence[Claim]) -> str:
    """What does not agree, in sentences."""
    told = []
    for claim in claims:
        if claim.judgement() not in ("differs", "rounding") or claim.what.startswith("measured"):
            continue
        where, span = ", ".join(f"{k} {v}" for k, v in claim.where.items()), claim.span() or (0.0, 0.0)
        verb = "differs" if claim.judgement() == "differs" else "is explained by the rounding of its inputs alone"
        told.append(f"- {claim.what} at {where}: printed {claim.printed}, the formula gives {claim.expected():.2f} "
                    f"({span[0]:.2f} to {span[1]:.2f}); it {verb}.")  # fmt: skip
    return "\n".join(told) + "\n" if told else "All printed numbers are those of the formula.\n" * _has_formula(claims)


def _has_formula(claims: Sequence[Claim]) -> bool:
    return any(claim.formula is not None and not claim.what.startswith("measured") for claim in claims)


def paper_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same headings as a table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(row.values()) + " |" for row in rows)]) + "\n"


def traces(runs: Sequence[StoredRun]) -> str:
    """The rounds of each run's first text, a line for each target call, as Figure 1 has them."""
    told = [f"The first {CALLS} target calls of a text: {MARKS}.\n"]
    for run in filter(lambda run: OURS["figure1"].takes(run.result), runs):
        told += [f"{run.label}:\n", "```text"]
        for r in _first_text(run):
            kept, own, wrong = (str(r[f"{what}_text"]).replace("\n", "\\n") for what in ("accepted", "own", "rejected"))
            told.append(f"({kept})[{own}]" + (f"{{{wrong}}}" if wrong else ""))
        told += ["```\n"]
    return "\n".join(told)


def _first_text(run: StoredRun) -> list[dict[str, object]]:
    rounds = run.rounds
    return [r for r in rounds if r["prompt"] == rounds[0]["prompt"]][:CALLS]


def figure(name: str, runs: Sequence[StoredRun]) -> Figure:
    """The figure of a table or figure of the paper."""
    mine = [run for run in runs if OURS[name].takes(run.result)]
    with plt.rc_context(style(INK)):
        if name in ("figure1", "figure5"):
            return timeline(mine)
        if name == "ngram_chapter":
            return by_content(mine)
        return FIGURES[name](mine) if name in FIGURES else predicted(name, mine)


def by_content(runs: Sequence[StoredRun]) -> Figure:
    """Accepted / tested of each category of each run, with the printed ranges of alpha as bands."""
    shown, axes = plt.subplots(figsize=HALF)
    for printed, low, high, *_ in BANDS:
        axes.axhspan(low, high, color=THEORY, alpha=0.15, linewidth=0)
        axes.text(0.01, (low + high) / 2, f"printed: {printed}", transform=axes.get_yaxis_transform(), fontsize=8)
    found = [(run, part["content"]) for run in runs for part in OURS["ngram_chapter"].parts(run)]
    names = [*dict.fromkeys(content["category"] for _, content in found)]
    for number, run in enumerate(runs):
        mine = [content for owner, content in found if owner is run and content["alpha"]["mean"] is not None]
        places = [names.index(content["category"]) + 0.5 + 0.12 * number for content in mine]
        errors = [1.96 * (content["alpha"]["stderr"] or nan) for content in mine]
        looks: dict[str, Any] = {"fmt": MARKERS[number % len(MARKERS)], "color": SERIES[number % len(SERIES)]}
        axes.errorbar(places, [content["alpha"]["mean"] for content in mine], errors, label=run.label, **looks)
    if runs:
        axes.legend(fontsize=8)
    axes.set_xticks([place + 0.5 for place in range(len(names))], names)
    axes.set_xlim(0, max(1, len(names)))
    axes.set_ylim(0, 1)
    axes.set_ylabel("accepted / tested, +- 1.96 standard errors")
    return shown


def predicted(name: str, runs: Sequence[StoredRun]) -> Figure:
    """Numbers by their formula: those printed, and ours."""
    shown, axes = plt.subplots(figsize=HALF)
    claims = [(e, claim.value) for claim in CLAIMS[name]() if (e := claim.expected()) is not None]
    ours = [(t, m) for run in runs if (t := at(run.result, "speedup/theorem_3_8")) is not None
            and (m := at(run.result, "speedup/measured")) is not None]  # fmt: skip
    most = max((value for pair in (*claims, *ours) for value in pair), default=1.0)
    axes.plot([0, most], [0, most], color=OTHER, linewidth=1, linestyle=":")
    for points, mark, colour, label in ((claims, "D", THEORY, "printed"), (ours, "o", MEASURED, "ours, measured")):
        if points:
            axes.plot(*zip(*points, strict=True), mark, color=colour, label=label)
            axes.legend(fontsize=8)
    axes.set_xlabel("speedup by Theorem 3.8")
    axes.set_ylabel("speedup")
    axes.grid()
    return shown


def write(name: str, runs: Sequence[StoredRun], folder: Path) -> str:
    """Writes NAME.md and NAME.png into a folder; returns the text."""
    text, drawn = page(name, runs), figure(name, runs)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    drawn.savefig(folder / f"{name}.png", dpi=130)
    plt.close(drawn)
    return text
