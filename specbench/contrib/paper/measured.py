"""Our rows beside those of the paper: which finished runs belong to a table or figure, and their numbers in words."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench import theory
from specbench.contrib.paper.published import mean_accepted
from specbench.results.fields import at
from specbench.results.reader import StoredRun
from specbench.stats.bootstrap import ratio

MeasuredResult = Mapping[str, Any]
Cells = Mapping[str, Callable[[MeasuredResult], str]]  # by heading


def _number(path: str, form: str = ".2f", unit: str = "") -> Callable[[MeasuredResult], str]:
    """A number of results.json."""
    return lambda result: "-" if (value := at(result, path)) is None else f"{value:{form}}{unit}"


def _error(path: str) -> Callable[[MeasuredResult], str]:
    """An estimate and its standard error."""

    def tell(result: MeasuredResult) -> str:
        found = at(result, path)
        if found is None or found["mean"] is None:
            return "-"
        return f"{found['mean']:.3f}" + ("" if found["stderr"] is None else f" ± {found['stderr']:.3f}")

    return tell


def _speed(result: MeasuredResult) -> str:
    """The measured speedup and its 95 % interval."""
    speedup = result["speedup"]
    ends = "" if speedup["ci95"] is None else " ({:.2f}-{:.2f})".format(*speedup["ci95"])
    return f"{speedup['measured']:.2f}x{ends}"


def _word(path: str) -> Callable[[MeasuredResult], str]:
    return lambda result: str(at(result, path))


def _model(group: str) -> Callable[[MeasuredResult], str]:
    """The option of a group; of a checkpoint that was given by its path, the name of its folder."""

    def tell(result: MeasuredResult) -> str:
        chosen = str(result["choices"][group])
        return str(result["config"][group]["path"]).rstrip("/").split("/")[-1] if chosen == "model" else chosen

    return tell


def _gamma(result: MeasuredResult) -> str:
    """Gamma, or the name of the policy that varies it."""
    return str(result["choices"]["gamma_policy"] if result["gamma"] is None else result["gamma"])


def counted_operations(result: MeasuredResult) -> float | None:
    """Operations that the run took over those of plain decoding: tokens that the target read, and c_hat for each guess,
    for each new token. None where Theorem 3.11 does not hold, as for trees, whose guesses are not counted, and of runs
    of earlier versions, which have no c_hat."""
    counts, c_hat = result["counts"], result.get("c_hat")
    if c_hat is None or result["operations_factor"] is None:
        return None
    return float((counts["verified"] + c_hat * counts["drafted"]) / counts["tokens"])


def _counted(result: MeasuredResult) -> str:
    return "-" if (found := counted_operations(result)) is None else f"{found:.2f}x"


def _equation_1(result: MeasuredResult) -> str:
    alpha, gamma = result["alpha"]["mean"], result["gamma"]
    return "-" if alpha is None or gamma is None else f"{theory.expected_tokens(alpha, gamma):.2f}"


def _at_no_cost(result: MeasuredResult) -> str:
    alpha, gamma = result["alpha"]["mean"], result["gamma"]
    return "-" if alpha is None or gamma is None else f"{theory.operations_factor(alpha, gamma, 0):.2f}x"


def _replay(result: MeasuredResult) -> str:
    sweep = result["gamma_sweep"]
    return str(max(sweep, key=lambda entry: entry["speedup"])["gamma"]) if sweep else "-"


TEMPERATURE = _number("config/temperature", "g")
KEYS: Cells = {
    "target": _model("target"),
    "drafter": _model("drafter"),
    "T": TEMPERATURE,
    "gamma": _gamma,
}
ALPHA: Cells = {"alpha": _error("alpha")}
SPEED: Cells = {"c": _number("cost/c", ".3f"), "Theorem 3.8": _number("speedup/theorem_3_8", unit="x"),
                "measured": _speed,
                "lossless": lambda result: str(result["lossless"]["verdict"])}  # fmt: skip
TOKENS: Cells = {"tokens a call, equation 1": _equation_1, "tokens a call, measured": _error("block_efficiency")}
OPERATIONS: Cells = {
    "operations, Theorem 3.11": _number("operations_factor", unit="x"),
    "operations, counted": _counted,
}


def exact(result: MeasuredResult) -> bool:
    """Whether a run samples from the target's own law with the rule of the paper."""
    plain = result["config"]["lenience"] == 1 and result["choices"].get("decoding", "sampling") == "sampling"
    return bool(plain and result["choices"]["verifier"] == "speculative")


def of_one_gamma(result: MeasuredResult) -> bool:
    """Whether the rounds of such a run have one gamma, by a rule that leaves the target's law as it is."""
    return exact(result) and bool(result["gamma"])


def lenient(result: MeasuredResult) -> bool:
    """Whether Table 5 is about such a run."""
    return bool(result["choices"].get("decoding", "sampling") == "sampling")


def either_rule(result: MeasuredResult) -> bool:
    """Whether A.2 compares such a run."""
    return lenient(result) and result["choices"]["verifier"] in ("speculative", "rejection")


def whole(run: StoredRun) -> list[MeasuredResult]:
    """One row, of the whole run."""
    return [run.result]


def by_request(run: StoredRun) -> list[MeasuredResult]:
    """One row, with `of_requests`: the least, mean and largest of the requests' means, over their rounds, of accepted
    guesses / gamma. A round that was cut short is over the same gamma."""
    shares: dict[str, list[float]] = {}
    for r in run.rounds:
        shares.setdefault(str(r["prompt"]), []).append(r["accepted"] / run.result["gamma"])
    means = [sum(own) / len(own) for own in shares.values()]
    found = dataclasses.asdict(ratio(means, [1.0] * len(means)))
    return [{**run.result, "of_requests": found | {"least": min(means), "most": max(means)}}]


def results_by_category(run: StoredRun) -> list[MeasuredResult]:
    """A row for each category of the prompts, with `content`: accepted guesses a round, and how many of them are
    expected of the guesses that were made, and of gamma guesses, at the category's accepted / tested."""
    categories = {prompt["id"]: prompt.get("category", "") for prompt in run.prompts}
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for r in run.rounds:
        rounds.setdefault(categories[r["prompt"]], {}).setdefault(str(r["prompt"]), []).append(r)
    return [{**run.result, "content": _content(name, [*own.values()], run)} for name, own in sorted(rounds.items())]


def _content(name: str, requests: list[list[dict[str, Any]]], run: StoredRun) -> dict[str, Any]:
    """The numbers of one category, from the rounds of its requests."""

    def sums(value: Callable[[dict[str, Any]], float]) -> list[float]:
        return [sum(value(r) for r in own) for own in requests]

    calls = [float(len(own)) for own in requests]
    kept, alpha = sums(lambda r: r["accepted"]), ratio(sums(lambda r: r["accepted"]), sums(lambda r: r["tested"]))
    known = alpha.mean if alpha.mean is not None else 0.0
    estimates = {
        "alpha": alpha,
        "guesses": ratio(sums(lambda r: r["gamma"]), calls),
        "accepted": ratio(kept, calls),
        "of_made": ratio(sums(lambda r: mean_accepted(known, r["gamma"])), calls),
    }
    found = {key: dataclasses.asdict(estimate) for key, estimate in estimates.items()}
    full = mean_accepted(known, run.result["gamma"])
    return {"category": name or "-", "requests": len(requests), "calls": sum(calls), "of_gamma": full, **found}


@dataclass(frozen=True)
class Ours:
    """What is shown of our runs beside a table or a figure. A run has a row for each of its `parts`."""

    cells: Cells
    takes: Callable[[MeasuredResult], bool] = exact
    parts: Callable[[StoredRun], list[MeasuredResult]] = whole


OURS: dict[str, Ours] = {
    "table1": Ours({**KEYS, **ALPHA, "operations, c_hat = 0": _at_no_cost, **OPERATIONS, **TOKENS}),
    "table2": Ours({**KEYS, **ALPHA, **SPEED}),
    "table3": Ours({**KEYS, "alpha (Cor. 3.6)": _error("alpha_on_target_text"),
                    "tokens": _number("alpha_on_target_text/n", ".0f"), "alpha (tested)": _error("alpha")}),
    "table4": Ours({**KEYS, **ALPHA, **SPEED}),
    "table5": Ours({**KEYS, "l": _number("config/lenience", "g"), **ALPHA, **SPEED,
                    "drift (TV)": _number("drift/tv", ".3f")}, lenient),
    "figure1": Ours({**KEYS, **ALPHA, **TOKENS}),
    "figure2": Ours({**KEYS, **ALPHA, **TOKENS}),
    "figure3": Ours({**KEYS, **ALPHA, "c": _number("cost/c", ".3f"), "gamma*": _number("optimal_gamma", ".0f"),
                     "best by replay": _replay}),
    "figure4": Ours({**KEYS, **ALPHA, **OPERATIONS, "measured": _speed}),
    "figure5": Ours({**KEYS, **ALPHA, **TOKENS, **SPEED}),
    "appendix_a2": Ours({"verifier": _word("choices/verifier"), **KEYS, "probability to accept (mean)": _error("alpha"),
                         "accepted / tested": _error("alpha_counted"), **TOKENS, "measured": _speed},
                        either_rule),
    "appendix_a4": Ours(
        {"drafter": _model("drafter"), "w": _number("beam/beams", "d"), "u": _number("beam/drafter_beams", "d"),
         "gamma": _gamma, "levels accepted": _error("alpha_counted"),
         "levels a call": _error("block_efficiency"), "runs a call": _number("beam/target_runs_a_call", ".1f"),
         "w + u gamma": _number("beam/most_target_runs_a_call", "d"),
         "operations": _number("beam/operations_factor", unit="x"), **SPEED,
         "equal": lambda result: f"{at(result, 'beam/equal')} of {at(result, 'beam/requests')}"},
        lambda result: result.get("beam") is not None),
    "ngram_chapter": Ours(
        {"drafter": _word("choices/drafter"), "T": TEMPERATURE, "category": _word("content/category"),
         "requests": _number("content/requests", "d"), "calls": _number("content/calls", ".0f"),
         "accepted / tested": _error("content/alpha"), "guesses a call": _error("content/guesses"),
         "accepted a call": _error("content/accepted"), "equation 1, gamma": _number("content/of_gamma", ".3f"),
         "equation 1, guesses made": _number("content/of_made/mean", ".3f")}, of_one_gamma, results_by_category),
    "runner_design": Ours(
        {**KEYS, **ALPHA, "accepted / drafted": _number("draft_acceptance_rate", ".3f"),
         "mean of accepted / K, by request": _error("of_requests"), "least": _number("of_requests/least", ".3f"),
         "most": _number("of_requests/most", ".3f"), **TOKENS, **SPEED}, of_one_gamma, by_request),
}  # fmt: skip


def our_rows(name: str, runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """The rows of the runs that belong to a table or figure."""
    ours = OURS[name]
    parts = [part for run in runs if ours.takes(run.result) for part in ours.parts(run)]
    return [{head: cell(part) for head, cell in ours.cells.items()} for part in parts]
