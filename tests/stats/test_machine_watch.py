"""The machine is watched: it is called unsteady when it drifts, jumps or is shared, and not otherwise."""

import csv
from io import StringIO
from unittest import mock

import numpy as np
import pytest
import torch
from rich.console import Console

from specbench.results.sweep_table import multirun_rows, multirun_tables
from specbench.results.table import Table, to_csv
from specbench.run import machine_watch
from specbench.run.machine_watch import MachineWatch, living, parse_use
from specbench.stats import machine_noise
from specbench.stats.estimates import Machine
from specbench.stats.machine_noise import Use, reasons, shares, step_drift, variation

STAT = """cpu  1 2 3 4 5 6 7 8 0 0
cpu0 {0} 0 1000 50000 0 0 0 {1} 0 0
cpu1 {0} 0 1000 50000 0 0 0 {1} 0 0
cpu7 999999 0 0 0 0 0 0 999999 0 0
intr 5 4 3
ctxt 12
"""


def steps(count=40, noise=0.03, trend=0.0, jump=0.0, seed=0):
    """Step times of groups, and their columns."""
    rng, order = np.random.default_rng(seed), np.linspace(0, 1, count)
    times = 0.01 * np.exp(trend * order + jump * (order > 0.5) + noise * rng.standard_normal(count))
    return times, rng.uniform(50, 100, count)


def told(seconds, columns):
    drift, error, halves = step_drift(seconds, columns)
    return reasons(Machine(True, [], drift, error, halves, None, None, None, None, 0))


@pytest.mark.parametrize(("what", "found"), [({"trend": 0.15}, "slower"), ({"trend": -0.15}, "faster"),
                                             ({"jump": 0.2}, "slower"), ({"trend": 0.02}, ""), ({}, ""),
                                             ({"trend": 0.15, "noise": 0.5}, "")])  # fmt: skip
def test_a_step_time_that_drifts_or_jumps_is_told(what, found):
    """A trend below the limit is not, nor one that chance explains."""
    sentences = told(*steps(**what))
    assert len(sentences) == bool(found) and all(found in sentence for sentence in sentences)


def test_a_steady_machine_is_seldom_called_unsteady():
    assert sum(bool(told(*steps(noise=0.1, seed=seed))) for seed in range(300)) <= 6


def test_the_size_of_the_drift_is_that_of_the_simulation():
    drift, error, halves = step_drift(*steps(400, trend=0.2))
    assert drift == pytest.approx(np.expm1(0.2), abs=4 * error) and error < 0.01
    assert halves == pytest.approx(np.expm1(0.1), abs=0.02)
    assert step_drift(*steps(machine_noise.FEWEST_GROUPS - 1)) == (None, None, None)


def test_longer_texts_are_no_drift():
    """Steps over longer texts take longer, and later turns have them."""
    times, _ = steps(noise=0.01)
    columns = 100 + 400 * (np.arange(40) >= 20) + np.random.default_rng(1).uniform(0, 50, 40)
    slower = times * np.exp(columns / 1000)
    assert not told(slower, columns)
    assert told(slower, np.zeros(40))  # negative control: without knowing of columns


def test_a_busy_neighbour_is_told_and_this_process_is_not():
    first = parse_use(STAT.format(1000, 0), {0, 1}, (10.0, 0, 0, 0), 100)
    assert first == Use(2 * 520.0, 40.0, 0.0, 10.0)
    alone = parse_use(STAT.format(11_000, 0), {0, 1}, (200.0, 5.0, 2.0, 3.0), 100)
    others, steal = shares([first, alone])
    assert others == 0 and steal == 0  # 200 seconds busy, all of them its own or its children's
    beside = parse_use(STAT.format(11_000, 4000), {0, 1}, (110.0, 0, 0, 0), 100)
    others, steal = shares([first, alone, beside])
    assert others == pytest.approx(100 / 280) and steal == pytest.approx(80 / 280)
    sentences = reasons(Machine(True, [], None, None, None, None, None, others, steal, 0))
    assert "other processes used 36% of the cores" in sentences[0] and "the host gave 29%" in sentences[1]
    assert shares([first]) == shares([]) == shares([first, first]) == (None, None)
    assert parse_use("intr 5", {0}, (1.0,), 100) is None and parse_use("cpu0 1 2 3", {0}, (1.0,), 100) is None


@pytest.mark.parametrize(("seconds", "steady"), [([0.004, 0.0041, 0.0039, 0.004] * 5, True),
                                                 ([0.004] * 15 + [0.008] * 5, False),
                                                 ([0.004, 0.009] * 10, False),
                                                 ([0.004] * 19 + [0.1], True)])  # fmt: skip
def test_probes_that_vary_are_told_and_one_outlier_is_not(seconds, steady, monkeypatch):
    bandwidth = mock.Mock(reads=(9e9, 9.1e9) * 5, copy=None)
    monkeypatch.setattr(machine_watch, "BandwidthProbe", lambda device: bandwidth)
    times = iter([0.0, *np.cumsum([part for s in seconds for part in (s, 1.0)])])  # each probe takes the next seconds
    watch = MachineWatch(torch.device("cpu"), lambda: next(times), lambda: None)
    for _ in seconds:
        watch()
    assert watch.probes.seconds == pytest.approx(seconds)
    found = watch.probes.judge([])
    assert found.steady is steady and bool(found.reasons) is not steady and found.others is None
    assert steady or "probes of compute vary by" in found.reasons[0]
    assert variation([1.0] * (machine_noise.FEWEST_PROBES - 1)) is None


def test_what_this_process_started_is_its_own(tmp_path):
    def process(number, parent, *ticks):
        (tmp_path / str(number)).mkdir()
        line = f"{number} (a (b) c) S {parent}" + " 0" * 9 + f" {' '.join(ticks)}"
        (tmp_path / str(number) / "stat").write_text(line)

    process(1, 0, "900", "0", "0", "0")
    process(10, 1, "500", "0", "0", "0")  # this process, whose own time os.times has
    process(11, 10, "100", "20", "3", "0")  # a service
    process(12, 11, "50", "0", "0", "0")  # started by the service
    process(13, 1, "700", "0", "0", "0")  # somebody else's: the negative control
    (tmp_path / "14").mkdir()  # has ended meanwhile
    assert living(10, 100, tmp_path) == pytest.approx(1.73) and living(13, 100, tmp_path) == 0


def test_without_proc_nothing_is_known_of_others(monkeypatch):
    monkeypatch.setattr(machine_watch.Path, "read_text", mock.Mock(side_effect=FileNotFoundError))
    assert machine_watch.core_use() is None


RESULT = {"lossless": {"expected": True, "passed": True, "verdict": "passed"}, "speedup_over": {}, "metrics": {},
          "speedup": {"measured": 1.3, "ci95": [1.2, 1.4]}}  # fmt: skip


def shown(*machines):
    jobs = [([f"gamma={i}"], RESULT | {"machine": machine}) for i, machine in enumerate(machines)]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(*multirun_tables(multirun_rows(jobs), "jobs", "summary.csv"))
    written = StringIO(to_csv(Table.of(multirun_rows(jobs))))
    return captured.get(), [row["machine"] for row in csv.DictReader(written)]


def test_a_sweep_has_a_column_only_if_a_machine_was_not_steady():
    good, bad = {"steady": True, "reasons": []}, {"steady": False, "reasons": ["probes of compute vary by 34%", "x"]}
    text, column = shown(good, good)
    assert "steady" not in text and column == ["steady", "steady"]
    text, column = shown(good, bad)
    assert text.count("not steady") == 1 and column == ["steady", "probes of compute vary by 34%; x"]
