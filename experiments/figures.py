"""Figures that several folders have. Each takes rows of results.csv."""

from collections.abc import Callable, Sequence

from common import Row
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specbench.results.report.style import MEASURED, OTHER


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


def speedups(axes: Axes, rows: Sequence[Row], names: Sequence[str], what: str) -> None:
    """The speedup of each row, with its interval, below each other."""
    for place, row in enumerate(rows):
        axes.plot([row.get("low", row["speedup"]), row.get("high", row["speedup"])], [place, place], color=MEASURED)
        axes.plot(row["speedup"], place, "o", color=MEASURED)
    named(axes, names, what)


def legend(figure: Figure, columns: int) -> None:
    """One legend below all panels."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)


def block_efficiency(rows: Sequence[Row], name: str) -> Figure:
    """Tokens a target call of what the column `name` says, with 95 % intervals, a panel for each temperature."""

    def draw(axes: Axes, here: list[Row]) -> None:
        errors = [1.96 * row.get("tau_stderr", 0) for row in here]
        axes.errorbar([row["tau"] for row in here], range(len(here)), xerr=errors, fmt="o", color=MEASURED, capsize=3)
        named(axes, [row[name] for row in here], "tokens a target call")

    longest = max(sum(row["temperature"] == t for row in rows) for t in {row["temperature"] for row in rows})
    return by_temperature(rows, draw, (5.2, 1.2 + 0.3 * longest))
