"""The style of figures, and their files: PNG, SVG, and SVG inside a page that may be light or dark."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

MEASURED, THEORY, GOOD, BAD, OTHER = "#3b82c4", "#d9822b", "#3c9d5d", "#cf4b4b", "#8a8f98"
LAPS = {"draft": "#3b82c4", "verify": "#8a63d2", "accept": "#3c9d5d", "host": "#d9822b"}
SERIES = ["#3b82c4", "#d9822b", "#3c9d5d", "#8a63d2", "#cf4b4b", "#2aa5a0", "#b58a2f", "#c2609c"]
INK = "#24292f"
PAGE_INK = "#123456"  # stands for the page's text colour


def style(ink: str) -> Any:
    """matplotlib's settings for text in the colour `ink`."""
    return {
        "svg.fonttype": "none", "text.parse_math": False,
        "font.family": "sans-serif", "font.size": 10, "figure.constrained_layout.use": True,
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": 11,
        "axes.prop_cycle": cycler(color=SERIES), "legend.frameon": False,
        "savefig.transparent": ink != INK, "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink,
        "axes.titlecolor": ink, "xtick.color": ink, "ytick.color": ink, "grid.color": OTHER, "grid.alpha": 0.25,
    }  # fmt: skip


def save(make: Callable[[], Figure], path: Path) -> str:
    """Writes path.png and path.svg, and returns an SVG element in the page's own text colour."""
    with plt.rc_context(style(INK)):
        figure = make()
        figure.savefig(path.with_name(f"{path.name}.png"), dpi=130)
        figure.savefig(path.with_name(f"{path.name}.svg"))
        plt.close(figure)
    with plt.rc_context(style(PAGE_INK)):
        figure, stream = make(), io.StringIO()
        figure.savefig(stream, format="svg")
        plt.close(figure)
    return embed(stream.getvalue(), path.name)


def embed(svg: str, name: str) -> str:
    """An SVG file as an element of a page; `name` makes its ids unique there."""
    svg = svg[svg.index("<svg") :].replace(PAGE_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    tag = svg[: svg.index(">") + 1]
    width = float(re.findall(r'width="([\d.]+)pt"', tag)[0])
    fluid = re.sub(r' (width|height)="[^"]*"', "", tag)
    fluid = fluid.replace("<svg", f'<svg role="img" style="width:100%;max-width:{width * 1.25:.0f}px;height:auto"', 1)
    return svg.replace(tag, fluid, 1)
