"""Drafts that end by the drafter's own estimate of acceptance: exact texts, and calibrated estimates."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distribution_cases import FEW, Distribution, decode, worst_excess

from specbench.policies.stopping import EstimateGamma

EXPERIMENT = runpy.run_path(str(Path(__file__).parents[2] / "experiments/confidence_head.py"))
calibration_error, sequential_temperatures = (EXPERIMENT[n] for n in ("calibration_error", "sequential_temperatures"))


def ended_by_the_guess(draft):
    """Negative control: the draft ends in front of a guess because of that guess."""
    return replace(draft, count=torch.minimum(draft.count, (draft.tokens >= 5).int().cumprod(1).sum(1)))


@pytest.mark.parametrize("spoiled", [False, True])
def test_texts_have_the_target_distribution(spoiled, few_contexts, number_text):
    policy, counts = EstimateGamma(3, 0.3, [3.0, 2.0]), []

    def noted(draft):
        counts.append(draft.count)
        return ended_by_the_guess(draft) if spoiled else draft

    texts = decode(few_contexts, number_text, "dspark", policy=policy, spoil=noted, trials=FEW)
    assert (worst_excess(texts, Distribution(few_contexts.target)) > 1) == spoiled
    assert min(torch.cat(counts).bincount()) > 500  # it ended drafts in front of every guess


def test_sequential_temperatures_calibrate_the_estimates_of_a_run(few_contexts, number_text):
    """Of a head that is three times too sure: .181, .081 and .032 by place, and behind it .058, .019 and .004."""
    policy = EXPERIMENT["Noting"](3)
    decode(few_contexts, number_text, "dspark", policy=policy, trials=FEW)
    logits, accepted = map(torch.tensor, zip(*policy.rounds, strict=True))
    found = sequential_temperatures(logits[::2], accepted[::2])
    before, after = (EXPERIMENT["errors"](logits[1::2], accepted[1::2], own) for own in ([1.0] * 3, found))
    assert len(logits) > 5000 and all(a < b / 2.5 for a, b in zip(after, before, strict=True))


def test_each_place_has_its_temperature():
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(40_000, 3, generator=draws) * 2
    accepted = (torch.rand(logits.shape, generator=draws) < logits.sigmoid()).int().cumprod(1).sum(1)
    assert sequential_temperatures(logits * torch.tensor([3, 1, 0.5]), accepted) == pytest.approx([3, 1, 0.5], rel=0.2)
    assert calibration_error(torch.tensor([0.9, 0.9, 0.1, 0.1]), torch.tensor([True] * 4)) == pytest.approx(0.5)
