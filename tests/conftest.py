"""The environment of all tests. What runs tests, and not only hands them to workers, has the fixtures of shared.py."""

import atexit
import os
import shutil
import tempfile

import pytest

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB__SERVICE_WAIT", "300")  # seconds for its process to start, on a busy machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its helper processes take longer to start than they save
if "SPECBENCH_CACHE" not in os.environ:  # one for all workers, which inherit it
    os.environ["SPECBENCH_CACHE"] = tempfile.mkdtemp(prefix="specbench-tests-")
    atexit.register(shutil.rmtree, os.environ["SPECBENCH_CACHE"], ignore_errors=True)
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):  # pytest -n: they share the cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))


def pytest_configure(config):
    """With `-n` the process that hands out tests runs none: it imports neither torch nor the package."""
    alone = config.getoption("collectonly") or not config.getoption("numprocesses", None)
    if alone or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("shared")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each worker begins with half of the files, so that what a file makes is made once, then takes others."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None  # as `-n` sets it
