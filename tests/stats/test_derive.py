"""The numbers that sums over requests give are those that runs had when every number had a producer of its own.

`stored_sums/` holds the sums of four small runs and what their results.json said; see its README.
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from specbench.results.parquet import load_sums
from specbench.results.schema import plain
from specbench.run.pooled import repeats_of
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


def test_another_second_gives_other_numbers():
    """Negative control: a ten-millionth more of one request's time is seen."""
    expected, (sums,), facts = stored("chain")
    sums.columns["seconds"] = sums.columns["seconds"] * (1 + 1e-7 * (np.arange(len(sums.requests)) == 0))
    found = derive(lambda: [sums], of_one_process, facts)
    assert found.speedup.measured != pytest.approx(expected["speedup"]["measured"], rel=1e-9)
    assert found.alpha.mean == pytest.approx(expected["alpha"]["mean"], rel=1e-9)
