"""Whatever stands in results.json: each tool gives its answer or a sentence, and the page of a sweep has the others."""

import copy
import json
import logging
from contextlib import redirect_stdout, suppress
from io import StringIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import parts_of

from specbench.contrib.planning.command import main as plan
from specbench.contrib.replay.command import replay_run
from specbench.errors import ConfigError
from specbench.results import table_command
from specbench.results.reader import load_runs
from specbench.results.report import html_page
from specbench.results.report.page import write_report
from specbench.results.writer import write_result
from specbench.run.run import run

JSON = st.recursive(
    st.sampled_from([None, True, False, 0.5, 1e300, -1e300, 10**400]) | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A sweep's folder of two runs, of which the first one is to be changed."""
    folder = tmp_path_factory.mktemp("any")
    for name in ("a", "b"):
        (folder / name).mkdir()
        parts = parts_of("gamma=2", "data.limit=1", "max_new_tokens=3", f"seed={name == 'b':d}")
        result, record = run(parts, folder / name)
        write_result(result, record, name, folder / name, parts.target.tokenizer, {"device": {"dtype": "float32"}},
                     [f"seed={name == 'b':d}"])  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html_page, "save_figure", lambda *_: "<svg></svg>")
        logging.getLogger("specbench").setLevel("CRITICAL")
        yield folder
    logging.getLogger("specbench").setLevel("NOTSET")


def places(value, at=()):
    """The paths of all values in a tree."""
    yield at
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(entry, (*at, key))


def changed(result, at, value):
    if not at:
        return value
    found = copy.deepcopy(result)
    inner = found
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return found


def answers(folder, result):
    """Runs each tool on the first run with these results: only sentences may be raised."""
    (folder / "a" / "results.json").write_text(json.dumps(result))
    with redirect_stdout(StringIO()):
        for tool in (
            lambda: write_report(folder / "a", load_runs(folder / "a")),
            lambda: table_command.main([str(folder / "a")]),
            lambda: replay_run(folder / "a", ["gamma_policy=optimal"]),
            lambda: plan(["--pilot", str(folder / "a")]),
        ):
            with suppress(ConfigError, SystemExit):
                tool()
        table_command.main([str(folder), "--format", "csv"])
        write_report(folder, load_runs(folder))  # of both, or of the other one


def check_one(folder, data):
    original = json.loads((folder / "b" / "results.json").read_text())
    at = data.draw(st.sampled_from(sorted(places(original), key=repr)))
    answers(folder, changed(original, at, data.draw(JSON)))


FEW = settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


@pytest.mark.parametrize(("at", "value"), [(("lossless", "detail", "of_tokens"), []),
                                           (("acceptance", "lengths", 0), -1),
                                           (("acceptance", "lengths", 0), 2**1024)])  # fmt: skip
def test_values_that_have_ended_a_tool_are_answered_or_told(at, value, made):
    answers(made, changed(json.loads((made / "b" / "results.json").read_text()), at, value))


@FEW
@given(data=st.data())
def test_any_value_of_results_is_answered_or_told(made, data):
    check_one(made, data)


@pytest.mark.slow
@settings(FEW, max_examples=700)
@given(data=st.data())
def test_many_values_of_results_are_answered_or_told(made, data):
    check_one(made, data)
