"""A table or figure of the paper as a page of Markdown: printed numbers, their formula's, and our runs'."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from specbench import theory
from specbench.paper.published import PRINTED
from specbench.report.files import Run
from specbench.report.tables import mean, number, ratio, verdict

Cells = Mapping[str, Callable[[Mapping[str, Any]], Any]]
CALLS = 12  # of a text, in Figure 1


def option(group: str) -> Callable[[Mapping[str, Any]], str]:
    """The option of a group; of a checkpoint that was given by its path, the name of its folder."""

    def cell(results: Mapping[str, Any]) -> str:
        chosen = str(results["details"]["choices"][group])
        path = results["config"][group].get("path")
        return str(path).rstrip("/").split("/")[-1] if chosen == "model" and path else chosen

    return cell


def by_formula(formula: Callable[[float, int], float]) -> Callable[[Mapping[str, Any]], str]:
    """What a formula of alpha and gamma gives for a run whose gamma is fixed."""

    def cell(results: Mapping[str, Any]) -> str:
        fixed = results["details"]["choices"]["gamma_policy"] == "fixed"
        alpha = results["alpha"]["mean"]
        return number(formula(alpha, int(results["config"]["gamma"]))) if fixed and alpha is not None else "-"

    return cell


def gamma_of(results: Mapping[str, Any]) -> str:
    """gamma, or the name of the policy that chooses it."""
    policy = results["details"]["choices"]["gamma_policy"]
    return str(results["config"]["gamma"] if policy == "fixed" else policy)


KEYS: Cells = {
    "target": option("target"),
    "drafter": option("drafter"),
    "T": lambda r: f"{r['config']['temperature']:g}",
    "gamma": gamma_of,
}
ALPHA: Cells = {"alpha": lambda r: mean(r["alpha"])}
MEASURED: Cells = {"measured": lambda r: ratio(r["speedup"]["measured"], r["speedup"]["ci95"])}
SPEED: Cells = {
    "c": lambda r: number(r["cost"]["c"]),
    "Theorem 3.8": lambda r: ratio(r["speedup"]["theorem_3_8"], None),
    **MEASURED,
    "lossless": lambda r: verdict(r["lossless"]),
}
TOKENS: Cells = {
    "tokens a call, equation 1": by_formula(theory.expected_tokens),
    "tokens a call, measured": lambda r: mean(r["block_efficiency"]),
}
OPERATIONS: Cells = {"operations, Theorem 3.11": lambda r: ratio(r["operations_factor"], None)}
OURS: Mapping[str, Cells] = {
    "table1": {
        **KEYS,
        **ALPHA,
        "operations, c_hat = 0": by_formula(lambda alpha, gamma: theory.operations_factor(alpha, gamma, 0)),
        **OPERATIONS,
        **TOKENS,
    },
    "table2": {**KEYS, **ALPHA, **SPEED},
    "table3": {
        **KEYS,
        "alpha (Cor. 3.6)": lambda r: mean(r["alpha_on_target_text"]),
        "tokens": lambda r: str(r["alpha_on_target_text"]["n"]) if r["alpha_on_target_text"] else "-",
        "alpha (tested)": lambda r: mean(r["alpha"]),
    },
    "table4": {**KEYS, **ALPHA, **SPEED},
    "table5": {**KEYS, "l": lambda r: f"{r['config']['lenience']:g}", **ALPHA, **SPEED},
    "figure1": {**KEYS, **ALPHA, **TOKENS},
    "figure2": {**KEYS, **ALPHA, **TOKENS},
    "figure3": {
        **KEYS,
        **ALPHA,
        "c": lambda r: number(r["cost"]["c"]),
        "gamma*": lambda r: number(r["optimal_gamma"]),
    },
    "figure4": {**KEYS, **ALPHA, **OPERATIONS, **MEASURED},
    "figure5": {**KEYS, **ALPHA, **TOKENS, **SPEED},
    "appendix_a2": {
        "verifier": option("verifier"),
        **KEYS,
        "probability to accept (mean)": lambda r: mean(r["alpha"]),
        "accepted / tested": lambda r: mean(r["alpha_counted"]),
        **TOKENS,
        **MEASURED,
    },
    "appendix_a4": {
        "drafter": option("drafter"),
        "w": lambda r: str(r["details"]["beam"]["beams"]),
        "u": lambda r: str(r["details"]["beam"]["drafter_beams"]),
        "gamma": gamma_of,
        "levels accepted": lambda r: mean(r["alpha_counted"]),
        "levels a call": lambda r: mean(r["block_efficiency"]),
        "operations": lambda r: ratio(r["details"]["beam"]["operations_factor"], None),
        **SPEED,
    },
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
    return pd.DataFrame(
        {
            **claim.where,
            "what": claim.what,
            "printed": claim.text,
            "formula": number(claim.formula, 4),
            "": "-" if claim.formula is None else "agrees" if claim.agrees else "differs",
        }
        for claim in PRINTED[name]()
    )


def rounds_of_a_text(run: Run) -> str:
    """A text's first target calls as Figure 1 has them: tokens drafted and kept, and the one that the call added."""
    record = next(record for record in run.records if record.speculative is not None)
    text, at = record.speculative, 0
    assert text is not None
    lines = [f"{option('drafter')(run.results)}, ids of (accepted guesses) and [the token after them]:", "```text"]
    for kept, accepted in list(zip(text.rounds.tokens, text.rounds.accepted, strict=True))[:CALLS]:
        new = text.ids[at : at + kept]
        guesses = " ".join(map(str, new[:accepted]))
        own = " ".join(map(str, new[accepted:]))
        lines.append(f"({guesses})[{own}]")
        at += kept
    return "\n".join([*lines, "```"])
