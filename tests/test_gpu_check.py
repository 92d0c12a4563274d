"""The checks of a GPU: every phase runs on a CPU, on small models and with a timer that does not measure, and its
shapes and devices are followed on the fake CUDA device."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from specbench.gpu_check import __main__ as command
from specbench.gpu_check import attention, graphs, leaves, rounds, steps, whole
from specbench.gpu_check.check import FAILED, PASSED, TOLD, UNCLEAR, Number, Outcome, Phase
from specbench.gpu_check.lab import Lab
from specbench.gpu_check.phases import PHASES
from specbench.gpu_check.runner import lines_of, measure_into, read, run_phase, run_phases
from specbench.settings import ConfigError

SMALL = {
    "target.shape": {"vocab_size": 4096, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
                     "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    "drafter.shape": {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                      "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
}  # fmt: skip


class SmallLab(Lab):
    """A CPU, without graphs, and small shapes."""

    def overrides(self, overrides):
        wanted = [word.replace("executor=cudagraph", "executor=eager") for word in overrides if "_target_" not in word]
        for group, name in (("target.shape", "target=llama3b"), ("drafter.shape", "drafter=llama1b")):
            if name in wanted:
                wanted += [f"{group}.{key}={value}" for key, value in SMALL[group].items()]
        return super().overrides([*wanted, "max_new_tokens=8", "data.limit=1", "gamma=1"])


class FakeTimer:
    """Calls everything once, and says that it took a millisecond."""

    def __init__(self, seconds=1e-3):
        self.seconds, self.calls = seconds, 0

    def device(self, call, calls=20):
        self.calls += 1
        call()
        return self.seconds

    wall = host = device

    def kernels(self, call):
        call()
        return 100

    def synchronisations(self, call):
        call()
        return ["/x/specbench/state.py:1"] * 3

    def captured(self, call):
        return call


@pytest.fixture
def small(monkeypatch):
    """Short texts, few cases and nothing that starts another process."""
    monkeypatch.setattr(graphs, "NEW", 20)
    monkeypatch.setattr(graphs.Clobber, "cases", ((2, 1),))
    monkeypatch.setattr(graphs.Equality, "cases", (("paged", "stdlib"),))
    monkeypatch.setattr(graphs, "finished", lambda words, seconds: (0, "3 passed"))
    monkeypatch.setattr(rounds, "CHAINS", rounds.CHAINS[:2])
    monkeypatch.setattr(rounds, "OTHERS", (rounds.OTHERS[0], ("none", ("drafter=none",))))
    monkeypatch.setattr(rounds, "NEW_TOKENS", 12)
    monkeypatch.setattr(steps, "SHARES", {64: 0.85, 128: 0.80})
    monkeypatch.setattr(leaves, "V", 512)
    monkeypatch.setattr(attention, "COLUMNS", (16, 64))
    monkeypatch.setattr(whole, "BATCHES", {2: 6.0})
    monkeypatch.setattr(whole, "NEW", 8)
    monkeypatch.setattr(steps, "cuda_roofs", lambda device, seconds: steps.Roofs(1e9, 2e9))


@pytest.mark.parametrize("number", PHASES)
def test_every_phase_measures(number, small, tmp_path):
    lab = SmallLab(torch.device("cpu"), tmp_path / "own")
    path = lines_of(tmp_path, number)
    measure_into(PHASES[number](), lab, FakeTimer(), path)
    print([(n.name, n.value, n.remark) for n in read(path)])
