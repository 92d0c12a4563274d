"""The sections of a comparison: the ranking, paired ratios as a forest plot, and what makes the distances."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specbench.errors import ConfigError
from specbench.results.comparison_tables import ComparisonDict, about, causes_table, pairs_table, ranking_table
from specbench.results.fields import UNITS
from specbench.results.json_files import check_kind, file_text, parse_json
from specbench.results.reader import StoredRun
from specbench.results.report.figures import forest
from specbench.results.report.html_page import Drawing, Section
from specbench.results.report.sweep_sections import link
from specbench.results.table import Cell
from specbench.results.wording import label
from specbench.stats.comparison import Comparison

FILE = "comparison.json"


def comparisons(folder: Path, runs: Sequence[StoredRun]) -> list[ComparisonDict]:
    """The comparisons of these runs in a folder, with the `result` of each; none where it holds no comparison, or one
    of other runs. Raises ConfigError if the file cannot be used."""
    path = folder / FILE
    if not path.is_file():
        return []
    contents = check_kind(parse_json(file_text(path), str(path)), dict[str, list[Any]], str(path), "comparisons")
    if "comparisons" not in contents:
        raise ConfigError(f"{path} cannot be used: it has no comparisons")
    here = {run.folder.resolve(): run.result for run in runs}
    found = []
    for entry in contents["comparisons"]:
        check_kind(entry, Comparison, str(path), "comparisons")
        check_kind(entry.get("task"), dict[str, str], str(path), "comparisons.task")
        ways = [run | {"result": here.get((folder / str(run.get("folder"))).resolve())} for run in entry["runs"]]
        if len(ways) > 1 and all(way["result"] for way in ways):
            found.append(entry | {"runs": ways})
    return found


def ranking_sections(compared: Sequence[ComparisonDict], folder: Path) -> Iterator[Section]:
    """Two sections for each comparison: the ranking, and why."""
    for place, found in enumerate(compared):
        task = f" at {label(found['task'])}" if found["task"] else ""
        names = {run["label"]: {"way": Cell(run["label"], link(folder / run["folder"], folder))}
                 for run in found["runs"]}  # fmt: skip
        caption = (
            f"{UNITS[found['by']].capitalize()} over that of {found['reference']}, on the same prompts, with 95 % "
            "intervals (paired bootstrap over prompts). p holds for all pairs together."
        )
        table = ranking_table(found, names, f"of {found['reference']}")
        table.sorts = True
        drawing = Drawing(f"forest_{place}" if place else "forest", caption, partial(forest, found))
        told = f"{about(found)}. Ways that cannot be told apart share a rank."
        yield Section(f"Ranking{task}", [told], [drawing], [table])
        why = causes_table(found, {run["label"]: {"way": run["label"]} for run in found["runs"]}, marked=True)
        why.title = (
            f"Factors whose product is the ratio to {found['reference']}; * marks those whose interval excludes 1."
        )
        pairs = [pairs_table(found)] if len(found["pairs"]) > 1 else []
        yield Section(f"Why{task}", tables=[*([why] if len(why.columns) > 2 else []), *pairs])
