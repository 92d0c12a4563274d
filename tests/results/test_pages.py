"""What the pages say: the verdict, what was run, tables of prompts, categories, runs and comparisons."""

import json
import re
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml
from choosing import only
from matplotlib import pyplot as plt
from page_reader import Page
from small_runs import call, parts_of, small, steady

from specbench.errors import ConfigError
from specbench.results import acceptance_tables
from specbench.results.comparability import differing_overrides
from specbench.results.comparison_tables import ranking
from specbench.results.reader import StoredRun, load_runs
from specbench.results.recommendation import answer
from specbench.results.report import figures, html_page, style, sweep_figures
from specbench.results.report.page import notes, write_report
from specbench.results.report.run_description import commands, fastest, unlike
from specbench.results.report.run_sections import acceptance
from specbench.results.report.sweep_sections import comparisons, maps_of
from specbench.results.table import Cell, Table
from specbench.results.writer import write_result
from specbench.run.compare import page_of
from specbench.run.run import run
from specbench.stats.comparison import Compared, Comparison, Pair

SCRIPT = "</pre></script><script>alert(1)</script>"
ESTIMATE = {"mean": 0.5, "stderr": 0.1, "n": 8}
ACCEPTANCE = {
    "lengths": [3, 2, 1],
    "conditional": [ESTIMATE, ESTIMATE],
    "joint": [ESTIMATE, {"mean": 0.25, "stderr": None, "n": 4}],
    "by_entropy": {"drafter": [{"low": 0.0, "high": 1.0, "alpha": ESTIMATE, "accepted": ESTIMATE},
                               {"low": 1.0, "high": None, "alpha": ESTIMATE, "accepted": ESTIMATE}]},
    "by_token_class": {"word": ESTIMATE},
    "calibration": {"error": 0.125, "confidence": 0.6, "agreement": 0.5, "positions": 9,
                    "bins": [{"low": 0.5, "high": 0.6, "positions": 9, "confidence": 0.6, "agreement": 0.5,
                              "accepted": ESTIMATE}]},
    "check": {"z": -0.5, "accepted": 4, "expected": 4.5, "sd": 1.0},
}  # fmt: skip
CATEGORY = {"prompts": 2, "tokens": 9, "rounds": 4, "block_efficiency": ESTIMATE, "alpha": ESTIMATE,
            "speedup": {"measured": 1.234, "ci95": [1.1, 1.4], "end_to_end": 1.2, "end_to_end_ci95": None,
                        "geometric_mean": {"mean": 1.2, "ci95": None}},
            "tokens_per_second": 77.7, "baseline_tokens_per_second": 63.0}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Figures are made, but no files of them; tests/results/test_report.py draws them all."""

    def made_only(make, path):
        plt.close(make())
        return "<svg></svg>"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html_page, "save_figure", made_only)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run's folder, with prompts, ids and categories that would be elements of a page."""
    folder = tmp_path_factory.mktemp("pages") / "gamma=3"
    folder.mkdir()
    parts = parts_of("gamma=3", "data.limit=2")
    result, record = run(parts, folder)
    write_result(result, record, "digest", folder, parts.target.tokenizer, overrides=["gamma=3", "name=a b"])
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    lines[0] |= {"prompt": SCRIPT, "category": SCRIPT}
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(folder, load_runs(folder))
    return folder


@pytest.fixture(scope="module")
def page(made):
    return Page.of(made)


def results(folder):
    return json.loads((folder / "results.json").read_text())


def copy(made, folder, change):
    """The run in another folder, with changed results."""
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns("report.html", "figures"))
    result = results(made)
    change(result)
    (folder / "results.json").write_text(json.dumps(result))
    return folder


def test_a_page_begins_with_the_verdict_and_what_was_run(made, page):
    result = results(made)
    text, found = (made / "report.html").read_text(), answer(result)
    assert page.texts["p"][:4] == found.lines and page.texts["code"][0] == found.command
    assert text.index(found.next) < text.index('class="card"') < text.index("Which gamma") < text.index("What was run")
    assert text.index("Which gamma") < text.index("lossless: ") < text.index("What was run")
    assert text.index("What was run") < text.index("Why the gain is not")
    told = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert told["gamma"] == "3" and told["temperature"] == f"{result['config']['temperature']:g}"
    assert told["commit"].startswith((result["provenance"]["git_sha"] or "unknown")[:7])
    assert {"target", "drafter", "policy", "verifier", "data", "executor", "cache", "dtype", "machine"} <= {*told}
    assert shlex.split(page.texts["code"][1]) == ["python", "-m", "specbench", "gamma=3", "name=a b"]


def test_the_whole_configuration_is_folded(made, page):
    folded = next(text for text in page.texts["details"] if text.startswith("The whole configuration"))
    assert yaml.safe_load(folded.removeprefix("The whole configuration")) == results(made)["config"]


def test_every_prompt_has_a_row(made, page):
    records = [json.loads(line) for line in (made / "prompts.jsonl").read_text().splitlines()]
    rows = page.table("request")
    assert [row["request"] for row in rows] == [record["id"] for record in records]
    for row, record in zip(rows, records, strict=True):
        rate = record["tokens"] / record["decode_seconds"]
        plain = record["baseline_tokens"] / record["baseline_decode_seconds"]
        assert row["speedup"] == f"{rate / plain:.2f}x" and row["tokens"] == str(record["tokens"])
        assert record["output"] in row["text"]


def test_text_of_a_prompt_stays_text(made, page):
    own = Path(style.__file__).with_name("page.js").read_text()
    (script,) = page.texts["script"]
    assert script.strip() == own.strip()
    assert page.table("request")[0]["category"] == SCRIPT
    planted = Page(f"<body>{SCRIPT}</body>")  # without escaping it would be an element
    assert planted.texts["script"] == ["alert(1)"]


def test_later_numbers_are_shown_where_they_are_there(made, tmp_path):
    def shown(name, change):
        write_report(folder := copy(made, tmp_path / name, change), load_runs(folder))
        return Page.of(folder)

    def drop(result):
        del result["acceptance"], result["by_category"]

    (length, _) = shown("lengths", lambda result: result.update(by_length={"128 to 511": CATEGORY})).table("geo. mean")
    assert (length["tokens of the prompt"], length["speedup"]) == ("128 to 511", "1.23x")
    later = {"By category", "Which guesses are accepted"}
    found = shown("run", lambda result: result.update(by_category={"maths": CATEGORY}))
    assert later <= {*found.headings} and not later & {*shown("fewer", drop).headings}
    maths, whole = found.table("95 %")
    assert maths["speedup"] == "1.23x" and maths["95 %"] == "1.10-1.40" and maths["tokens/s"] == "77.7"
    assert whole["requests"] == "2" and whole["speedup"] == f"{results(made)['speedup']['measured']:.2f}x"
    shares = [float(row["share"].rstrip("%")) for row in found.table("guess")]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_figures_of_acceptance_have_the_numbers():
    (axes,) = figures.positions_figure(ACCEPTANCE, 0.7).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn["alpha to that power"] == pytest.approx([0.7, 0.49])
    (bars,) = figures.lengths_figure(ACCEPTANCE).axes[0].containers
    assert [bar.get_height() for bar in bars] == pytest.approx([50, 100 / 3, 50 / 3])


def runs_of(*changes):
    """Stored runs with only what maps read."""
    return [StoredRun(Path("x"), {"alpha": {"mean": alpha}}, keys) for keys, alpha in changes]


def test_a_map_never_averages_over_a_third_key(tmp_path):
    runs = runs_of(*(({"gamma": g, "drafter": d, "temperature": t}, float(t) + 0.2)
                     for g in "12" for d in "ab" for t in ("0", "0.2")))  # fmt: skip
    maps = sweep_figures.heat_maps(runs, "gamma", "drafter", "alpha/mean", "alpha")
    told = [text.get_text() for axes in maps.axes for text in axes.texts]
    assert told == ["0.20"] * 4 + ["0.40"] * 4  # and not 0.30
    colours = {text.get_color() for axes in maps.axes for text in axes.texts}
    assert colours == {"white", sweep_figures.NIGHT}  # neither follows the colour of the page's text
    twice = runs_of(*(({"gamma": "1", "drafter": "a"}, alpha) for alpha in (0.2, 0.4)))
    same = sweep_figures.heat_maps(twice, "gamma", "drafter", "alpha/mean", "alpha")
    assert [text.get_text() for text in same.axes[0].texts] == ["0.30\nn 2"]


def test_numbers_that_hardly_differ_have_hardly_different_colours():
    def shades(*alphas):
        runs = runs_of(*(({"gamma": str(n), "drafter": d}, a) for n, a in enumerate(alphas) for d in "ab"))
        image = sweep_figures.heat_maps(runs, "gamma", "drafter", "alpha/mean", "alpha").axes[0].images[0]
        return np.ptp(image.norm(image.get_array()))

    assert shades(0.64, 0.64 + 1e-9) < 0.01 < shades(0.64, 0.65) < 0.1
    assert shades(0.2, 0.9) == 1  # a range that is there


def test_no_line_is_drawn_where_nothing_can_be_estimated():
    def drawn(*intervals):
        figure, axes = plt.subplots()
        sweep = [{"gamma": g, "speedup": 1.0 + g, "ci95": ci95} for g, ci95 in enumerate(intervals)]
        sweep_figures._draw_replay(axes, sweep, alone=True)
        plt.close(figure)
        return {line.get_label(): [*line.get_ydata()] for line in axes.get_lines()}

    known = [0.9, 4.0]
    found = drawn(known, None, known, None)
    assert [np.isnan(y) for y in found["replay of a run"]] == [False, True, False, True]
    assert found["best by replay"] == [3.0] and drawn(None, None) == {}
    assert drawn(known, known)["replay of a run"] == [1.0, 2.0]
    assert "best by replay" not in drawn(known, None)  # gamma 0 drafts nothing


def test_the_waterfall_fits_a_phone(made):
    (run,) = load_runs(made)
    figure = figures.accounting_waterfall(run)
    figure.canvas.draw()
    (axes,) = figure.axes
    told = [text.get_text() for text in axes.texts]
    factors = [own["factor"] for name, own in run.result["speedup"]["accounting"].items() if name != "rows"]
    assert figure.get_size_inches()[0] * 96 <= 400 - 2 * 12
    assert [float(re.search(r"[\d.]+", text)[0]) for text in told] == pytest.approx(
        [*factors, run.result["speedup"]["measured"]], abs=0.006)  # fmt: skip
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in axes.texts)
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert ends[-1] == pytest.approx(run.result["speedup"]["measured"]) == ends[-2]


def test_a_default_is_the_same_as_its_override():
    config, stdlib = {"gamma": 4, "temperature": 1.0}, {"drafter": "stdlib"}
    runs = [(Path("x"), {"config": config | more, "choices": choices, "overrides": words}) for more, choices, words in (
        ({}, stdlib, []), ({}, stdlib, ["gamma=4"]), ({"gamma": 2}, stdlib, ["gamma=2", "temperature=1"]),
        ({}, {"drafter": "ngram"}, ["drafter=ngram"]))]  # fmt: skip
    expected = [("4", "stdlib"), ("4", "stdlib"), ("2", "stdlib"), ("4", "ngram")]
    assert differing_overrides(runs) == [{"gamma": gamma, "drafter": drafter} for gamma, drafter in expected]


def test_runs_that_are_not_alike_are_told(made):
    result = results(made)
    other = json.loads(json.dumps(result))
    assert not list(unlike([result, other]))
    other["provenance"]["git_sha"] = "0123456789"
    (told,) = unlike([result, other])
    assert "2 commits" in told and "0123456" in told


def test_a_page_of_many_runs_links_to_each(made, tmp_path):
    for name in ("gamma=3", "gamma=5"):
        copy(made, tmp_path / name, lambda result, name=name: result.update(overrides=[name]))
    (tmp_path / "gamma=3" / "report.html").write_text("a page")
    write_report(tmp_path, load_runs(tmp_path))
    found = Page.of(tmp_path)
    assert found.links == ["gamma%3D3/report.html"]
    rows = found.table("Thm 3.8")
    assert [(row["page"], row["gamma"]) for row in rows] == [("open", "3"), ("-", "5")]
    assert "fastest of 2" in found.texts["p"][0].lower()


def way(label, rank, ratio, speedup):
    numbers = dict.fromkeys(("alpha", "alpha_on_target_text", "tau", "c", "v", "o"), 0.5)
    numbers |= {"tokens_per_second": 10.0, "speedup": speedup}
    error = (None, None) if ratio == 1 else ((0.5, 0.9), 0.01)
    causes = ({}, {}) if ratio == 1 else ({"alpha": ratio}, {"alpha": (0.5, 0.9)})
    return Compared(label, rank, numbers, {"speedup": (1.2, 2.0)}, ratio, *error, None, None, *causes)


@pytest.fixture
def compared(made, tmp_path):
    """A comparison of two drafters that passed, on a steady machine."""
    for name in "ab":
        result = results(copy(made, tmp_path / name, lambda result: None))
        result["overrides"] = [f"drafter={name}"]
        result["lossless"] |= {"verdict": "passed", "passed": True}
        result["machine"] |= {"steady": True, "reasons": []}
        (tmp_path / name / "results.json").write_text(json.dumps(result))
    found = Comparison("tokens_per_second", 8, 8, "a", [way("a", 1, 1.0, 1.5), way("b", 2, 0.75, 1.1)],
                       [Pair("a", "b", 4 / 3, (1.1, 2.0), 0.01, 0.01)])  # fmt: skip
    entry = asdict(found)
    for one in entry["runs"]:
        one["folder"] = one["label"]
    (tmp_path / "comparison.json").write_text(json.dumps({"comparisons": [{"task": {"temperature": "0"}, **entry}]}))
    return tmp_path


def test_a_comparison_has_its_ranking(compared):
    write_report(compared, load_runs(compared))
    found = Page.of(compared)
    lead = "At temperature 0: a is the fastest of 2 ways: 1.50x plain decoding's speed (1.20 to 2.00)."
    assert found.texts["p"][0] == lead and found.headings[:2] == ["Ranking at temperature 0", "Why at temperature 0"]
    rows = found.table("way")
    assert [(row["way"], row["rank"], row["of a"]) for row in rows] == [("a", "1", "1.000"), ("b", "2", "0.750")]
    assert found.table("ratio")[0]["alpha"] == "x0.75*"


def test_a_comparison_of_other_runs_is_not_shown(compared):
    runs = load_runs(compared)
    (entry,) = comparisons(compared, runs)
    assert comparisons(compared, runs[:1]) == []
    entry["runs"][1]["rank"] = 1
    assert ranking(entry).endswith("; not told apart from b.")
    (compared / "comparison.json").write_text('{"comparisons": [{"runs": 1}]}')
    with pytest.raises(ConfigError, match=r"comparison\.json cannot be used"):
        comparisons(compared, runs)


def test_a_cut_trace_is_told(made):
    (whole,) = load_runs(made)
    rounds = len(whole.rounds)
    assert "of all" not in str(notes([whole]))
    whole.__dict__["rounds"] = whole.rounds[:2]
    assert f"the first 2 of {rounds:,} rounds" in str(notes([whole]))


def test_columns_of_words_are_told_from_numbers():
    table = Table.of([{"a": "x0.92", "b": "ngram", "c": Cell("-")}, {"a": "1.08x", "b": "2-gram", "c": "< .001"}])
    assert table.words == {"b"} and table.headings == ["a", "b", "c"]


def seen(colour, kind):
    """A colour in CIELAB, as seen by full sight, protanopes or deuteranopes (Vienot, Brettel and Mollon 1999)."""
    matrices = {"full": np.eye(3), "protan": [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
                "deutan": [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]}  # fmt: skip
    srgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(matrices[kind]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = (np.array(to_xyz) @ linear) / np.array([0.9505, 1, 1.089])
    f = [t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29 for t in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def closest(colours):
    pairs = [(a, b) for at, a in enumerate(colours) for b in colours[:at]]
    return min(np.linalg.norm(seen(a, kind) - seen(b, kind)) for a, b in pairs for kind in ("full", "protan", "deutan"))


def test_colours_are_told_apart_by_the_colour_blind():
    assert closest([*style.LAPS.values()]) > 20
    assert closest([style.MEASURED, style.THEORY, style.GOOD]) > 20
    assert closest([style.GOOD, style.BAD]) > 20 and closest(style.SERIES[:6]) > 15
    assert closest(["#3b82c4", "#8a63d2"]) < 10  # a blue and a purple that are not


def test_a_figure_says_things_without_colour():
    assert len({*style.HATCHES.values()}) == len(style.LAPS) and style.HATCHES.keys() == style.LAPS.keys()
    assert len({*style.MARKERS}) == len({*style.SERIES}) == len(style.SERIES)
    sheet = Path(style.__file__).with_name("page.css").read_text()
    looks = [re.search(rf"^(?:\.\w+ {{[^}}]*}} )?\.{kind} {{([^}}]*)}}", sheet, re.M)[1] for kind in "arob"]
    bare = [re.sub(r"color: var\(--\w+\);", "", look).strip() for look in looks]
    assert len({*bare}) == 4


@pytest.mark.parametrize(("logger", "files"), [("none", []), ("wandb", ["report.html"])])
def test_a_comparison_has_a_page_if_its_ways_have(compared, logger, files):
    for name in "ab":
        result = results(compared / name)
        result["choices"]["logger"] = logger
        (compared / name / "results.json").write_text(json.dumps(result))
    assert page_of(compared, [compared / name for name in ("a", "b", "failed")]) == files
    assert [path.name for path in compared.glob("*.html")] == files


def test_the_check_of_betas_is_one_process_s(made, tmp_path):
    """Pooled runs have the check of their first process, and no page or table says it of all."""
    told = "4 guesses were accepted where their betas say 4.5 (z -0.50)"

    (run,) = load_runs(copy(made, tmp_path / "run", lambda result: None))
    run.result["acceptance"]["check"] = ACCEPTANCE["check"]
    for repeats, expected in ((None, told), ({"processes": 3}, f"{told} (first process)")):
        run.result["repeats"] = repeats
        (section,) = acceptance(run.result)
        assert section.texts == [f"{expected}."]
        assert acceptance_tables.positions_table(run.result).notes == [expected]


EVALUATED = ["/opt/lib/ipykernel_launcher.py", "-f", "/run/k.json", "--config-dir=/other"]


@pytest.mark.parametrize(("argv", "together"), [
    (["specbench", "--config-dir=/own", "gamma=1,2"], "python -m specbench --config-dir=/own gamma=1,2"),
    (["/opt/bin/specbench", "gamma=1,2"], "python -m specbench gamma=1,2"),
    (["/opt/specbench/__main__.py", "-m", "gamma=1,2"], "python -m specbench -m gamma=1,2"),
    (["/opt/specbench/compare.py", "gamma=1,2"], "python -m specbench.compare gamma=1,2"),
    (EVALUATED, "python -m specbench gamma=3"),
    (["/home/compare/__main__.py", "x"], "python -m specbench gamma=3"),
    ([], "python -m specbench gamma=3"),
    (None, "python -m specbench gamma=3"),
])  # fmt: skip
def test_a_command_is_one_of_this_program(argv, together):
    run = StoredRun(Path("x"), {"provenance": {"argv": argv}, "overrides": ["gamma=3"]}, {})
    assert commands([run, run], together=True) == [together]
    folder = " --config-dir /own" if argv and "--config-dir=/own" in argv else ""
    assert commands([run], together=False) == [f"python -m specbench{folder} gamma=3"]


PASSED, FAILED, LOSSY, UNTESTED = ({"verdict": verdict} for verdict in ("passed", "failed", "lossy", "untested"))
UNSTEADY = {"steady": False, "reasons": ["others ran"]}


def swept(*runs):
    """Stored runs with what a lead reads, from (drafter, speedup, verdict, machine)."""
    return [StoredRun(Path(name), {"config": {}, "lossless": lossless, "machine": machine, "repeats": None,
                                   "provenance": {"device": "a CPU", "threads": 2},
                                   "counts": {"drafted": int(name != "none")},
                                   "speedup": {"measured": speedup, "clusters": 12,
                                               "ci95": [speedup - 0.1, speedup + 0.1]}},
                      {"drafter": name}) for name, speedup, lossless, machine in runs]  # fmt: skip


SLOW_RUN, FAST_RUN = ("a", 1.2, PASSED, None), ("b", 1.9, PASSED, None)


@pytest.mark.parametrize(("runs", "expected"), [
    ([SLOW_RUN, FAST_RUN], "Fastest of 2: drafter b, 1.90x (1.80 to 2.00); its interval is above all others'."),
    ([SLOW_RUN, FAST_RUN, ("c", 3.0, FAILED, None)],
     "Fastest of 2 (1 more FAILED the losslessness test): drafter b, 1.90x (1.80 to 2.00); its interval is above"),
    ([SLOW_RUN, ("c", 3.0, FAILED, None)], "drafter a: 1.20x (1.10 to 1.30) (1 more FAILED the losslessness test)."),
    ([("b", 1.9, FAILED, None), ("c", 3.0, FAILED, None)],
     "Use none: the output of all 2 runs FAILED the losslessness test."),
    ([("c", 3.0, FAILED, None)], "Use none: the output of the run FAILED the losslessness test."),
    ([SLOW_RUN, ("b", 1.9, LOSSY, None)],
     "Fastest of 2: drafter b, 1.90x (1.80 to 2.00); its interval is above all others'; not lossless by choice."),
    ([("a", 1.2, LOSSY, UNSTEADY), ("b", 1.9, UNTESTED, UNSTEADY)],
     "Fastest of 2: drafter b, 1.90x (1.80 to 2.00); its interval is above all others'; losslessness is untested; "
     "the machine was not steady in 2 of 2 runs."),
    ([("a", 0.99, PASSED, None), ("b", 0.8, PASSED, None)],
     "None gains: leave it off (best: drafter a, 0.99x plain decoding's speed (0.89 to 1.09)); slower than plain "
     "decoding: drafter b."),
    ([("none", 1.3, PASSED, None), SLOW_RUN],
     "The fastest way drafts nothing: drafter none, 1.30x; best of those that draft: drafter a, 1.20x plain decoding's "
     "speed (1.10 to 1.30)."),
])  # fmt: skip
def test_the_fastest_run_has_the_target_s_output(runs, expected):
    (told,) = fastest(swept(*runs))
    assert told.startswith(expected)


@pytest.mark.parametrize(("share", "told"), [
    (1.0, "No gain is shown: leave it off, or measure more processes (best: drafter b"),
    (0.1, "Fastest of 3: drafter b"),
])  # fmt: skip
def test_three_processes_tell_a_gain_whose_variance_is_mostly_of_prompts(share, told):
    runs = swept(("a", 1.1, PASSED, None), ("b", 1.15, PASSED, None), ("c", 1.05, PASSED, None))
    for one in runs:
        one.result["repeats"] = {"processes": 3}
        one.result["speedup"]["process_share"] = share
    (found,) = fastest(runs)
    assert found.startswith(told)


def test_only_runs_of_the_same_work_on_one_machine_are_ranked():
    runs = swept(SLOW_RUN, FAST_RUN, ("c", 3.0, PASSED, None))
    works = {"temperature": 1, "verdict_tokens": 500}, {"temperature": 1.0, "verdict_tokens": 9}, {"temperature": 0}
    for one, work in zip(runs, works, strict=True):
        one.result["config"] = work
        one.keys |= {key: f"{value:g}" for key, value in work.items()}
    opening, first, second = fastest(runs)
    assert opening == "Ranked in 2 groups, each of the same work on one machine: they differ in temperature."
    assert first.startswith("At temperature 1: fastest of 2: drafter b, 1.90x")
    assert second.startswith("At temperature 0: drafter c: 3.00x")
    runs[0].result["provenance"] = {"device": "another CPU", "threads": 2}
    assert "differ in temperature, machine" in fastest(runs)[0] and len(fastest(runs)) == 4


def test_a_lead_of_many_bad_runs_is_short():
    runs = [(f"drafter{n}", 1 + n / 99, (FAILED, UNTESTED, LOSSY)[n % 3], UNSTEADY) for n in range(60)]
    (told,) = fastest(swept(*runs))
    assert "of 40 (20 more FAILED" in told and "not steady in 60 of 60 runs" in told and len(told) < 240


def test_a_ranking_leaves_out_what_failed(compared):
    (entry,) = comparisons(compared, load_runs(compared))
    first, second = entry["runs"]
    first["result"]["lossless"] = FAILED
    assert ranking(entry) == (
        "At temperature 0: b is the fastest of 1 way (1 more FAILED the losslessness test): "
        "1.10x plain decoding's speed (1.20 to 2.00)."
    )
    second["result"] |= {"lossless": UNTESTED, "machine": UNSTEADY}
    assert ranking(entry).endswith("; losslessness is untested; the machine was not steady in 1 of 2 runs.")
    second["result"]["lossless"] = FAILED
    assert ranking(entry) == "At temperature 0: use none: the output of all 2 ways FAILED the losslessness test."


@pytest.mark.parametrize(("key", "maps"), [("temperature", 2), ("data.limit", 0), ("logger.mode", 0)])
def test_a_map_is_not_over_how_much_was_measured(key, maps):
    assert len(maps_of(runs_of(*(({"gamma": g, key: value}, 0.5) for g in "12" for value in "34")))) == maps


@pytest.mark.parametrize("gamma", only([0], [0, 2]))
def test_a_run_that_drafts_nothing_says_nothing_of_drafts(gamma, good, monkeypatch, tmp_path, capsys):
    """Of one request: nothing is called slower or faster. With gamma=2 all of the words are there."""
    words = small(f"gamma={gamma}", "temperature=0", "executor=eager", "drafter=random", "logger=none", "data.limit=1",
                  "max_new_tokens=4", f"target.path={good}")  # fmt: skip
    with steady():
        assert call([*words, "hydra.run.dir=D"], monkeypatch, tmp_path) == 0
    printed = capsys.readouterr().out
    write_report(tmp_path / "D", load_runs(tmp_path / "D"))
    page = Page.of(tmp_path / "D")
    cells = " ".join(" ".join(row) for table in page.tables for row in table)
    drafted = gamma > 0
    for told in ("drafts for", "alpha", "block efficiency", "verify call", "gamma*", "by replay", "in-sample"):
        assert (told in printed) == drafted, told
    for told in ("Which gamma", "The text as it came about"):
        assert (told in page.headings) == drafted, told
    assert ("block efficiency" in cells) == drafted and ("Nothing was drafted" in printed) != drafted
    assert "slower" not in printed and "faster" not in printed and "rest of a round" in printed
