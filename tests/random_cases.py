"""Random distributions and bits, and the chi-square of draws."""

import numpy as np
import torch

ROWS, N, V = 20_000, 4, 16


def random_distributions(shape, seed, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, V, generator=generator) * spread).softmax(-1)


def random_bits(shape, generator):
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)


def chi_square_fits(counts, distribution):
    expected = distribution * counts.sum()
    degrees = len(distribution) - 1
    return ((counts - expected) ** 2 / expected).sum() < degrees + 10 * np.sqrt(2 * degrees)
