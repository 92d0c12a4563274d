"""The stock module's p: how far rounding explains a difference, and no further."""

from dataclasses import replace

import pytest
import torch

from specbench.decoding.sampling import Sampling
from specbench.measure.verdict import distance, tie, tolerance
from specbench.models.reference_forward import penalised

SAMPLINGS = [
    Sampling(), Sampling(0.7), Sampling(1.3, top_k=5), Sampling(top_p=0.8), Sampling(0.5, top_k=9, top_p=0.9),
    Sampling(top_k=1), Sampling(top_p=0.3), Sampling(0.5, top_p=0.5),
]  # fmt: skip


def logits(seed: int = 4) -> torch.Tensor:
    return torch.randn(400, 40, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_decoder_s_own_standardisation_is_at_no_distance(sampling: Sampling) -> None:
    """Two programs for section 2.2; a wrong temperature, top-k or top-p is seen."""
    tv, limit = distance(logits(), sampling.probabilities(logits()), torch.float32, sampling)
    assert (tv < 1e-6).all() and (tv <= limit).all()
    wrong = [replace(sampling, temperature=1.02 * sampling.temperature)] if sampling.top_k != 1 else []
    if sampling.top_k or sampling.top_p < 1:
        wrong += [replace(sampling, top_k=0, top_p=1.0)]
    if sampling.top_k:
        wrong += [replace(sampling, top_k=sampling.top_k + 1)]
    if sampling.top_p < 1:
        wrong += [replace(sampling, top_p=sampling.top_p + 0.05)]
    for other in wrong:
        tv, limit = distance(logits(), other.probabilities(logits()), torch.float32, sampling)
        assert (tv > limit).any(), other


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_rounding_moves_is_explained(sampling: Sampling, dtype: torch.dtype) -> None:
    """The decoder's logits differ by one rounding of each; at many positions another token passes top-k or top-p."""
    noise = (torch.rand(400, 40, generator=torch.Generator().manual_seed(5)) - 0.5) * torch.finfo(dtype).eps * 3
    tv, limit = distance(logits(), sampling.probabilities(logits() + noise), dtype, sampling)
    assert (tv <= limit).all()
    if sampling.top_k or sampling.top_p < 1:
        forgetful = replace(sampling, top_k=0, top_p=1.0).probabilities(logits() + noise)
        tv, limit = distance(logits(), forgetful, dtype, sampling)
        assert tv.mean() > 0.25 * limit.mean()


def test_a_tie_of_16_bits_is_counted_in_steps_of_the_best_logit() -> None:
    """Its distance to the next number of the dtype, whatever sign and size the others have."""
    for best, other, expected in ((17.0, 1.0, 4 * 0.125), (-17.0, 17.5, 4 * 0.125), (1.5, 60.0, 0.25)):
        x = torch.tensor([best, other], dtype=torch.bfloat16)
        step, largest = x.abs().nextafter(torch.full_like(x, torch.inf)).float() - x.abs().float()
        of = torch.tensor([[best, -other]])
        assert float(tie(of, torch.bfloat16, Sampling(temperature=0))) == expected == max(4 * step, largest)
    assert tie(of, torch.float32, Sampling(temperature=0)) == tolerance(of, torch.float32, Sampling())
    assert tie(of, torch.bfloat16, Sampling(temperature=0, repetition_penalty=2.0)) == 0.5


def test_the_penalty_is_that_of_the_tokens_before() -> None:
    text = torch.tensor([[3, 7, 1, 3]])
    made = penalised(logits()[:2], text, 2, Sampling(repetition_penalty=2.0))
    for row, seen in enumerate(([3, 7], [3, 7, 1])):
        own = logits()[row].clone()
        own[seen] = torch.where(own[seen] < 0, own[seen] * 2, own[seen] / 2)
        assert torch.equal(made[row], own)
    assert torch.equal(penalised(logits()[:2], text, 2, Sampling()), logits()[:2])
