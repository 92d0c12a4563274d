"""The page of a run, a sweep and a comparison: its numbers, what it loads, and what users' strings do to it."""

import re
import xml.dom.minidom
from html.parser import HTMLParser

import numpy as np
import pytest
from records import record, records
from stored import HOSTILE, hostile_records, stored

from specbench.measure.compare import compare
from specbench.report import files, page, several, tables
from specbench.report.files import Run

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """What a page shows and loads: text outside its figures, tables, tags, links and figures."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.tables, self.tags, self.links, self.open = "", [], [], [], []
        self.feed(text)
        self.close()
        self.figures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"svg", "style", "title"} & {*self.open}:
            self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    def table(self, heading: str) -> list[dict[str, str]]:
        """The first table with this heading."""
        found = next(table for table in self.tables if heading in table[0])
        return [dict(zip(found[0], row, strict=True)) for row in found[1:]]


def read(folder) -> Page:
    return Page((folder / files.PAGE).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return stored(tmp_path_factory.mktemp("one"), overrides=["gamma=4"], notes=["mind this"])


@pytest.fixture(scope="module")
def shown(run) -> Page:
    return read(run.folder)


def test_the_first_line_is_the_speedup_with_its_interval(run, shown):
    speedup = run.results["speedup"]
    top = shown.text[: shown.text.index("By method")]
    for value in (speedup["measured"], *speedup["ci95"], speedup["theorem_3_8"]):
        assert f"{value:.2f}" in top
    assert tables.verdict(run.results["lossless"]) in top and f"{run.results['alpha']['mean']:.3f}" in top
    assert top.index(f"{speedup['measured']:.2f}") < top.index(f"{speedup['theorem_3_8']:.2f}")


def test_its_tables_are_those_of_the_results(run, shown):
    for heading, table in (("prompts", tables.by_category([run])), ("speculative over it", tables.methods(run))):
        assert shown.table(heading) == table.astype(str).to_dict("records")


def test_it_shows_notes_texts_and_how_it_was_measured(run, shown):
    assert "mind this" in shown.text and "gamma=4" in shown.text
    assert shown.tags.count("details") == min(len(run.records), page.PROMPTS_SHOWN)
    for own in run.records[: page.PROMPTS_SHOWN]:
        assert own.prompt in shown.text and own.speculative.text in shown.text
    assert str(run.results["provenance"]["device"]) in shown.text and "python -m" not in shown.text
    argv = run.results["provenance"] | {"argv": ["specbench.compare", "gamma=1"]}
    again = page.facts([Run(run.folder, run.results | {"provenance": argv})])
    assert again["command"] == "python -m specbench.compare gamma=1"


def test_it_loads_nothing(shown):
    """One file that works without a network, and without scripts."""
    assert "script" not in shown.tags and "link" not in shown.tags and "iframe" not in shown.tags
    assert all(link.startswith("#") for link in shown.links)
    assert not shown.open  # every element is closed
    assert len(shown.figures) == 2


def test_texts_that_differ_from_plain_decoding_show_both(tmp_path):
    own = records(2)
    own[0].baseline.ids = [1, 2, 3]
    own[0].baseline.text = "another text"
    own[1].baseline.text = "not shown"  # its tokens are the same
    text = read(stored(tmp_path, own).folder).text
    assert "another text" in text and "not shown" not in text


def test_a_run_of_one_prompt_without_categories(tmp_path):
    own = records(1)
    own[0].category = ""
    run = stored(tmp_path, own)
    assert run.results["speedup"]["ci95"] is None and run.results["by_category"] == []
    found = read(tmp_path)
    assert f"{run.results['speedup']['measured']:.2f}" in found.text
    assert not [table for table in found.tables if "category" in table[0]]


def test_a_run_that_drafted_nothing(tmp_path):
    rng = np.random.default_rng(0)
    own = [record(f"p{number}", 8, 0, 0.5, rng, group=number) for number in range(4)]
    run = stored(tmp_path, own)
    assert run.results["alpha"]["mean"] is None and run.results["speedup"]["accounting"] == []
    found = read(tmp_path)
    assert found.tables and not found.figures


def test_prompts_that_failed_are_counted_and_not_shown(tmp_path):
    own = records(5)
    own[0].speculative = own[0].baseline = None
    own[0].failed = "out of memory"
    run = stored(tmp_path, own)
    found = read(tmp_path)
    assert run.results["counts"]["failed"] == 1 and "1 failed" in found.text and "out of memory" in found.text
    assert own[0].prompt not in found.text


def test_an_interrupted_run_says_so(tmp_path):
    stored(tmp_path, status="interrupted")
    text = read(tmp_path).text
    assert "interrupted" in text[: text.index("Theorem")]


def test_a_verdict_that_failed_is_marked(tmp_path):
    results = stored(tmp_path).results
    bad = results | {"lossless": results["lossless"] | {"passed": False, "reason": "the decoder is wrong"}}
    text = Page(page.run_page(Run(tmp_path, bad), [])).text
    assert "failed" in text and "the decoder is wrong" in text and "passed" not in text


def hostile_page(found: Page) -> None:
    """Asserts that a page with hostile strings has no element, and no control character, of theirs."""
    assert "script" not in found.tags and not found.open
    assert "alert(1)" in found.text and "<script>" in found.text  # as text
    assert "\x1b" not in found.text and "\u202e" not in found.text
    for figure in found.figures:
        xml.dom.minidom.parseString(figure)


def test_hostile_strings_on_the_page_of_a_run(tmp_path):
    run = stored(tmp_path / "run", hostile_records(), name=HOSTILE, overrides=[HOSTILE], notes=[HOSTILE],
                 lossy_reason=HOSTILE, expected_lossless=False)  # fmt: skip
    assert run.results["name"] == HOSTILE
    hostile_page(read(run.folder))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> list[Run]:
    folder = tmp_path_factory.mktemp("sweep")
    for gamma, alpha in ((1, 0.6), (3, 0.7), (5, 0.8)):
        own = records(gamma=gamma, alpha=alpha)
        stored(folder / str(gamma), own, gamma=gamma, overrides=[f"gamma={gamma}", "temperature=0"])
    return files.read_all(folder)


def test_the_page_of_a_sweep(sweep):
    found = Page(several.sweep_page(sweep, "sweep"))
    assert found.table("Thm 3.8") == several.runs_table(sweep).astype(str).to_dict("records")
    assert found.table("category") == tables.by_category(sweep).astype(str).to_dict("records")
    best = max(run.results["speedup"]["measured"] for run in sweep)
    assert f"{best:.2f}x" in found.text[: found.text.index("Runs")]
    assert len(found.figures) == 2


def test_the_page_of_a_comparison(sweep):
    rows = compare({run.label: run.records for run in sweep})
    found = Page(several.comparison_page(rows, sweep, "comparison"))
    assert found.table("rank") == several.comparison(rows)[several.RANKING].astype(str).to_dict("records")
    order = [row["run"] for row in found.table("Thm 3.8")]
    assert order == [row["method"] for row in rows]  # the fastest first in both
    assert found.text.index(rows[0]["method"]) < found.text.index("Ranking")


def test_hostile_names_of_runs(sweep):
    named = [Run(run.folder, run.results, f"{HOSTILE}{number}") for number, run in enumerate(sweep)]
    hostile_page(Page(several.sweep_page(named, HOSTILE)))
    rows = compare({run.label: run.records for run in named})
    hostile_page(Page(several.comparison_page(rows, named, HOSTILE)))
