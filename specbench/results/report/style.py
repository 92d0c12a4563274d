"""The style of figures, and their files: PNG, SVG, and SVG inside a page that may be light or dark."""

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Colours that stay apart for the colour-blind, on white and on black. No figure tells things apart by them alone:
# markers, dashes, hatches or labels differ too.
MEASURED, THEORY, GOOD, BAD, OTHER = "#0077bb", "#ee7733", "#009988", "#cc3311", "#8a8f98"
LAPS = {"draft": "#0077bb", "verify": "#ee7733", "accept": "#009988", "host": "#33bbee"}
HATCHES = {"draft": "", "verify": "///", "accept": "...", "host": "xxx"}  # of the laps
SERIES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8a8f98"]
MARKERS = "osD^vPX*"  # of a series, as many as colours
INK = "#24292f"
PAGE_INK = "#24292e"  # stands for the page's text colour: as INK to the eye, and no other colour of a figure
HALF = (5.6, 3.6)  # inches of a figure that shares a line of a page with another
GROWTH, MOST_GROWTHS = 1.4, 6  # of a figure whose labels leave its axes no room
MOST_PANELS, PANELS_ACROSS = 12, 3  # of a figure
NARROWEST = 600  # pixels of a figure on a page; narrower screens scroll it


def style(ink: str) -> Any:
    """matplotlib's settings for text in the colour `ink`."""
    return {
        "svg.fonttype": "none", "text.parse_math": False,
        "font.family": "sans-serif", "font.size": 10, "figure.constrained_layout.use": True,
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": 11,
        "axes.prop_cycle": cycler(color=SERIES), "legend.frameon": False, "hatch.linewidth": 0.6,
        "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink,
        "axes.titlecolor": ink, "xtick.color": ink, "ytick.color": ink, "grid.color": OTHER, "grid.alpha": 0.25,
    }  # fmt: skip


def finish(figure: Figure, x: str = "", y: str = "", *, low: float | None = None, high: float | None = None,
           whole: bool = False, grid: str = "both", ncols: int = 4) -> Figure:  # fmt: skip
    """Names both axes, limits the upright one, and draws grids and a legend, in which each label stands once; `whole`:
    the other axis counts. Returns the figure."""
    labels: dict[str, Any] = {}
    for axes in figure.axes:
        if low is not None or high is not None:
            axes.set_ylim(low, high)
        if whole:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if grid:
            axes.grid(axis=grid)  # type: ignore[arg-type]
        labels |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(figure.axes) == 1:
        figure.axes[0].set(xlabel=x, ylabel=y)
    else:
        figure.supxlabel(x, fontsize=10)
        figure.supylabel(y, fontsize=10)
    if labels:
        figure.legend(labels.values(), labels.keys(), loc="outside upper left", ncols=ncols, fontsize=8)
    return figure


def draw_rows(names: Sequence[str], width: float = 8) -> tuple[Figure, Any]:
    """A figure with a row for each name, the first one on top."""
    figure, axes = plt.subplots(figsize=(width, 1.4 + 0.36 * len(names)))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    return figure, axes


def draw_panels(parts: Mapping[str, Any], width: float, height: float, across: int = PANELS_ACROSS,
                **shared: Any) -> tuple[Figure, list[tuple[Any, Any]]]:  # fmt: skip
    """A figure with a panel for each of the first parts, of this size in inches; returns each part with its axes."""
    shown = list(parts.items())[:MOST_PANELS]
    across = min(across, len(shown))
    down = -(-len(shown) // across)
    size = (max(6.0, 0.6 + width * across), 0.9 + height * down)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, **shared)
    for panel, (name, _) in zip(axes.flat, shown, strict=False):
        panel.set_title(textwrap.fill(name, 38), fontsize=9)
    for empty in axes.flat[len(shown) :]:
        empty.remove()
    return figure, [(part, panel) for (_, part), panel in zip(shown, axes.flat, strict=False)]


def draw_value(axes: Any, value: float, ci95: Sequence[float] | None, **looks: Any) -> None:
    """A point with its interval at (x, y), of which `looks` has one; without an interval if there were too few
    prompts."""
    errors = np.abs(np.array(ci95 or (value, value))[:, None] - value)
    across = {"x": value, "xerr": errors} if "y" in looks else {"y": value, "yerr": errors}
    axes.errorbar(**across, **{"capsize": 3, "markersize": 6} | looks)


def draw_estimates(axes: Any, places: Iterable[float], estimates: Iterable[Mapping[str, Any]], look: str, colour: str,
                   label: str) -> None:  # fmt: skip
    """Means +- 1.96 standard errors, of the estimates that have a mean; alone where there is no error."""
    known = [(x, own) for x, own in zip(places, estimates, strict=False) if own["mean"] is not None]
    errors = np.array([own["stderr"] for _, own in known], float)  # None is not a number
    axes.errorbar([x for x, _ in known], [own["mean"] for _, own in known], yerr=1.96 * errors, fmt=look, color=colour,
                  label=label, markersize=5, capsize=2, linewidth=1.2)  # fmt: skip


def save_figure(make: Callable[[], Figure], path: Path) -> str:
    """Writes path.png and path.svg, and returns an SVG element in the page's own text colour."""
    with plt.rc_context(style(PAGE_INK)):
        figure, stream = make(), io.StringIO()
        _lay_out(figure)
        figure.savefig(f"{path}.png", dpi=130)
        figure.savefig(stream, format="svg", transparent=True)
        plt.close(figure)
    svg = stream.getvalue()
    opening = svg.index(">", svg.index("<svg")) + 1
    white = f'{svg[:opening]}<rect width="100%" height="100%" fill="white"/>{svg[opening:]}'
    path.with_name(f"{path.name}.svg").write_text(white, encoding="utf-8")
    return embed(svg, path.name)


def _lay_out(figure: Figure) -> None:
    """Finds the places of axes and labels once, not again for each file. A figure whose labels leave no room for its
    axes grows until they do; matplotlib would warn, and draw one over the other."""
    if (layout := figure.get_layout_engine()) is None:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="constrained_layout not applied")
        for _ in range(MOST_GROWTHS):
            try:
                layout.execute(figure)
                break
            except UserWarning:
                figure.set_size_inches(*(GROWTH * figure.get_size_inches()))
    with plt.rc_context({"figure.constrained_layout.use": False}):  # None is that setting's engine
        figure.set_layout_engine(None)  # with an engine savefig draws once more


def embed(svg: str, name: str) -> str:
    """An SVG file as an element of a page; `name` makes its ids unique there."""
    svg = svg[svg.index("<svg") :].replace(PAGE_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", svg)
    tag = svg[: svg.index(">") + 1]
    width = float(re.findall(r'width="([\d.]+)pt"', tag)[0]) * 1.25
    fluid = re.sub(r' (width|height)="[^"]*"', "", tag)
    size = f"--whole:{width:.0f}px;--least:{min(width, NARROWEST):.0f}px"
    fluid = fluid.replace("<svg", f'<svg role="img" style="{size}"', 1)
    return svg.replace(tag, fluid, 1)
