"""A user's own drafter, verifier, data source, logger and experiment, installed beside specbench."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from small_runs import LITTLE, call

PLUGIN = Path(__file__).parents[1] / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with `site`, where pip has installed the user's package, and `conf`, the user's own folder."""
    folder = tmp_path_factory.mktemp("user")
    wheel, info = folder / "myspec-1.0-py3-none-any.whl", "myspec-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted((PLUGIN / "myspec").glob("*.py")):
            archive.write(path, f"myspec/{path.name}")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: myspec\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([*pip, str(wheel)], check=True)
    shutil.copytree(PLUGIN / "conf", folder / "conf")
    return folder


def call_apart(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`specbench` in a process of its own, in another folder, with the user's package on its path."""
    env = {**os.environ, "PYTHONPATH": str(installed / "site")}
    command = [sys.executable, "-m", "specbench", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_an_experiment_with_parts_from_outside_runs(monkeypatch, tmp_path):
    """In this process, which finds the user's package as an installed one; the slow tests install it."""
    monkeypatch.syspath_prepend(PLUGIN)
    assert call(["--config-dir", str(PLUGIN / "conf"), "experiment=mine"], monkeypatch, tmp_path) == 0
    for back in (1, 4):
        out = tmp_path / "outputs" / "mine" / f"drafter.back={back}"
        result = json.loads((out / "results.json").read_text())
        choices = result["details"]["choices"]
        assert choices["drafter"] == "echo" and choices["verifier"] == "mine"
        assert result["config"]["drafter"]["back"] == back and result["lossless"]["passed"]
        assert result["counts"]["tokens"] == 16
        assert [category["category"] for category in result["by_category"]] == ["mine"]
        assert "verified by a rule of the user's own" in result["notes"]
        assert (out / "speedup.txt").read_text().endswith("over 2 prompts\n")


@pytest.mark.slow
def test_the_search_path_of_hydra_does_the_same(installed, tmp_path):
    path = f"hydra.searchpath=[file://{installed / 'conf'}]"
    arguments = ["drafter=echo", "data=list", "gamma=2", "max_new_tokens=8", "logger=none",
                 "executor=eager", f"target.path={LITTLE['target.path']}"]  # fmt: skip
    done = call_apart(installed, tmp_path, path, *arguments, "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "results.json").read_text())["details"]["choices"]["drafter"] == "echo"


@pytest.mark.slow
def test_their_parts_are_refused_like_ours(installed, tmp_path):
    arguments = ["--config-dir", str(installed / "conf"), "drafter=echo", "verifier=rejection"]
    done = call_apart(installed, tmp_path, *arguments)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert "verifier=rejection is not possible with drafter=echo, whose guesses have no law" in done.stderr
