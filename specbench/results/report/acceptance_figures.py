"""Figures of which guesses are accepted, from `acceptance` in results.json."""

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from specbench.results.fields import ResultDict
from specbench.results.report.style import GOOD, HALF, MEASURED, OTHER, THEORY, draw_estimates, finish


def lengths_figure(found: ResultDict) -> Figure:
    """Rounds by the number of guesses that they accepted."""
    figure, axes = plt.subplots(figsize=HALF)
    total = max(1, sum(found["lengths"]))
    bars = axes.bar(
        range(len(found["lengths"])), [100 * count / total for count in found["lengths"]], color=MEASURED, width=0.7
    )
    axes.bar_label(bars, [f"{count:,}" for count in found["lengths"]], padding=3, fontsize=8)
    axes.margins(y=0.12)
    return finish(figure, "accepted guesses of a round", "% of rounds", whole=True, grid="")


def positions_figure(found: ResultDict, alpha: float | None) -> Figure:
    """The probability that a guess is accepted, given that those before it were, and together with them."""
    figure, axes = plt.subplots(figsize=HALF)
    places = range(1, len(found["joint"]) + 1)
    draw_estimates(axes, places, found["conditional"], "o-", MEASURED, "accepted, if those before were")
    draw_estimates(axes, places, found["joint"], "s--", GOOD, "accepted with all before")
    if alpha is not None and places:
        axes.plot(places, [alpha**place for place in places], ":", color=THEORY, label="alpha to that power")
    return finish(figure, "place of the guess in its round", "probability", low=0, high=1.02, whole=True, grid="y",
                  ncols=2)  # fmt: skip


def entropy_figure(found: ResultDict) -> Figure:
    """Alpha where the entropy of the drafter's, or of the target's distribution is in a bin."""
    bins_of = found["by_entropy"]
    edges = sorted({(own["low"], own["high"]) for bins in bins_of.values() for own in bins}, key=lambda edge: edge[0])
    places = {low: place for place, (low, _) in enumerate(edges)}
    figure, axes = plt.subplots(figsize=HALF)
    looks = {"drafter": ("o-", MEASURED, -0.06), "target": ("s--", THEORY, 0.06)}
    for model, bins in bins_of.items():
        look, colour, aside = looks.get(model, ("^:", OTHER, 0.0))
        beside = [places[own["low"]] + aside for own in bins]
        draw_estimates(axes, beside, [own["alpha"] for own in bins], look, colour, f"of the {model}")
    names = [f"{low:g}+" if high is None else f"{low:g}-{high:g}" for low, high in edges]
    axes.set_xticks(range(len(edges)), names, fontsize=8)
    return finish(figure, "entropy, nats", "alpha", low=0, high=1.02, grid="y")


def calibration_figure(found: ResultDict) -> Figure:
    """The target's probability of the drafter's most likely token, and how often guesses are accepted there, by the
    drafter's own probability of that token."""
    figure, axes = plt.subplots(figsize=HALF)
    bins = found["calibration"]["bins"]
    known = [own for own in bins if own["positions"] and own["agreement"] is not None]
    axes.plot([0, 1], [0, 1], ":", color=OTHER, label="calibrated")
    axes.plot([own["confidence"] for own in known], [own["agreement"] for own in known], "o-", color=MEASURED,
              markersize=5, label="p of that token")  # fmt: skip
    middles = [(own["low"] + own["high"]) / 2 for own in bins]
    draw_estimates(axes, middles, [own["accepted"] for own in bins], "s--", THEORY, "accepted / tested")
    axes.set_xlim(0, 1.02)
    return finish(figure, "largest q", low=0, high=1.02)
