"""How OpenMP's threads wait: long on an idle machine, briefly beside other processes, and as the user says."""

import os
import sys

import pytest

from specbench.executors import waiting


@pytest.mark.parametrize(("others", "given", "chosen"), [
    (0.9, {}, waiting.SPINS),
    (0.1, {}, None),
    (0.9, {"GOMP_SPINCOUNT": "7"}, "7"),
    (0.9, {"OMP_WAIT_POLICY": "active"}, None),
])  # fmt: skip
def test_threads_wait_briefly_beside_other_processes_alone(others, given, chosen, monkeypatch):
    for name in waiting.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(waiting, "notes", [])
    monkeypatch.setattr(waiting, "BEGUN", (0.0, 0.0))
    monkeypatch.setattr(waiting, "working", lambda: (others, 1.0))
    waiting.choose()
    assert os.environ.get("GOMP_SPINCOUNT") == chosen and len(waiting.notes) == (chosen == waiting.SPINS)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)


def test_what_is_loaded_stays_as_it_is(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr(waiting, "working", lambda: (1e9, 1e9))
    assert "torch" in sys.modules
    waiting.choose()
    assert "GOMP_SPINCOUNT" not in os.environ and not waiting.notes


def test_a_note_says_that_other_processes_worked_meanwhile(monkeypatch):
    monkeypatch.setattr(waiting, "notes", [])
    monkeypatch.setattr(waiting, "BEGUN", (0.0, 0.0))
    for used, noted in ((9.0, True), (1.0, False)):
        monkeypatch.setattr(waiting, "working", lambda used=used: (used, 10.0))
        assert bool(waiting.told()) == noted
