"""`specbench.alpha` on a run's folder reads at the run's own settings."""

import json

from small_runs import finished

from specbench.config.build import build
from specbench.run.alpha import measure


def test_a_run_is_read_at_its_own_settings_whatever_the_defaults_are(monkeypatch):
    """Its overrides, from which today's defaults would make another configuration, are not asked."""
    *_, folder = finished("temperature=0.7", "top_k=9", "logger=none", "executor=eager")
    results = json.loads((folder / "results.json").read_text())
    assert results["details"]["overrides"] == []
    read = []
    monkeypatch.setattr("specbench.config.build.build", lambda checked, **how: read.append(checked) or build(checked))
    measure(folder, ["top_k=8"])
    [own] = read
    assert (own.root.temperature, own.root.top_k, own.names["executor"]) == (0.7, 8, "eager")
    assert own.resolved["drafter"] == results["config"]["drafter"]
