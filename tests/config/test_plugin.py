"""A user's own drafter, verifier, data source, logger and experiment, installed beside specbench."""

import json
from pathlib import Path

from small_runs import call

PLUGIN = Path(__file__).parents[1] / "plugin"


def test_an_experiment_with_parts_from_outside_runs(monkeypatch, tmp_path):
    """In this process, which finds the user's package as an installed one."""
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
