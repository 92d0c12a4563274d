"""Figures draw the numbers of results.json."""

import warnings

import pytest
from matplotlib.colors import to_hex
from stored import stored

from specbench.report import page, several
from specbench.report.files import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return stored(tmp_path_factory.mktemp("one"))


def line(axes, colour: str, marker: str):
    """The points of all lines of a colour and marker."""
    found = [own for own in axes.lines if to_hex(own.get_color()) == colour and own.get_marker() == marker]
    return [(float(x), float(y)) for own in found for x, y in zip(*own.get_data(), strict=True)]


def texts(axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_the_bars_of_the_accounting_lead_from_one_to_the_speedup(run):
    axes = page.accounting(run).axes[0]
    *steps, measured = axes.patches
    ends = [bar.get_x() + bar.get_width() for bar in steps]
    begins = [bar.get_x() for bar in steps]
    assert begins == pytest.approx([1, *ends[:-1]]) and begins[0] == 1
    speedup = run.results["speedup"]
    factors = [entry["value"] for entry in speedup["accounting"] if entry["factor"] != "rows"]
    assert [end / begin for begin, end in zip(begins, ends, strict=True)] == pytest.approx(factors)
    assert measured.get_x() + measured.get_width() == pytest.approx(speedup["measured"])
    assert any(list(own.get_xdata()) == pytest.approx(speedup["ci95"]) for own in axes.lines)


def test_the_measurement_stands_beside_the_prediction_over_gamma(run):
    axes = page.over_gamma(run).axes[0]
    gamma, speedup = run.results["config"]["gamma"], run.results["speedup"]
    assert dict(line(axes, page.THEORY, "."))[gamma] == pytest.approx(speedup["theorem_3_8"])
    assert line(axes, page.MEASURED, "o") == [(gamma, speedup["measured"])]
    without = run.results | {"alpha": run.results["alpha"] | {"mean": None}}
    assert page.over_gamma(Run(run.folder, without)) is None


def test_speedups_stand_beside_their_predictions():
    rows = [("a", 1.5, (1.2, 1.8), 1.6), ("b", 0.9, None, None), ("c", None, None, 1.1)]
    axes = several.speedups(rows).axes[0]
    assert texts(axes) == ["a", "b", "c"]
    assert line(axes, page.MEASURED, "o") == [(1.5, 0), (0.9, 1)]
    assert line(axes, page.THEORY, "D") == [(1.6, 0), (1.1, 2)]


def named(run: Run, *words: str, measured: float = 1.5) -> Run:
    """The run under other overrides, with another speedup."""
    details = run.results["details"] | {"overrides": list(words)}
    speedup = run.results["speedup"] | {"measured": measured}
    return Run(run.folder, run.results | {"details": details, "speedup": speedup}, " ".join(words))


def test_a_sweep_over_numbers_is_a_line_for_each_other_setting(run):
    runs = [
        named(run, f"gamma={gamma}", f"drafter={drafter}", "t=0", measured=gamma + shift)
        for gamma in (5, 1, 3)
        for drafter, shift in (("x", 0.0), ("y", 0.5))
    ]
    axes = several.sweep_lines(runs).axes[0]
    assert axes.get_xlabel() == "gamma"
    assert line(axes, several.LINES[0], "o") == [(1, 1), (3, 3), (5, 5)]
    assert line(axes, several.LINES[1], "o") == [(1, 1.5), (3, 3.5), (5, 5.5)]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[:2] == ["drafter=x", "drafter=y"]


def test_a_sweep_without_three_numbers_has_no_lines(run):
    assert several.sweep_lines([named(run, "gamma=1"), named(run, "gamma=2")]) is None
    assert several.sweep_lines([named(run, f"drafter={name}") for name in "abc"]) is None
    assert several.sweep_lines([named(run, "gamma=1"), named(run, "gamma=2"), named(run)]) is None
    assert several.sweep_lines([named(run)]) is None
    swept = [{"gamma": "1", "t": number} for number in ("-1e3", "0", "2")]
    assert several.swept_number(swept) == "t" and several.swept_number([*swept, {"t": "inf"}]) is None


def test_labels_are_no_formulas_and_have_a_bound():
    rows = [("$\\frac{1}{2", 1.0, None, None), ("long " * 50, 1.0, None, None), ("日本語\x1b", 1.0, None, None)]
    figure = several.speedups(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = page.svg(figure)
    assert "frac{1}{2" in text and "\x1b" not in text
    assert max(len(label) for label in texts(figure.axes[0])) < 80
