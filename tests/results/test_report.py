"""The page that a stored run becomes: whole, self-contained, and readable in a browser."""

import json
import re
import shutil
import subprocess
import warnings

import pytest
from matplotlib import pyplot as plt
from page_reader import Page
from small_runs import parts_of

import specbench.results.report.command as command
from specbench.results.reader import load_runs
from specbench.results.report.page import write_report
from specbench.results.report.style import PAGE_INK, embed, save_figure
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
    for words in (["gamma=1", "temperature=0"], ["gamma=1", "temperature=1"], ["gamma=3", "temperature=0"],
                  ["gamma=3", "temperature=1"], ["gamma=3", "temperature=1", "drafter=ngram"],
                  ["gamma=0", "temperature=1"]):  # fmt: skip
        store(folder / ",".join(words), *words)
    write_report(folder, load_runs(folder))
    return folder


def test_the_page_of_a_run_is_whole_and_needs_no_network(one):
    page, text = Page.of(one), (one / "report.html").read_text()
    assert page.headings == [
        "Which gamma", "What was run", "Why the gain is not Theorem 3.8's", "Where the time goes", "Beta by position",
        "Which guesses are accepted", "By request", "The text as it came about", "All numbers",
        "Time of the whole run"]  # fmt: skip
    assert all(link.startswith("#") for link in page.links) and "@import" not in text
    assert not re.findall(r"https?://(?!www\.w3\.org)", re.sub(r"<!DOCTYPE svg.*?>", "", text))
    assert {link[1:] for link in page.links} <= set(page.ids) and len(set(page.ids)) == len(page.ids)
    figures = {path.name for path in (one / "figures").iterdir()}
    assert len(page.texts["svg"]) == len(figures) / 2 == 9
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
    for prompt, sample in zip(stored.prompts, samples(stored), strict=False):
        kept = "".join(piece["text"] for piece in sample["pieces"] if piece["kind"] != "r")
        assert kept.replace("</s>", "") == prompt["output"]
    rejected = sum(piece["kind"] == "r" for sample in samples(stored) for piece in sample["pieces"])
    assert rejected == sum(r["recovered"] for r in stored.rounds if r["rejected"] is not None)


@pytest.mark.slow
def test_a_multirun_has_every_run_and_a_map(several):
    page, text = Page.of(several), (several / "report.html").read_text()
    assert "Over two keys at a time" in page.headings and page.texts["h1"][0].endswith("6 runs")
    assert all(f"gamma {gamma}, temperature 0" in text for gamma in (1, 3))
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


def test_a_figure_whose_labels_leave_no_room_grows(tmp_path):
    def make(label):
        figure, axes = plt.subplots(figsize=(8, 2))
        axes.set_yticks([0], [label])
        figures.append(figure)
        return figure

    figures = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's own, "constrained_layout not applied"
        for label in ("x", "x" * 150):
            save_figure(lambda label=label: make(label), tmp_path / "figure")
    assert [list(figure.get_size_inches() > (8, 2)) for figure in figures] == [[False, False], [True, True]]


@pytest.mark.parametrize(("folders", "told"), [(["."], "holds no finished run"), ([".", "."], "give --out DIR")])
def test_folders_without_a_page_are_one_sentence(folders, told, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([str(tmp_path / folder) for folder in folders])
    assert stop.value.code == 2 and told in capsys.readouterr().err


def dom(page, profile, dark=False):
    """What a browser makes of a page."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             f"--user-data-dir={profile}", "--window-size=1100,900", "--virtual-time-budget=2000"]  # fmt: skip
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    call = [CHROMIUM, *flags, "--dump-dom", page.as_uri()]
    return subprocess.run(call, capture_output=True, text=True, timeout=90).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_the_page(one, tmp_path):
    found = dom(one / "report.html", tmp_path / "profile", dark=True)
    assert "Why the gain is not Theorem 3.8" in found and found.count("<svg") == 9


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
