"""The page that a stored run becomes: whole, self-contained, and readable in a browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from small_runs import parts_of

import specbench.results.report.command as command
from specbench.results.reader import load_runs
from specbench.results.report.page import write_report
from specbench.results.report.style import PAGE_INK, embed
from specbench.results.token_trace import samples
from specbench.results.writer import write_result
from specbench.run.run import run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def store(folder, *overrides):
    parts = parts_of(*overrides)
    folder.mkdir(parents=True)
    result, record = run(parts, folder)
    write_result(result, record, "digest", folder, parts.target.tokenizer)
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = store(tmp_path_factory.mktemp("report") / "run", "gamma=3")
    command.main([str(folder)])
    return folder


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    for gamma in (1, 3):
        for temperature in (0, 1):
            store(folder / f"gamma={gamma},temperature={temperature}", f"gamma={gamma}", f"temperature={temperature}")
    store(folder / "gamma=3,temperature=1,drafter=ngram", "gamma=3", "drafter=ngram")
    store(folder / "gamma=0,temperature=1", "gamma=0")
    write_report(folder, load_runs(folder))
    return folder


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.headings, self.links, self.svgs, self.ids, self._in = [], [], 0, [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self._in = tag
        self.svgs += tag == "svg"
        self.links += [attrs[key] for key in ("src", "href", "xlink:href") if key in attrs]
        self.ids += [attrs["id"]] if "id" in attrs else []

    def handle_data(self, data):
        if self._in in ("h1", "h2") and data.strip():
            self.headings.append(data.strip())


def test_the_page_of_a_run_is_whole_and_needs_no_network(one):
    page = Page((one / "report.html").read_text())
    expected = ["What was run", "Why the gain is not Theorem 3.8's", "Which gamma", "Where the time goes",
                "Beta by position", "Which guesses are accepted", "By request", "The text as it came about",
                "All numbers", "The paper's figures, with what was measured", "Time of the whole run"]  # fmt: skip
    assert page.headings[1:] == expected
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids) and len(set(page.ids)) == len(page.ids)
    figures = {path.name for path in (one / "figures").iterdir()}
    assert page.svgs == len(figures) / 2 == 12
    assert {name.split(".")[-1] for name in figures} == {"png", "svg"}


def test_the_page_says_what_results_json_says(one):
    result, text = json.loads((one / "results.json").read_text()), (one / "report.html").read_text()
    assert f"{result['speedup']['measured']:.2f}x" in text
    assert f"{result['alpha']['mean']:.3f}" in text and "below 0.005 fails" in text
    for factor in result["speedup"]["accounting"].values():
        told = f"x{factor['factor']:.2f}" in text or f"{factor['factor']:.2f}x" in text
        assert told or abs(factor["factor"] - 1) < 0.005


def test_the_coloured_text_is_the_output(one):
    stored = load_runs(one)[0]
    outputs = {p["id"]: p["output"] for p in stored.prompts}
    ids = list(outputs)
    for name, sample in zip(ids, samples(stored), strict=False):
        kept = "".join(piece["text"] for piece in sample["pieces"] if piece["kind"] != "r")
        assert kept.replace("</s>", "") == outputs[name]
    rejected = sum(piece["kind"] == "r" for sample in samples(stored) for piece in sample["pieces"])
    assert rejected == sum(r["recovered"] for r in stored.rounds if r["rejected"] is not None)


def test_a_multirun_has_every_run_and_a_map(several):
    text = (several / "report.html").read_text()
    page = Page(text)
    assert "Over two keys at a time" in page.headings and page.headings[0].endswith("6 runs")
    for gamma in (1, 3):
        assert f"gamma {gamma}, temperature 0" in text
    assert (several / "figures" / "heat_alpha_gamma_temperature.png").is_file()
    runs = load_runs(several)
    assert [run.keys["gamma"] for run in runs] == sorted(run.keys["gamma"] for run in runs)


def test_embedded_figures_keep_their_ids_apart():
    svg = (
        f'<svg width="90pt" height="9pt" viewBox="0 0 1 1"><g id="a" fill="{PAGE_INK}"/>'
        '<use xlink:href="#a" clip-path="url(#a)"/></svg>'
    )
    found = embed(svg, "one")
    assert 'id="one-a"' in found and 'href="#one-a"' in found and "url(#one-a)" in found and "currentColor" in found
    assert not re.search(r'<svg[^>]* (width|height)="', found)


def test_an_empty_folder_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([str(tmp_path)])
    assert stop.value.code == 2 and "holds no finished run" in capsys.readouterr().err


def dom(page, profile, dark=False):
    """What a browser makes of a page."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={profile}",
        "--window-size=1100,900",
        "--virtual-time-budget=2000",
    ]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    call = [CHROMIUM, *flags, "--dump-dom", page.as_uri()]
    return subprocess.run(call, capture_output=True, text=True, timeout=90).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_the_page(one, tmp_path):
    found = dom(one / "report.html", tmp_path / "profile", dark=True)
    assert "Why the gain is not Theorem 3.8" in found and found.count("<svg") == 12


CLICKS = """<script>
const table = document.querySelector("table.sorts"), heads = [...table.tHead.rows[0].cells];
const place = heads.findIndex(head => head.textContent.trim() === "alpha");
const rows = () => [...table.tBodies[0].rows].filter(row => !row.hidden);
const told = () => rows().map(row => row.cells[place].textContent.trim());
const button = heads[place].querySelector("button"), filter = document.querySelector(".tools input"), found = [told()];
button.click(); found.push(told()); button.click(); found.push(told());
filter.value = "gamma=3 ngram"; filter.dispatchEvent(new Event("input")); found.push(told());
document.body.append(`FOUND${JSON.stringify(found)}END`);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_sorts_and_filters_the_runs(several, tmp_path):
    page = tmp_path / "clicked.html"
    page.write_text((several / "report.html").read_text().replace("</body>", CLICKS))
    whole, up, down, left = json.loads(dom(page, tmp_path / "profile").split("FOUND")[-1].split("END")[0])
    numbers = sorted(float(alpha) for alpha in whole if alpha != "-")
    assert len(whole) == 6 and whole.count("-") == 1  # gamma=0 has no alpha
    assert [float(alpha) for alpha in up[:5]] == numbers and up[5] == "-"
    assert [float(alpha) for alpha in down[:5]] == numbers[::-1] and down[5] == "-"
    assert len(left) == 1 and left[0] in whole


def test_blocks_of_a_wandb_report(one):
    pytest.importorskip("wandb_workspaces")
    from specbench.results.loggers.wandb_report import report_blocks

    found = report_blocks("project", "entity", load_runs(one))
    grid = next(block for block in found if type(block).__name__ == "PanelGrid")
    assert len(grid.panels) == 7
    metrics = {str(metric) for panel in grid.panels for metric in getattr(panel, "metrics", [])}
    assert any("speedup/theorem_3_8" in metric for metric in metrics)
    assert grid.runsets[0].project == "project" and grid.runsets[0].entity == "entity"
