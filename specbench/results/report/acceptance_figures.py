"""Figures of which guesses are accepted, from `acceptance` in results.json."""

from collections.abc import Sequence

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from specbench.results.fields import ResultDict
from specbench.results.report.style import GOOD, HALF, MEASURED, OTHER, THEORY, finish


def lengths_figure(found: ResultDict) -> Figure:
    """Rounds by the number of guesses that they accepted."""
    counts = found["lengths"]
    figure, axes = plt.subplots(figsize=HALF)
    total = max(1, sum(counts))
    axes.bar(range(len(counts)), [100 * count / total for count in counts], color=MEASURED, width=0.7)
    for place, count in enumerate(counts):
        axes.annotate(f"{count:,}", (place, 100 * count / total), (0, 3), textcoords="offset points", ha="center",
                      fontsize=8)  # fmt: skip
    axes.margins(y=0.12)
    return finish(figure, axes, "accepted guesses of a round", "% of rounds", whole=True, grid="", legend="")


def positions_figure(found: ResultDict, alpha: float | None) -> Figure:
    """The probability that a guess is accepted, given that those before it were, and together with them."""
    figure, axes = plt.subplots(figsize=HALF)
    for key, look, colour, name in (
        ("conditional", "o-", MEASURED, "accepted, if those before were"),
        ("joint", "s--", GOOD, "accepted with all before"),
    ):
        places, means, errors = _known(found[key])
        axes.errorbar(places, means, yerr=errors, fmt=look, color=colour, markersize=5, capsize=3, label=name)
    if alpha is not None and found["joint"]:
        places = list(range(1, len(found["joint"]) + 1))
        axes.plot(places, [alpha**place for place in places], ":", color=THEORY, label="alpha to that power")
    return finish(figure, axes, "place of the guess in its round", "probability", low=0, high=1.02, whole=True,
                  grid="y", ncols=2, fontsize=8)  # fmt: skip


def _known(estimates: Sequence[ResultDict]) -> tuple[list[int], list[float], list[float]]:
    """Places from 1, means and half widths of 95 % intervals of the estimates that have a mean."""
    known = [(place, own) for place, own in enumerate(estimates, 1) if own["mean"] is not None]
    return (
        [place for place, _ in known],
        [own["mean"] for _, own in known],
        [1.96 * (own["stderr"] or 0) for _, own in known],
    )


def entropy_figure(found: ResultDict) -> Figure:
    """Alpha where the entropy of the drafter's, or of the target's distribution is in a bin."""
    bins_of = found["by_entropy"]
    edges = sorted({(own["low"], own["high"]) for bins in bins_of.values() for own in bins}, key=lambda edge: edge[0])
    figure, axes = plt.subplots(figsize=HALF)
    looks = {"drafter": ("o-", MEASURED, -0.06), "target": ("s--", THEORY, 0.06)}
    for model, bins in bins_of.items():
        look, colour, aside = looks.get(model, ("^:", OTHER, 0.0))
        places = {edge[0]: place for place, edge in enumerate(edges)}
        known = [(places[own["low"]] + aside, own["alpha"]) for own in bins if own["alpha"]["mean"] is not None]
        errors = [1.96 * (alpha["stderr"] or 0) for _, alpha in known]
        axes.errorbar([x for x, _ in known], [alpha["mean"] for _, alpha in known], yerr=errors, fmt=look, color=colour,
                      markersize=5, capsize=3, label=f"of the {model}")  # fmt: skip
    names = [f"{low:g}+" if high is None else f"{low:g}-{high:g}" for low, high in edges]
    axes.set_xticks(range(len(edges)), names, fontsize=8)
    return finish(figure, axes, "entropy, nats", "alpha", low=0, high=1.02, grid="y", ncols=2, fontsize=8)


def calibration_figure(found: ResultDict) -> Figure:
    """The target's probability of the drafter's most likely token, and how often guesses are accepted there, by the
    drafter's own probability of that token."""
    figure, axes = plt.subplots(figsize=HALF)
    bins = found["calibration"]["bins"]
    known = [own for own in bins if own["positions"] and own["agreement"] is not None]
    axes.plot([0, 1], [0, 1], ":", color=OTHER, label="calibrated")
    axes.plot([own["confidence"] for own in known], [own["agreement"] for own in known], "o-", color=MEASURED,
              markersize=5, label="p of that token")  # fmt: skip
    tested = [own for own in bins if own["accepted"]["mean"] is not None]
    middles = [(own["low"] + own["high"]) / 2 for own in tested]
    errors = [1.96 * (own["accepted"]["stderr"] or 0) for own in tested]
    axes.errorbar(middles, [own["accepted"]["mean"] for own in tested], yerr=errors, fmt="s--", color=THEORY,
                  markersize=5, mfc="none", capsize=2, label="accepted / tested")  # fmt: skip
    axes.set_xlim(0, 1.02)
    axes.set_yticks(np.linspace(0, 1, 6))
    return finish(figure, axes, "largest q", low=0, high=1.02, ncols=3, fontsize=8)
