"""What the paper predicts (Leviathan, Kalman, Matias 2023), as plain functions of plain numbers.

alpha: expected acceptance rate, in [0, 1]. gamma: drafted tokens per round, >= 0.
c: drafter step time / target step time (Definition 3.7), >= 0.
"""

import math


def expected_tokens(alpha: float, gamma: float) -> float:
    """Equation 1: expected tokens per run of Algorithm 1, when betas are i.i.d. with mean alpha."""
    if alpha == 1:
        return gamma + 1
    expected: float = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return expected


def walltime_improvement(alpha: float, gamma: float, c: float) -> float:
    """Theorem 3.8: speedup over autoregressive decoding when a target call costs the same for
    1 and gamma + 1 tokens and nothing else takes time."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def corrected_improvement(block_efficiency: float, gamma: float, c: float, v: float, o: float) -> float:
    """Theorem 3.8 without its assumptions: measured tokens per round over the measured cost of a
    round, in single-token target steps (gamma drafter steps, one verify call, overhead)."""
    return block_efficiency / (gamma * c + v + o)


def operations_factor(alpha: float, gamma: float, c_hat: float) -> float:
    """Theorem 3.11: growth of total arithmetic operations; c_hat is the ratio of operations per
    token, drafter to target (Definition 3.10)."""
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def guaranteed_improvement(alpha: float, c: float) -> float:
    """Corollary 3.9: if alpha > c, some gamma gives at least this speedup (gamma = 1 does)."""
    return (1 + alpha) / (1 + c)


def optimal_gamma(alpha: float, c: float, largest: int = 64) -> int:
    """Section 3.5: the integer gamma, at most `largest`, that maximises Theorem 3.8; 0 where no
    gamma helps."""
    return max(range(largest + 1), key=lambda gamma: walltime_improvement(alpha, gamma, c))


def oracle_improvement(alpha: float, c: float) -> float:
    """Section 3.5: the bound when gamma is chosen each round by an oracle, which drafts exactly
    the tokens that will be accepted: 1 / (1 - alpha) tokens for alpha / (1 - alpha) drafter steps."""
    cost = 1 - alpha + c * alpha
    return math.inf if cost == 0 else 1 / cost
