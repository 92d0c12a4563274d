"""The noise is uniform, a race draws from its weights, and prompts and streams know nothing of one another."""

import numpy as np
import torch
from decoder_cases import V

from specbench.decoding.noise import ACCEPTANCE, PROPOSAL, RESIDUAL, exponentials, noise_bits, uniforms
from specbench.decoding.sampling import draw

TRIALS = 100_000


def bits_of(rows, positions=1):
    """The bits of as many rows, [3, rows, positions]."""
    return noise_bits(torch.randint(2**62, (rows,), generator=torch.Generator().manual_seed(0)), positions)


def test_the_noise_of_a_position_depends_on_the_prompt_alone():
    keys = torch.tensor([5, 6])
    wide, narrow = noise_bits(keys, 50), noise_bits(keys[1:], 20)
    assert torch.equal(wide[:, 1:, :20], narrow)
    assert wide.flatten().unique().numel() == wide.numel()


def test_the_noise_is_uniform_and_the_streams_are_independent():
    noise = uniforms(bits_of(20_000, 15)).flatten(1).numpy()
    counts = np.stack([np.histogram(stream, bins=64, range=(0, 1))[0] for stream in noise])
    expected = noise.shape[1] / 64
    assert (((counts - expected) ** 2 / expected).sum(1) < 63 + 10 * np.sqrt(2 * 63)).all()
    correlation = np.corrcoef(noise)[[PROPOSAL, PROPOSAL, ACCEPTANCE], [ACCEPTANCE, RESIDUAL, RESIDUAL]]
    assert (np.abs(correlation) < 5 / np.sqrt(noise.shape[1])).all()


def test_the_race_draws_from_its_weights_and_tokens_are_independent():
    bits = bits_of(TRIALS)[RESIDUAL, :, 0]
    times = exponentials(bits, V)
    assert (times > 0).all()
    assert torch.allclose(times.mean(0), torch.ones(V, dtype=torch.float64), atol=5 / TRIALS**0.5)
    correlation = np.corrcoef(times.numpy().T) - np.eye(V)
    assert np.abs(correlation).max() < 5 / TRIALS**0.5
    weights = torch.linspace(0, 3, V)
    counts = torch.bincount(draw(weights.expand(TRIALS, V), bits), minlength=V)
    expected = weights / weights.sum() * TRIALS
    assert counts[0] == 0
    assert ((counts - expected)[1:] ** 2 / expected[1:]).sum() < (V - 2) + 10 * np.sqrt(2 * (V - 2))
