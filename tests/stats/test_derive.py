"""The numbers that sums over requests give are those that runs had when every number had a producer of its own.

`stored_sums/` holds the sums of four small runs and what their results.json said; see its README.
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from specbench.results.comparison_tables import about
from specbench.results.parquet import load_sums
from specbench.results.run_table import _remarks
from specbench.results.schema import plain
from specbench.run.pooled import repeats_of
from specbench.stats.comparison import compare
from specbench.stats.derive import RunFacts, derive, of_one_process
from specbench.stats.two_way_bootstrap import TwoWaySums

STORED = Path(__file__).parent / "stored_sums"
FROM_ROUNDS = ("by_gamma", "halves", "read_again", "communication")  # costs that no sums give


def stored(name):
    """What results.json said, the sums of each process, and what is known beside them."""
    result, sums = json.loads((STORED / name / "results.json").read_text()), load_sums(STORED / name)
    peak = result["bandwidth"]["measured_peak_bytes_per_second"]
    by_beta = result["acceptance"].get("check") is not None
    facts = RunFacts(result["gamma"], by_beta, peak, result["counts"]["failed"], result["counts"]["too_long"])
    return result, sums.by_process(), facts


def leaves(value, where=""):
    """Every number and its place."""
    if isinstance(value, (dict, list)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, f"{where}/{key}")
    else:
        yield where, value


@pytest.mark.parametrize("name", ["chain", "batch", "ngram", "repeats"])
def test_stored_sums_give_the_stored_numbers(name):
    expected, processes, facts = stored(name)
    estimator = of_one_process if len(processes) == 1 else TwoWaySums.of
    found = plain(asdict(derive(lambda: processes, estimator, facts))) | {"gamma": facts.gamma}
    found["cost"] = {key: value for key, value in found["cost"].items() if key not in FROM_ROUNDS}
    if name == "repeats":  # one process alone checks its acceptance
        del found["acceptance"]["check"]
        found["sd"] = plain(repeats_of([expected], lambda: processes, "none", 0)["sd"])
    old, new = dict(leaves(expected)), dict(leaves(found))
    new = {where: value for where, value in new.items() if value is not None or where in old}  # what came later
    assert old.keys() == new.keys() and len(old) > 150
    for where, value in old.items():
        assert new[where] == (value if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)), where
    cost, counts = found["cost"], found["counts"]
    g = counts["drafted"] / counts["rounds"] if facts.gamma is None else facts.gamma
    spent = g * (cost["c"] or 0) + cost["v"] + cost["o"]
    assert found["speedup"]["corrected"] == pytest.approx(found["block_efficiency"]["mean"] / spent)


def told_of_requests(speedup):
    """The sentence on requests below the table of a run of 130 requests in two rows."""
    own = {"passed": None, "reason": ""}
    lossless = {"verdict": "untested", "reason": "", "method": "", "detail": {}, "decoder_tv": None, "alpha_own": own,
                "detectable": {"lenience": None, "by_kind": {}}}  # fmt: skip
    counts = {"prompts": 130, "tokens": 9, "too_long": 0, "failed": 0, "drafted": 0}
    result = {"counts": counts, "status": "complete", "speedup": speedup | {"accounting": {}}, "notes": [],
              "lossless": lossless, "repeats": None, "config": {"batch_size": 2}}  # fmt: skip
    return [text for line in _remarks(result, STORED) if "needs about" in (text := str(line))]


def test_a_run_and_a_comparison_say_alike_how_many_requests_are_needed():
    """130 requests in 8 groups: the groups are what the interval resamples, and more requests make them larger, so the
    error falls as 1 / sqrt(requests) and Student's quantile stays."""
    expected, (sums,), facts = stored("batch")
    speedup = asdict(derive(lambda: [sums], of_one_process, facts).speedup)
    (told,) = told_of_requests(speedup)
    assert f"; {told} (one)" in about(asdict(compare({"one": sums}, "speedup")))
    low, high = speedup["ci95"]
    many = 130 * (np.log(high / low) / 2 / 0.05) ** 2
    assert many <= int(told.split()[-2].replace(",", "")) <= many + 130 / 8 + 1
    assert not told_of_requests(expected["speedup"] | {"clusters": None})  # of an earlier version


def test_of_one_prompt_that_drafts_the_drafter_is_not_known_to_an_interval():
    """The others decode plainly: of c, alpha and what follows from them they say nothing, and of the speedup all do."""
    _, (sums,), facts = stored("chain")
    for name in ("steps", "draft_seconds", "tested", "beta", "accepted"):
        sums.columns[name] = sums.columns[name] * (np.arange(len(sums.requests)) == 0)
    (run,) = compare({"one": sums}, "speedup").runs
    found = [derive(lambda: [sums], of_one_process, facts), derive(lambda: [sums] * 3, TwoWaySums.of, facts)]
    for costs in (run.ci95, *(each.cost.ci95 for each in found)):
        assert costs["c"] is None and costs["v"] and costs["o"]
    for speedup in (each.speedup for each in found):
        unknown = {name for name, factor in speedup.accounting.items() if factor.ci95 is None}
        assert unknown == {"theorem_3_8", "short_drafts", "stops", "dependence", "luck", "drafting"} and speedup.ci95


def test_another_second_gives_other_numbers():
    """Negative control: a ten-millionth more of one request's time is seen."""
    expected, (sums,), facts = stored("chain")
    sums.columns["seconds"] = sums.columns["seconds"] * (1 + 1e-7 * (np.arange(len(sums.requests)) == 0))
    found = derive(lambda: [sums], of_one_process, facts)
    assert found.speedup.measured != pytest.approx(expected["speedup"]["measured"], rel=1e-9)
    assert found.alpha.mean == pytest.approx(expected["alpha"]["mean"], rel=1e-9)
