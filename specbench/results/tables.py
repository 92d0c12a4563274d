"""Tables of the jobs of a multirun, and the wording of verdicts and numbers."""

import csv
import os
from collections.abc import Iterator, Sequence
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console

from specbench.errors import VerdictError, Visible
from specbench.results.schema import flatten
from specbench.results.terminal_table import Grid

COLUMNS = {  # of summary.csv: heading, path in results.json
    "alpha": "alpha/mean",
    "stderr": "alpha/stderr",
    "tau": "block_efficiency/mean",
    "c": "cost/c",
    "v": "cost/v",
    "o": "cost/o",
    "speedup": "speedup/measured",
    "low": "speedup/ci95/0",
    "high": "speedup/ci95/1",
    "processes": "repeats/processes",
    "sd": "repeats/sd/speedup",
    "Thm 3.8": "speedup/theorem_3_8",
    "corrected": "speedup/corrected",
    "tokens/s": "throughput/speculative_tokens_per_second",
    "plain tokens/s": "throughput/baseline_tokens_per_second",
    "of peak": "bandwidth/target_share_of_peak",
    "beside": "placement/beside",
    "lossless": "lossless/verdict",
}
TOLD = {"tau": "block efficiency"}  # headings of summary.csv that a terminal has in words
OVER = "over "  # a peer: how much faster speculative decoding is
ENGINE = ("tokens/s", "plain tokens/s", "of peak")
TWO_DIGITS = ("speedup", "Thm 3.8", "corrected", "of peak")
ONE_DIGIT = ("tokens/s", "plain tokens/s")
STEADY, UNSTEADY = "steady", "not steady"  # the machine
FIRST = ("speedup", "95 %", "lossless", "machine", "block efficiency", "alpha", "tokens/s", "processes",
         "plain tokens/s", "sd", "c", "v", "o", "Thm 3.8")  # the columns that stay if not all fit  # fmt: skip
WIDTH = 140  # characters, where the output is not a terminal


GOOD = ("passed", "lossy")  # verdicts that strict=true accepts
STYLES = {"passed": "green", "lossy": "yellow"}  # of verdicts; others are red
WORDS = {"passed": "yes", "lossy": "no", "failed": "FAILED"}  # in a multirun's table


def word(lossless: dict[str, Any]) -> str:
    """The verdict of a result: "passed", "failed", "untested", "inconclusive" or "lossy". Results of earlier versions
    have only `expected` and `passed`."""
    known = lossless.get("verdict")
    if not known:
        known = "lossy" if not lossless["expected"] else "passed" if lossless["passed"] else "failed"
    return str(known)


def refuse_verdict(strict: bool, result: dict[str, Any], folder: Path) -> None:
    """Raises VerdictError if `strict` and the verdict of a result is not good."""
    if strict and (found := word(result["lossless"])) not in GOOD:
        raise VerdictError(f"strict=true: the verdict is {found} ({result['lossless']['reason']}), see {folder}")


def verdict(lossless: dict[str, Any]) -> tuple[str, str]:
    """(sentence, colour) for the losslessness verdict of a result."""
    found = word(lossless)
    told = [lossless.get("reason"), *_tested(lossless), *_detectable(lossless)]
    opening = {"lossy": "not lossless by choice", "failed": "FAILED"}.get(found, found)
    return f"{opening}: {'; '.join(part for part in told if part)}", STYLES.get(found, "bold red")


def _tested(lossless: dict[str, Any]) -> Iterator[str]:
    """What the verdict was made from."""
    detail = lossless["detail"]
    if lossless["method"] == "beams":
        yield f"all beams of {detail['equal']} of {detail['requests']} requests are plain beam search's"
        right = detail["scored_again"] - detail["wrong_scores"]
        yield f"{right} of {detail['scored_again']} best scores are the stock module's"
    elif "equal" in detail:
        yield f"{detail['equal']} of {detail['requests']} outputs equal plain decoding's"
    if "wrong" in detail:
        yield f"{detail['tokens'] - detail['wrong']:,} of {detail['tokens']:,} tokens are the stock module's"
    if detail.get("ties"):
        yield f"{detail['ties']} differ first at a tie"
    if "tested" in detail and lossless["statistic"] is not None and word(lossless) != "untested":
        if lossless["method"] == "martingale":
            yield f"p-value {lossless['statistic']:.2g} (below {lossless['threshold']:g} fails)"
        else:
            yield f"|z| {lossless['statistic']:.2f}, limit {lossless['threshold']:g}"
    if (tv := lossless.get("decoder_tv")) and tv["largest"] is not None:
        yield f"the decoder's p is within {tv['largest']:.1g} of the stock module's, limit {tv['largest_limit']:.1g}"


def _detectable(lossless: dict[str, Any]) -> Iterator[str]:
    """What the run would have found."""
    found = lossless.get("detectable") or {"lenience": None, "tv": None}
    names = [f"lenience {found['lenience']:.2f}"] if found["lenience"] is not None else []
    names += [f"a total variation of {found['tv']:.3f}"] if found["tv"] is not None else []
    if names:
        yield f"it would have found {' or '.join(names)}"


FACTORS = {  # of the accounting, in words
    "theorem_3_8": "Theorem 3.8",
    "short_drafts": "shorter drafts",
    "stops": "texts that end",
    "dependence": "betas are not i.i.d.",
    "luck": "luck",
    "drafting": "drafting is not g c",
    "verify": "verifying",
    "rest": "the rest of a round",
    "plain_rest": "the rest of a plain step",
    "rows": "rows a call",
    # of earlier versions
    "not_iid": "betas are not i.i.d.",
    "overhead": "overhead",
}


def account(result: dict[str, Any]) -> str:
    """The accounting as a sentence whose numbers multiply to the measured speedup, up to those that are 1.00 and left
    out."""
    factors = {name: entry["factor"] for name, entry in result["speedup"]["accounting"].items()}
    counts, cost = result["counts"], result["cost"]
    told = FACTORS | {
        "verify": f"verifying {counts['verified'] / counts['rounds']:.1f} tokens costs {cost['v']:.2f} steps"
    }
    causes = {name: factor for name, factor in factors.items() if name != "theorem_3_8" and abs(factor - 1) >= 0.005}
    parts = [f"{told.get(name, name)} x{factor:.2f}" for name, factor in causes.items()]
    opening, end = f"3.8 says {factors['theorem_3_8']:.2f}x", f"{result['speedup']['measured']:.2f}x measured"
    return f"{'; '.join([opening, *parts])} -> {end}"


def interval(ci95: Sequence[float] | None, digits: int = 2) -> str:
    """A 95 % interval in words; "too few prompts" where there are fewer of them, or groups of rows, than it needs."""
    return "too few prompts" if ci95 is None else f"{ci95[0]:.{digits}f} to {ci95[1]:.{digits}f}"


def where(result: dict[str, Any]) -> str:
    """By how many processes a run was decoded, or how many were pooled."""
    if (count := (result.get("repeats") or {"processes": 1})["processes"]) > 1:
        return f"{count} processes"
    workers = len(result.get("workers") or ())
    return f"{workers} workers" if workers > 1 else "one process"


def speedup_interval(result: dict[str, Any]) -> str:
    """The interval of the measured speedup in words, and of how many processes it is."""
    ci95, repeats = result["speedup"]["ci95"], result.get("repeats")
    if not repeats:
        told = (
            "too few prompts, or groups of rows, for an interval" if ci95 is None else f"95 % interval {interval(ci95)}"
        )
        return f"{told}; {where(result)}"
    told = "too few processes or prompts for an interval" if ci95 is None else f"95 % interval {interval(ci95)}"
    sd = repeats["sd"]["speedup"]
    between = "" if sd is None else f"; between processes sd {sd:.1%}"
    return f"{told}; {repeats['processes']} process{'es' * (repeats['processes'] > 1)}{between}"


def own_words(jobs: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """The overrides of each job that not all have, as {"drafter": "ngram"}; all of them if there is one job."""
    common = set.intersection(*({*overrides} for overrides in jobs)) if len(jobs) > 1 else set()
    return [dict(o.split("=", 1) for o in overrides if o not in common and "=" in o) for overrides in jobs]


def multirun_rows(jobs: Sequence[tuple[list[str], dict[str, Any] | None]]) -> list[dict[str, Any]]:
    """One row per job: the overrides in which jobs differ, then the columns. A job without a result has only its
    overrides."""
    rows = []
    for words, (_, result) in zip(own_words([overrides for overrides, _ in jobs]), jobs, strict=True):
        row: dict[str, Any] = {**words}
        if result is not None:
            row |= {heading: at(result, path) for heading, path in COLUMNS.items()}
            row["lossless"] = WORDS.get(word(result["lossless"]), word(result["lossless"]))
            if machine := result.get("machine"):
                row["machine"] = "; ".join(machine["reasons"]) or STEADY
            row |= {f"{OVER}{peer}": over["measured"] for peer, over in result["speedup_over"].items()}
            row |= flatten(result.get("metrics", {}))
        else:
            row["lossless"] = "no result"
        rows.append(row)
    return rows


def multirun_tables(rows: Sequence[dict[str, Any]], title: str, file: str) -> list[Grid]:
    """The rows for a terminal: the interval in one column, without the standard errors. Where peers were run, the
    engines have a table of their own. Columns that do not fit are those of the `file` alone."""
    shown = [_for_terminal(row) for row in rows]
    if all(row.get("machine") != UNSTEADY for row in shown):
        shown = [{key: cell for key, cell in row.items() if key != "machine"} for row in shown]
    headings = list(dict.fromkeys(key for row in shown for key, cell in row.items() if cell != "-"))
    if any("95 %" in row and row.get("processes", "-") == "-" for row in shown):
        title += "; 95 %: of one process"
    peers = [heading for heading in headings if heading.startswith(OVER)]
    engine = [heading for heading in ENGINE if heading in headings] + peers if peers else []
    names = [*dict.fromkeys(key for row in rows for key in takewhile(lambda key: key not in COLUMNS, row))]
    found = [Grid(shown, [heading for heading in headings if heading not in engine], title, names, FIRST, file)]
    if peers:
        found.append(Grid(shown, [*names, *engine], "engines, tokens per second", names, peers, file))
    return found


def _for_terminal(row: dict[str, Any]) -> dict[str, str]:
    cells = {}
    for heading, value in row.items():
        if heading == "low":
            cells["95 %"] = "too few" if value is None else f"{value:.2f}-{row['high']:.2f}"
        elif heading == "machine":
            cells[heading] = STEADY if value == STEADY else UNSTEADY
        elif heading not in ("high", "stderr"):
            two = heading in TWO_DIGITS or heading.startswith(OVER)
            digits = 1 if heading in ONE_DIGIT else 2 if two else 3
            cells[TOLD.get(heading, heading)] = number(value, digits) if isinstance(value, float | None) else str(value)
    return cells


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV, with a column for every key that some row has."""
    text = StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def show(*renderables: Any) -> None:
    """Prints to the terminal; if the output is none, $COLUMNS or else `WIDTH` characters wide."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(markup=False, emoji=False, width=WIDTH)
    for renderable in renderables:
        console.print(Visible(renderable))


def at(tree: Any, path: str) -> Any:
    """The value at a path like "speedup/ci95/0", or None where there is none."""
    for key in path.split("/"):
        tree = tree[int(key)] if isinstance(tree, list) else tree.get(key)
        if tree is None:
            return None
    return tree


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def number(value: float | None, digits: int) -> str:
    """A number with so many digits after the point; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"
