"""The blocks of a W&B report, which need no account."""

import pytest
from small_runs import parts_of

from specbench.contrib.wandb_report import report
from specbench.errors import ConfigError
from specbench.results.reader import load_runs
from specbench.results.writer import write_result
from specbench.run.run import run

pytest.importorskip("wandb_workspaces")


def test_blocks_of_a_report(tmp_path):
    parts = parts_of("gamma=1", "data.limit=1", "max_new_tokens=4", "verdict_tokens=0")
    write_result(*run(parts, tmp_path), "digest", tmp_path, parts.target.tokenizer)
    found = report.report_blocks("project", "entity", load_runs(tmp_path))
    grid = next(block for block in found if type(block).__name__ == "PanelGrid")
    assert len(grid.panels) == 7
    metrics = {str(metric) for panel in grid.panels for metric in getattr(panel, "metrics", [])}
    assert any("speedup/theorem_3_8" in metric for metric in metrics)
    assert grid.runsets[0].project == "project" and grid.runsets[0].entity == "entity"


def test_a_place_is_an_entity_and_a_project():
    with pytest.raises(ConfigError, match="it must be ENTITY/PROJECT"):
        report.save_report("project", [])
