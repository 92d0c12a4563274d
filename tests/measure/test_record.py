"""The one record: written line by line, read back equal, and cut lines are dropped."""

from pathlib import Path

import pytest
from records import records
from stored import put

from specbench.errors import ConfigError
from specbench.measure.record import read
from specbench.report.files import RECORDS


def test_a_failed_request_and_one_with_peers_are_read_back(tmp_path: Path) -> None:
    first, second = records(2)
    first.speculative, first.failed = None, "RuntimeError: no room"
    assert second.speculative is not None
    second.speculative.rounds.betas[0][0] = 1.1  # as an estimate of a tree's may be
    second.peers = {"generate": {"tokens": 3, "seconds": 0.5, "text": "a\u2028b", "ids": [1, 2, 3]}}
    assert read(put(tmp_path, [first, second]) / RECORDS) == [first, second]


@pytest.mark.parametrize("end", ["", "{}", '\u007b"id": '])
def test_a_cut_line_is_dropped(tmp_path: Path, end: str) -> None:
    made = records(3)
    path = put(tmp_path, made) / RECORDS
    path.write_text(path.read_text() + end)
    assert read(path) == made
    lines = path.read_text().splitlines(keepends=True)
    for share in (0.1, 0.5, 0.999):  # killed anywhere in the third line
        path.write_text("".join(lines[:2]) + lines[2][: int(share * len(lines[2]))])
        assert read(path) == made[:2]


@pytest.mark.parametrize("line", ["null\n", "[1]\n", "{}\n", "\n"])
def test_a_line_that_is_no_record_is_refused(tmp_path: Path, line: str) -> None:
    path = put(tmp_path, records(3)) / RECORDS
    path.write_text(path.read_text() + line)
    with pytest.raises(ConfigError, match="line 4 cannot be read"):
        read(path)
