"""Figures that several folders have. Each takes rows of results.csv."""

from collections.abc import Callable, Sequence

from common import WAYS, Row
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specbench.results.report.style import MEASURED, OTHER, THEORY

COLOURS = {"speculative": "#3b82c4", "baseline": "#9cc3e4", "generate": "#b5651d", "assisted": "#d99b5f",
           "prompt_lookup": "#e8c9a5"}  # fmt: skip


def distances(rows: Sequence[Row], name: str = "speedup") -> list[list[float]]:
    """From values to the ends of their intervals, as matplotlib's error bars want them; 0 where there is none."""
    ends = [(row.get("low") or row[name], row[name], row.get("high") or row[name]) for row in rows]
    return [[value - low for low, value, _ in ends], [high - value for _, value, high in ends]]


def by_temperature(rows: Sequence[Row], draw: Callable[[Axes, list[Row]], None], size: tuple[float, float]) -> Figure:
    """A panel of this size for each temperature."""
    temperatures = sorted({row["temperature"] for row in rows})
    width, height = size[0] * len(temperatures), size[1]
    figure, panels = plt.subplots(1, len(temperatures), figsize=(width, height), squeeze=False)
    for axes, temperature in zip(panels[0], temperatures, strict=True):
        draw(axes, [row for row in rows if row["temperature"] == temperature])
        axes.set_title(f"temperature {temperature:g}")
    return figure


def named(axes: Axes, names: Sequence[str], what: str) -> None:
    """Names from top to bottom, and `what` along the bottom with a line at 1."""
    axes.axvline(1, color=OTHER, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x")
    axes.set_xlabel(what)


def legend(figure: Figure, columns: int) -> None:
    """One legend below all panels."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)


def speedups(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """Measured speedups with their intervals, a line for each row."""
    values = [row["speedup"] for row in rows]
    axes.errorbar(values, range(len(rows)), xerr=distances(rows), fmt="o", color=MEASURED, capsize=3,
                  label="measured, 95 % interval")  # fmt: skip
    named(axes, [row[name] for row in rows], "speedup over plain decoding")


def measured_and_predicted(rows: Sequence[Row], name: str) -> Figure:
    """Speedups of what the column `name` says, beside Theorem 3.8 and its corrected form, a panel for each
    temperature."""

    def draw(axes: Axes, here: Sequence[Row]) -> None:
        for key, marker, size, label in (
            ("theorem_3_8", "D", 6, "Theorem 3.8"),
            ("corrected", "|", 12, "corrected: v and o as measured"),
        ):
            found = [row.get(key, float("nan")) for row in here]
            axes.plot(found, range(len(here)), marker, color=THEORY, markersize=size, mew=1.5, mfc="none", label=label)
        speedups(axes, here, name)

    longest = max(sum(row["temperature"] == t for row in rows) for t in {row["temperature"] for row in rows})
    figure = by_temperature(rows, draw, (5.6, 1.6 + 0.3 * longest))
    legend(figure, 3)
    return figure


def ways(rows: Sequence[Row], names: Sequence[str]) -> Figure:
    """Tokens a second of every way of decoding, a group of bars for each row, which the columns `names` name."""
    figure, axes = plt.subplots(figsize=(9, 1 + 0.95 * len(rows)))
    there = [way for way in WAYS if f"{way}_tokens_per_second" in rows[0]]
    height = 0.82 / len(there)
    for place, way in enumerate(there):
        rates = [row[f"{way}_tokens_per_second"] for row in rows]
        y = [i + (place - (len(there) - 1) / 2) * height for i in range(len(rows))]
        bars = axes.barh(y, rates, height * 0.92, color=COLOURS[way], label=WAYS[way])
        labels = [_rate(rate, row) for rate, row in zip(rates, rows, strict=True)]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), ["\n".join(f"{name} {_word(row[name])}" for name in names) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second of decoding (and the multiple of generate() in the same run)")
    axes.margins(x=0.14, y=0.02)
    legend(figure, len(there))
    return figure


def _rate(rate: float, row: Row) -> str:
    """Tokens a second, and the multiple of generate()'s where the run had it beside it."""
    yardstick = row.get("generate_tokens_per_second")
    return f"{rate:.0f}" if yardstick is None else f"{rate:.0f}  ({rate / yardstick:.1f}x)"


def _word(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
