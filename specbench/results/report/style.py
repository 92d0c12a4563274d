"""The style of figures, and their files: PNG, SVG, and SVG inside a page that may be light or dark."""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
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


def finish(figure: Figure, axes: Any, x: str = "", y: str = "", *, low: float | None = None,
           high: float | None = None, whole: bool = False, grid: str = "both",
           legend: str = "outside upper left", **looks: Any) -> Figure:  # fmt: skip
    """Names both axes, limits the upright one, and draws a grid and the legend, whose looks are arguments of
    matplotlib's; `whole`: the other axis counts. Returns the figure."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if low is not None or high is not None:
        axes.set_ylim(low, high)
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if grid:
        axes.grid(axis=grid)
    if legend:
        options: Any = {"loc": legend, **looks}
        figure.legend(**options)
    return figure


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """A row of the figure for each name, the first one on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def save_figure(make: Callable[[], Figure], path: Path) -> str:
    """Writes path.png and path.svg, and returns an SVG element in the page's own text colour."""
    with plt.rc_context(style(PAGE_INK)):
        figure, stream = make(), io.StringIO()
        _lay_out(figure)
        _draw(figure, path.with_name(f"{path.name}.png"), stream)
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
    figure.set_layout_engine("none")


def _draw(figure: Figure, png: Path, svg: io.StringIO) -> None:
    """Draws both files by the canvases themselves: `savefig` would lay each out and draw it twice."""
    FigureCanvasAgg(figure)
    figure.set_dpi(130)
    figure.canvas.print_png(png)  # type: ignore[attr-defined]
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set(facecolor="none", edgecolor="none")
    FigureCanvasSVG(figure).print_svg(svg)


def embed(svg: str, name: str) -> str:
    """An SVG file as an element of a page; `name` makes its ids unique there."""
    svg = svg[svg.index("<svg") :].replace(PAGE_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    tag = svg[: svg.index(">") + 1]
    width = float(re.findall(r'width="([\d.]+)pt"', tag)[0]) * 1.25
    fluid = re.sub(r' (width|height)="[^"]*"', "", tag)
    size = f"--whole:{width:.0f}px;--least:{min(width, NARROWEST):.0f}px"
    fluid = fluid.replace("<svg", f'<svg role="img" style="{size}"', 1)
    return svg.replace(tag, fluid, 1)
