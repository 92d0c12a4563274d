"""A table or figure of the paper as a page of Markdown: printed numbers, their formula's, and our runs'."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from specbench import theory
from specbench.paper.published import PRINTED
from specbench.report.files import Run

Cell = Callable[[Mapping[str, Any]], str]  # of results.json
CALLS = 12  # of a text, in Figure 1


def number(path: str, form: str = ".2f", unit: str = "") -> Cell:
    """A number of results.json, found by its path as "cost/c"."""

    def cell(results: Mapping[str, Any]) -> str:
        value: Any = results
        for name in path.split("/"):
            value = None if value is None else value.get(name)
        return "-" if value is None else f"{value:{form}}{unit}"

    return cell


def estimate(name: str) -> Cell:
    """A mean and its standard error."""

    def cell(results: Mapping[str, Any]) -> str:
        found = results[name]
        if found is None or found["mean"] is None:
            return "-"
        error = "" if found["stderr"] is None else f" +- {found['stderr']:.3f}"
        return f"{found['mean']:.3f}{error}"

    return cell


def model(group: str) -> Cell:
    """The option of a group; of a checkpoint that was given by its path, the name of its folder."""

    def cell(results: Mapping[str, Any]) -> str:
        chosen = str(results["details"]["choices"][group])
        path = results["config"][group].get("path")
        return str(path).rstrip("/").split("/")[-1] if chosen == "model" and path else chosen

    return cell


def speed(results: Mapping[str, Any]) -> str:
    """The measured speedup and its 95 % interval."""
    measured, interval = results["speedup"]["measured"], results["speedup"]["ci95"]
    if measured is None:
        return "-"
    return f"{measured:.2f}x" + ("" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})")


def gamma_of(results: Mapping[str, Any]) -> int | None:
    """gamma of a run whose policy is fixed."""
    fixed = results["details"]["choices"]["gamma_policy"] == "fixed"
    return int(results["config"]["gamma"]) if fixed else None


def by_formula(formula: Callable[[float, int], float], unit: str = "") -> Cell:
    """What a formula of alpha and gamma gives for a run."""

    def cell(results: Mapping[str, Any]) -> str:
        alpha, gamma = results["alpha"]["mean"], gamma_of(results)
        return "-" if alpha is None or gamma is None else f"{formula(alpha, gamma):.2f}{unit}"

    return cell


def verdict(results: Mapping[str, Any]) -> str:
    """passed, failed or unknown."""
    return {True: "passed", False: "failed", None: "unknown"}[results["lossless"]["passed"]]


KEYS: dict[str, Cell] = {
    "target": model("target"),
    "drafter": model("drafter"),
    "T": number("config/temperature", "g"),
    "gamma": lambda results: str(gamma_of(results) or results["details"]["choices"]["gamma_policy"]),
}
ALPHA: dict[str, Cell] = {"alpha": estimate("alpha")}
SPEED: dict[str, Cell] = {
    "c": number("cost/c", ".3f"),
    "Theorem 3.8": number("speedup/theorem_3_8", unit="x"),
    "measured": speed,
    "lossless": verdict,
}
TOKENS: dict[str, Cell] = {
    "tokens a call, equation 1": by_formula(theory.expected_tokens),
    "tokens a call, measured": estimate("block_efficiency"),
}
OPERATIONS: dict[str, Cell] = {"operations, Theorem 3.11": number("operations_factor", unit="x")}
FREE: dict[str, Cell] = {
    "operations, c_hat = 0": by_formula(lambda alpha, gamma: theory.operations_factor(alpha, gamma, 0), "x")
}
BEAMS: dict[str, Cell] = {
    "drafter": model("drafter"),
    "w": number("details/beam/beams", "d"),
    "u": number("details/beam/drafter_beams", "d"),
    "gamma": KEYS["gamma"],
    "levels accepted": estimate("alpha_counted"),
    "levels a call": estimate("block_efficiency"),
    "operations": number("details/beam/operations_factor", unit="x"),
    **SPEED,
}
OURS: Mapping[str, Mapping[str, Cell]] = {
    "table1": {**KEYS, **ALPHA, **FREE, **OPERATIONS, **TOKENS},
    "table2": {**KEYS, **ALPHA, **SPEED},
    "table3": {
        **KEYS,
        "alpha (Cor. 3.6)": estimate("alpha_on_target_text"),
        "tokens": number("alpha_on_target_text/n", ".0f"),
        "alpha (tested)": estimate("alpha"),
    },
    "table4": {**KEYS, **ALPHA, **SPEED},
    "table5": {**KEYS, "l": number("config/lenience", "g"), **ALPHA, **SPEED},
    "figure1": {**KEYS, **ALPHA, **TOKENS},
    "figure2": {**KEYS, **ALPHA, **TOKENS},
    "figure3": {**KEYS, **ALPHA, "c": number("cost/c", ".3f"), "gamma*": number("optimal_gamma", ".0f")},
    "figure4": {**KEYS, **ALPHA, **OPERATIONS, "measured": speed},
    "figure5": {**KEYS, **ALPHA, **TOKENS, **SPEED},
    "appendix_a2": {
        "verifier": model("verifier"),
        **KEYS,
        "probability to accept (mean)": estimate("alpha"),
        "accepted / tested": estimate("alpha_counted"),
        **TOKENS,
        "measured": speed,
    },
    "appendix_a4": BEAMS,
}


def page(name: str, runs: Sequence[Run]) -> str:
    """Everything of a table or figure in Markdown."""
    parts = [f"# {name}"]
    if name in PRINTED:
        parts += ["Printed, and by the formula:", printed(name).to_markdown(index=False, disable_numparse=True)]
    ours = pd.DataFrame([{head: cell(run.results) for head, cell in OURS[name].items()} for run in runs])
    parts += ["Ours:", ours.to_markdown(index=False, disable_numparse=True) if runs else "No finished run."]
    if name == "figure1":
        parts += [rounds_of_a_text(run) for run in runs]
    return "\n\n".join(parts) + "\n"


def printed(name: str) -> pd.DataFrame:
    """The printed numbers of a table, with what the formula gives and whether it agrees."""
    rows = []
    for claim in PRINTED[name]():
        expected = claim.expected()
        formula = "-" if expected is None else f"{expected:.3f}"
        rows.append(
            {**claim.where, "what": claim.what, "printed": claim.text, "formula": formula, "": claim.judgement()}
        )
    return pd.DataFrame(rows)


def rounds_of_a_text(run: Run) -> str:
    """The first target calls of a run's first text as Figure 1 has them: tokens that were drafted and kept, and the one
    that the call added."""
    record = next(record for record in run.records if record.speculative is not None)
    text, at = record.speculative, 0
    assert text is not None
    lines = [f"{model('drafter')(run.results)}, ids of (accepted guesses) and [the token after them]:", "```text"]
    for kept, accepted in list(zip(text.rounds.tokens, text.rounds.accepted, strict=True))[:CALLS]:
        new = text.ids[at : at + kept]
        guesses = " ".join(map(str, new[:accepted]))
        own = " ".join(map(str, new[accepted:]))
        lines.append(f"({guesses})[{own}]")
        at += kept
    return "\n".join([*lines, "```"])
