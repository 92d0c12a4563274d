"""Sweeps whose jobs run as those of another process."""

import copy
import fcntl
import pickle
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import ClassVar

import pytest
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from specbench.contrib.cluster import cpu_affinity as cores
from specbench.run.sweep import Sweep


class Apart(BasicLauncher):
    """Runs jobs as those of another process: with what a launcher pickles, and without the sweep that began them."""

    seen: ClassVar[list[bool]] = []  # whether summary.csv was there after each job
    dies = False  # before the last job

    def launch(self, job_overrides, initial_job_idx):
        self.hydra_context = copy.copy(self.hydra_context)
        self.hydra_context.callbacks = pickle.loads(pickle.dumps(self.hydra_context.callbacks))
        running, Sweep.current = Sweep.current, None
        try:
            for number, overrides in enumerate(job_overrides):
                if Apart.dies and number == len(job_overrides) - 1:
                    raise RuntimeError("the worker is gone")
                super().launch([overrides], initial_job_idx + number)
                Apart.seen.append(running.folder.joinpath("summary.csv").is_file())
        finally:
            Sweep.current = running
        return []


@pytest.fixture
def apart(monkeypatch, tmp_path):
    monkeypatch.setitem(Plugins.instance().class_name_to_class, "hydra_plugins.apart.Apart", Apart)
    monkeypatch.setitem(sys.modules, "hydra_plugins", sys.modules.get("hydra_plugins") or ModuleType("hydra_plugins"))
    monkeypatch.setitem(sys.modules, "hydra_plugins.apart", ModuleType("hydra_plugins.apart"))
    sys.modules["hydra_plugins.apart"].Apart = Apart
    ConfigStore.instance().store(group="hydra/launcher", name="apart", node={"_target_": "hydra_plugins.apart.Apart"})
    monkeypatch.setattr(Apart, "seen", [])
    monkeypatch.setattr(Apart, "dies", False)
    return tmp_path / "outputs" / "s"


@pytest.fixture
def locks(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBENCH_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setattr(cores, "LOOK", 0.02)
    monkeypatch.setattr(cores, "thread_siblings", lambda core: frozenset((core,)))
    return cores.locks()


@contextmanager
def another_job(locks, name):
    """Another process that has a core or a device."""
    with (locks / name).open("w+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("12345")
        file.flush()
        yield file
